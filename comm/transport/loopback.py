"""The transport of a run with a single process: one rank, which has no peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

import numpy as np

from minidl.comm import claims
from minidl.comm.claims import Ledger
from minidl.comm.stats import Stats
from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import ANY, BufferSpec, Channel, Column, Message, Pending, Slot, unsent

T = TypeVar("T")


class Done(Pending[T]):
    """An operation that is already complete."""

    def __init__(self, result: T) -> None:
        self.result = result

    def wait(self) -> T:
        return self.result


class LoopbackTransport(Transport):
    """A transport with one rank: there is nothing to send, receive or wait for."""

    def __init__(self, stats: Stats | None = None) -> None:
        super().__init__(0, 1, (0,), stats or Stats())
        self.vectors: dict[str, np.ndarray] = {}
        self._table = np.zeros(claims.words(1), np.int64)

    def join(self, buffers: BufferSpec, layout: str) -> None:
        self._table[:] = 0  # no claims
        self.vectors = {name: np.zeros(size, np.float32) for name, size in buffers.shared}

    def now(self) -> float:
        return monotonic()

    def reserve(self, channel: Channel, peers: Sequence[int], nbytes: int) -> Slot | None:
        return None if peers else unsent(nbytes)

    def take(self, channel: Channel, peer: int = ANY) -> Message | None:
        return None

    def reserve_state(self, nbytes: int) -> None:
        return None  # no other rank could read it

    def latest(self, peer: int) -> Message | None:
        return None

    @property
    def claims(self) -> Ledger:
        return Ledger(self._table, self.status[:, Column.STATE], 0)

    def set_status(self, column: Column, value: float) -> None:
        self.status[0, column] = value

    def idle(self, attempt: int) -> None:
        raise AssertionError("a single rank has nothing to wait for")

    def start(self, work: Callable[[], T]) -> Pending[T]:
        return Done(work())

    def delivered(self) -> bool:
        return True

    def shared(self, name: str) -> np.ndarray:
        return self.vectors[name]
