"""The latest use of a program: if nothing has changed since, the next call runs the same program, and does little else.

Each Python object that a call touches costs time, because the data of the previous call has evicted the interpreter
from the caches. For one image, a call of ResNet-20 took 0.53 ms, of which the kernels took 0.43. Comparing one count of
changes instead of the settings (engine/changes.py), and keeping what is the same in each call, leaves 0.46 ms.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from threading import get_ident
from typing import Any

import numpy as np

from minidl.engine.changes import latest_change
from minidl.engine.device import address, aligned
from minidl.program import checks
from minidl.program.table import WORKSPACE, Program
from minidl.program.workspace import Workspace

Batch = Mapping[str, np.ndarray]
COPIED = 1 << 16  # arrays of a batch of up to 64 KiB are copied: to find the address of an array takes longer
_kind = operator.attrgetter("shape", "dtype")


class Latest:
    """A program, and what must be true for the next call to use it.

    change: `latest_change()` before the settings were compared. roots, watched: the objects whose code runs, and the
        places that no count of changes covers (fingerprint.py). addresses: of the model's vectors.
    outputs: name of a result -> view of the workspace.
    """

    def __init__(
        self, program: Program, change: int, roots: tuple[Any, ...], watched: list[checks.Check], workspace: Workspace,
        addresses: Mapping[str, int], batch: Batch,
    ) -> None:  # fmt: skip
        self.program, self.change, self.thread = program, change, get_ident()  # some settings belong to a thread
        self.roots, self.watched, self.workspace, self.memory = roots, watched, workspace, workspace.memory
        self.outputs = {name: workspace.view(*result) for name, result in program.results.items()}
        self.kinds = [*map(_kind, batch.values())]
        self.copies = {
            name: aligned(array.size, array.dtype).reshape(array.shape)
            for name, array in batch.items()
            if array.nbytes <= COPIED
        }
        self.bases = {WORKSPACE: workspace.address, **addresses}
        self.bases |= {name: address(copy) for name, copy in self.copies.items()}

    def holds(self, roots: tuple[Any, ...], batch: Batch) -> bool:
        """Return whether nothing has changed since, and this batch has the same shapes and types."""
        if len(self.copies) < len(batch) and not all(array.flags.c_contiguous for array in batch.values()):
            return False
        return (
            self.change == latest_change()
            and self.thread == get_ident()
            and self.kinds == [*map(_kind, batch.values())]
            and self.memory is self.workspace.memory
            and all(map(operator.is_, self.roots, roots))
            and (not self.watched or checks.unchanged(self.watched))
        )

    def place(self, batch: Batch) -> dict[str, int]:
        """Return the address of each region, after the small arrays of the batch were copied to their places."""
        for name, array in batch.items():
            if name in self.copies:
                self.copies[name][...] = array
            else:
                self.bases[name] = address(array)
        return self.bases
