"""A GPU's weights for other replicas: sent from pinned memory, and mixed on the GPU. No step waits for a copy.

    after each update:      weights --- stream `main` ---> copy on the GPU --- own stream ---> pinned slot on the host
    to send:                the slot of the update before, whose copy has had a whole step to end
    to mix in a model:      it goes to the GPU, and a kernel mixes it into the weights there

There are two slots in turn: one is read by the host while the other is written. So a replica on a GPU sends weights
that are one step old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.engine.cuda_array import array_at
from minidl.engine.cuda_device import Gpu
from minidl.engine.device import address


class _Slot:
    """A copy of the weights. taken, done: the events after the copies on the GPU and to the host."""

    def __init__(self, gpu: Gpu, weights: np.ndarray) -> None:
        self.there, self.here = gpu.allocate(weights.nbytes), gpu.pinned(weights.shape, weights.dtype)
        self.taken, self.done = gpu.event(), gpu.event()


class Publisher:
    """The exchange of an arena's weights with other replicas. The GPU owns them all the time."""

    def __init__(self, arena: Any) -> None:
        self._arena, self.gpu = arena, arena.gpu
        weights = arena.array("theta")
        self._slots = [_Slot(self.gpu, weights) for _ in range(2)]
        self._other = self.gpu.allocate(weights.nbytes)
        self._stream = self.gpu.stream()
        self._begun = 0  # copies so far

    def begin(self) -> None:
        """Begin to copy the present weights to the host. Nothing waits for it."""
        gpu, slot, weights = self.gpu, self._slots[self._begun % 2], self._arena.array("theta")
        gpu.wait(slot.done, gpu.main)  # the GPU still reads the copy before it, if the link is slow
        gpu.copy(address(weights), slot.there.address, weights.nbytes)
        gpu.record(slot.taken, gpu.main)
        gpu.wait(slot.taken, self._stream)
        gpu.fetch_later(slot.there.address, slot.here, self._stream)
        gpu.record(slot.done, self._stream)
        self._begun += 1

    def outgoing(self) -> np.ndarray:
        """Return the weights after the update before the last one, valid until the next `begin`."""
        if not self._begun:
            self.begin()
        slot = self._slots[max(0, self._begun - 2) % 2]
        self.gpu.wait(slot.done)
        return slot.here

    def mix(self, other: np.ndarray, weight: float, start: int) -> None:
        """theta[start:stop] <- theta + weight * (other - theta), on the GPU. `other` may change after the call."""
        gpu, theta = self.gpu, self._arena.array("theta")[start : start + other.size]
        gpu.send(np.ascontiguousarray(other), self._other.address)
        with gpu.running():
            gpu.kernels("mix").mix(theta, array_at(self._other.address, other.shape, other.dtype), float(weight))

    def kernels(self) -> Sequence[Any]:
        """Return the calls of `mix`, to be compiled in advance (cuda_launches.py)."""
        theta = self._arena.array("theta")
        return [(self.gpu.file("mix"), "mix", (theta, array_at(self._other.address, theta.shape, theta.dtype), 0.5))]
