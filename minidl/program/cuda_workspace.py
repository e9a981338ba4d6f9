"""Memory of programs on a GPU: temporaries and results, and batches that are copied while kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidl.engine.cuda_device import Gpu
from minidl.engine.device import ALIGNMENT
from minidl.program.workspace import Workspace

SHAPES = 4  # of batches, whose memory is kept


class WorkspaceOnGpu(Workspace):
    """A workspace in a GPU's memory."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu, self._there = gpu, gpu.allocate(0)

    def reserve(self, size: int) -> None:
        if size > self._there.nbytes:
            self._there = self._gpu.allocate(0)  # frees the smaller one first
            self._there = self._gpu.allocate(size)
            self.address = self._there.address

    def view(self, offset: int, like: np.ndarray) -> np.ndarray:
        """Return a copy of a result, when the launches before are done."""
        result = np.empty(like.shape, like.dtype)
        self._gpu.fetch(self.address + offset, result)
        return result


class _Place:
    """Memory for one batch: pinned, and on the GPU.

    sent: the event after the copy to the GPU; used: the event after the kernels that read the copy.
    """

    def __init__(self, gpu: Gpu, batch: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: gpu.pinned(array.shape, array.dtype) for name, array in batch.items()}
        self.offsets, end = {}, 0
        for name, array in batch.items():
            self.offsets[name] = end
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.memory, self.sent, self.used = gpu.allocate(end), gpu.event(), gpu.event()


class Batches:
    """Two places for batches of each shape, filled in turn. A copy waits for the kernels that still read its place."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._places: dict[Any, list[_Place]] = {}  # shapes -> places; the next one to fill is the first
        self._last: _Place | None = None
        self._ahead: tuple[Any, _Place] | None = None  # arrays, and the place that they have been copied to

    def send(self, batch: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Copy a batch to the GPU, unless `send_ahead` has; return the address of each array. Kernels wait for it."""
        if self._ahead and all(self._ahead[0][name] is array for name, array in batch.items()):
            place = self._ahead[1]
        else:
            place = self._copy(batch)
        self._ahead, self._last = None, place
        self._gpu.wait(place.sent, self._gpu.main)
        return {name: place.memory.address + offset for name, offset in place.offsets.items()}

    def send_ahead(self, batch: Mapping[str, np.ndarray]) -> None:
        """Begin to copy the next batch, while the kernels of this one run."""
        self._ahead = dict(batch), self._copy(batch)

    def _copy(self, batch: Mapping[str, np.ndarray]) -> _Place:
        gpu = self._gpu
        if self._last is not None:
            gpu.record(self._last.used, gpu.main)
        key = tuple((name, array.shape, array.dtype) for name, array in batch.items())
        places = self._places.pop(key, None) or [_Place(gpu, batch) for _ in range(2)]
        self._places[key] = places[::-1]  # the last one used is the last in the dict
        if len(self._places) > SHAPES:
            gpu.synchronize()
            del self._places[next(iter(self._places))]
        place = places[0]
        gpu.wait(place.sent)  # the host: the pinned memory may be overwritten
        for name, array in batch.items():
            place.arrays[name][...] = array
        gpu.wait(place.used, gpu.copies)
        for name, pinned in place.arrays.items():
            gpu.send(pinned, place.memory.address + place.offsets[name], gpu.copies)
        gpu.record(place.sent, gpu.copies)
        return place
