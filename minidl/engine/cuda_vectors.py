"""Vectors that the host and a GPU share: each has a copy, and one of them owns the values.

    mirror.array()     the array on the GPU, for kernels      the GPU owns the values; the host's are out of date
    mirror.host()      the array on the host, to read or to write     the host owns the values

The values are copied only when the owner changes. So training on a GPU copies no weights; a checkpoint, an evaluation
on the CPU, or a method that mixes weights copies them when it reads them. An array that `host` has returned is out of
date after the next `array`: code that reads values asks again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from minidl.engine.arena import Arena
from minidl.engine.cuda_array import OnDevice, array_at
from minidl.engine.cuda_device import Gpu


class Mirror:
    """A vector on the host, and its copy on a GPU.

    on_change: called with whether the GPU owns the values from now on.
    """

    def __init__(self, gpu: Gpu, host: np.ndarray, on_change: Callable[[bool], None] = lambda on_gpu: None) -> None:
        self._gpu, self._host, self._on_change = gpu, host, on_change
        self._memory = gpu.allocate(host.nbytes)
        self.on_gpu = False

    def array(self) -> OnDevice:
        if not self.on_gpu:
            self._gpu.send(self._host, self._memory.address)
            self.on_gpu = True
            self._on_change(True)
        return array_at(self._memory.address, self._host.shape, self._host.dtype)

    def host(self) -> np.ndarray:
        if self.on_gpu:
            self._gpu.fetch(self._memory.address, self._host)
            self.on_gpu = False
            self._on_change(False)
        return self._host


class MirroredVectors(Mapping[str, np.ndarray]):
    """Named vectors on the host, as `Mirror.host` returns them. `array` returns those on the GPU."""

    def __init__(self, gpu: Gpu, vectors: Mapping[str, np.ndarray]) -> None:
        self._mirrors = {name: Mirror(gpu, vector) for name, vector in vectors.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._mirrors[name].host()

    def __iter__(self) -> Iterator[str]:
        return iter(self._mirrors)

    def __len__(self) -> int:
        return len(self._mirrors)

    def array(self, name: str) -> OnDevice:
        return self._mirrors[name].array()


class ArenaOnGpu:
    """The vectors theta and grad of an arena. While the GPU owns them, the parameters have no arrays.

    A parameter without an array asks for it (`Parameter.__getattr__`), so no code reads values that are out of date.
    """

    def __init__(self, gpu: Gpu, arena: Arena, theta: np.ndarray, grad: np.ndarray) -> None:
        self.gpu = gpu
        vectors = {"theta": ("_data", theta), "grad": ("_grad", grad)}
        self._mirrors = {
            name: Mirror(gpu, vector, _hide(arena, attribute, vector)) for name, (attribute, vector) in vectors.items()
        }

    def host(self, name: str) -> np.ndarray:
        return self._mirrors[name].host()

    def array(self, name: str) -> OnDevice:
        return self._mirrors[name].array()


def _hide(arena: Arena, attribute: str, vector: np.ndarray) -> Callable[[bool], None]:
    """Return a function that removes the parameters' arrays, or restores them."""
    slots, parameters = arena.slots, arena.parameters  # not the arena, which refers to this function

    def change(on_gpu: bool) -> None:
        for slot in slots:
            parameter: Any = parameters[slot.name]
            if on_gpu:
                delattr(parameter, attribute)
            else:
                setattr(parameter, attribute, vector[slot.start : slot.stop].reshape(slot.shape))

    return change
