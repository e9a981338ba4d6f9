"""The common base of ShmFabric and MpiFabric: a rank writes messages into its mailbox, and counts them in its meter.

Receivers on the same node read messages from the sender's mailbox. In mpi.py, a progress engine (courier.py) exchanges
messages with other nodes.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np

from minidl.comm import memory
from minidl.comm.fabric.base import ANY, Channel, Column, Fabric, Letter, Note, Pending
from minidl.comm.stats import Meter
from minidl.comm.transport.mailbox import Mailbox

T = TypeVar("T")
YIELDS = 8  # attempts before the first sleep
SHORTEST, LONGEST, GROWTH = 20e-6, 500e-6, 1.1  # duration of a sleep in seconds, and its growth factor


class BoxedFabric(Fabric):
    """A fabric with mailboxes. box: the mailboxes of all ranks that share memory with this one; set by `join`."""

    box: Mailbox
    segment: memory.Segment

    def __init__(self, rank: int, size: int, nodes: Sequence[int], meter: Meter, stall: float) -> None:
        super().__init__(rank, size, nodes, meter, stall)
        self._worker = Worker()

    def map_rows(self, control: np.ndarray) -> np.ndarray:
        """Place `board` and `heard` in a control area (memory.py). Returns the rows of this area, as int64."""
        rows = control[memory.HEADER :][: self.size * memory.ROW].reshape(self.size, memory.ROW)
        numbers = rows.view(np.float64)
        self.board = numbers[:, : len(Column)]
        self.heard = cast("list[float]", numbers[:, memory.HEARD])
        return rows

    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], note: Note) -> bool:
        obstacle = self.box.post(channel, peers, parts, note)
        if obstacle is not None:
            if channel is Channel.MAIL:  # `held` does not count collectives and requests
                self.meter.held(peers[0] if obstacle == self.rank else obstacle)
            return False
        size = sum(part.nbytes for part in parts)
        for peer in peers:
            self.meter.sent(peer, size)
        return True

    def take(self, channel: Channel, peer: int = ANY) -> Letter | None:
        letter = self.next_letter(channel, peer)
        if letter is not None:
            self.meter.received(letter.sender, letter.vector.nbytes)
        return letter

    def next_letter(self, channel: Channel, peer: int) -> Letter | None:
        """Return a message or None, as `take` does, but do not count it."""
        return self.box.take(channel, peer)

    def publish(self, parts: Sequence[np.ndarray], note: Note) -> None:
        if not self.box.publish(parts, note):
            self.meter.missed(self.rank)

    def latest(self, peer: int) -> Letter | None:
        letter = self.newest(peer)
        if letter is False:
            self.meter.missed(peer)
        elif letter is not None:
            self.meter.received(peer, letter.vector.nbytes)
            return letter
        return None

    def newest(self, peer: int) -> Letter | Literal[False] | None:
        """Return what `latest` returns, or False if the peer replaced its state during every attempt to pin it."""
        return self.box.latest(peer)

    def announce(self, column: Column, value: float) -> None:
        self.board[self.rank, column] = value
        self.heard[self.rank] = self.now()

    def idle(self, attempt: int) -> None:
        """Yield the core at first. Then sleep for longer and longer, but at most LONGEST seconds at a time."""
        if attempt < YIELDS:
            os.sched_yield()
            return
        self.heard[self.rank] = self.now()
        self.sleep(min(SHORTEST * GROWTH ** min(attempt - YIELDS, 40), LONGEST))

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Sleep for at most this many seconds. A transport may return earlier, when a message arrives."""

    def start(self, work: Callable[[], T]) -> Pending[T]:
        return self._worker.start(work)

    def shared(self, name: str) -> np.ndarray:
        return self.box.shared(name)

    def close(self) -> None:
        self._worker.close()
        self.board, self.heard = self.board.copy(), list(self.heard)
        self.__dict__.pop("box", None)  # deleting the last view unmaps the memory
        self.segment.close()


class Worker:
    """One thread that runs functions in the order in which they were submitted."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[BackgroundCall[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], T]) -> BackgroundCall[T]:
        task = BackgroundCall(work)
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fabric", daemon=True)
            self._thread.start()
        return task

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    def close(self) -> None:
        """Let the thread end after its last function.

        Do not wait for the thread, because the function may wait for a dead peer.
        """
        self._tasks.put(None)


class BackgroundCall(Generic[T]):
    """A submitted function and its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._done = work, threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> T:
        """Return the function's result, or raise its exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result
