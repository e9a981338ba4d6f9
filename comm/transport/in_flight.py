"""A message in the network of a simulation, and memory for messages."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from minidl.comm.transport.messages import Channel, Header
from minidl.engine.device import aligned

BLOCK = 1 << 16  # bytes


class Sender(Protocol):
    """The transport of a rank, as a message sees it."""

    rank: int
    gone: bool
    on_way: list[set[int]]
    free: list[int]

    def wake(self) -> None: ...


class InFlight:
    """A message in the simulated network.

    receivers: the ranks that have not released it yet. used: the number of the sender's slots that it occupies, 0 or 1.
    vector, header: set when the sender commits the message. free: whether it takes no time, and is not counted.
    """

    __slots__ = ("channel", "free", "header", "receivers", "sender", "used", "vector")

    vector: np.ndarray
    header: Header

    def __init__(self, channel: Channel, sender: Sender, receivers: set[int], used: int) -> None:
        self.channel, self.sender, self.receivers, self.used = channel, sender, receivers, used
        self.free = False


class Memory:
    """Memory for messages. Small pieces share a block, because `aligned` is slow."""

    def __init__(self) -> None:
        self._block, self._used = np.empty(0, np.uint8), BLOCK

    def __call__(self, nbytes: int) -> np.ndarray:
        """Return uninitialised memory, uint8 (nbytes,), on a 64-byte boundary."""
        if nbytes > BLOCK // 64:
            return aligned(nbytes, np.uint8, np.empty)
        begin = self._used
        self._used += -(-nbytes // 64) * 64
        if self._used > BLOCK:
            self._block, self._used = aligned(BLOCK, np.uint8, np.empty), 0
            return self(nbytes)
        return self._block[begin : begin + nbytes]
