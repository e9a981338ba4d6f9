"""Memory of programs on a GPU: temporaries and results, and batches that are copied while kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidl.engine.cuda_device import Gpu
from minidl.engine.device import ALIGNMENT
from minidl.program.workspace import Workspace


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

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.pinned, self.memory = gpu.pinned((nbytes,), np.uint8), gpu.allocate(nbytes)
        self.sent, self.used = gpu.event(), gpu.event()


class Batches:
    """Two places for batches, filled in turn. A copy waits for the kernels that still read its place."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._places: list[_Place] = []  # the next one to fill is the first
        self._size = 0  # bytes of each
        self._last: _Place | None = None
        self._ahead: tuple[Any, _Place] | None = None  # arrays, and the place that they have been copied to

    def reserve(self, batch: Mapping[str, np.ndarray]) -> None:
        """Take memory for batches of this size, if there is not enough. Raises ConfigError if there is too little."""
        _, size = _layout(batch)
        if size > self._size:
            self._gpu.synchronize()
            for place in self._places:
                self._gpu.wait(place.sent)
            self._places, self._last, self._ahead, self._size = [], None, None, 0  # frees the smaller ones first
            self._places = [_Place(self._gpu, size) for _ in range(2)]
            self._size = size

    def send(self, batch: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Copy a batch to the GPU, unless `send_ahead` has; return the address of each array. Kernels wait for it."""
        self.reserve(batch)
        if self._ahead and all(self._ahead[0][name] is array for name, array in batch.items()):
            place = self._ahead[1]
        else:
            place = self._copy(batch)
        self._ahead, self._last = None, place
        self._gpu.wait(place.sent, self._gpu.main)
        return {name: place.memory.address + offset for name, offset in _layout(batch)[0].items()}

    def send_ahead(self, batch: Mapping[str, np.ndarray]) -> None:
        """Begin to copy the next batch, while the kernels of this one run. A larger one is not copied."""
        if _layout(batch)[1] <= self._size:
            self._ahead = dict(batch), self._copy(batch)

    def _copy(self, batch: Mapping[str, np.ndarray]) -> _Place:
        gpu = self._gpu
        if self._last is not None:
            gpu.record(self._last.used, gpu.main)
        self._places.reverse()
        place = self._places[1]
        offsets, size = _layout(batch)
        gpu.wait(place.sent)  # the host: the pinned memory may be overwritten
        for name, array in batch.items():
            part = place.pinned[offsets[name] : offsets[name] + array.nbytes]
            part.view(array.dtype).reshape(array.shape)[...] = array
        gpu.wait(place.used, gpu.copies)
        gpu.send(place.pinned[:size], place.memory.address, gpu.copies)
        gpu.record(place.sent, gpu.copies)
        return place


def _layout(batch: Mapping[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Return the offset of each array in a place, and the bytes of all."""
    offsets, end = {}, 0
    for name, array in batch.items():
        offsets[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
