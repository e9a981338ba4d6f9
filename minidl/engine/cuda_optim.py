"""The update rules of optimizers on a GPU, with the arguments of the CPU's.

Vectors are arrays on the GPU (cuda_vectors.py). The small arrays of segments, rates and decays are on the host: they
are copied when they have changed. So the kernels read the learning rate from the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidl.engine.cuda_array import OnDevice, array_at
from minidl.engine.cuda_device import DeviceMemory, Gpu

Call = tuple[str, str, tuple[Any, ...]]  # file of kernels, kernel, arguments


class OptimOnGpu:
    """A device whose only operation is `optim`."""

    def __init__(self, gpu: Gpu) -> None:
        self.optim, self._gpu, self._table = self, gpu, gpu.kernels("optim")
        self._copies: dict[int, tuple[np.ndarray, bytes, DeviceMemory]] = {}  # id of an array -> it, values, copy
        self._collected: list[Call] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Call]]:
        """List the calls of the `with` block instead of making them."""
        self._collected = calls = list[Call]()
        try:
            yield calls
        finally:
            self._collected = None

    def norms_partial(self, segments: int) -> int:
        return int(self._table.norms_partial(segments))

    def norms(
        self, x: OnDevice, starts: np.ndarray, stops: np.ndarray, partial: np.ndarray, squares: np.ndarray
    ) -> None:  # fmt: skip
        """Compute squared norms, and copy them to the host."""
        self._call("norms", x, starts, stops, partial, squares)
        if self._collected is None:
            _, _, memory = self._copies[id(squares)]
            self._gpu.fetch(memory.address, squares)
            self._copies[id(squares)] = squares, squares.tobytes(), memory

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        there = tuple(self._there(a) if type(a) is np.ndarray else a for a in arguments)
        if self._collected is not None:
            self._collected.append((self._gpu.file("optim"), name, there))
            return
        with self._gpu.running():
            getattr(self._table, name)(*there)

    def _there(self, array: np.ndarray) -> OnDevice:
        """Return the copy of a host's array, with its present values."""
        _, values, memory = self._copies.get(id(array), (array, None, None))
        if memory is None:
            memory = self._gpu.allocate(array.nbytes)
        if values != (now := array.tobytes()):
            self._gpu.send(array, memory.address)
        self._copies[id(array)] = array, now, memory
        return array_at(memory.address, array.shape, array.dtype)
