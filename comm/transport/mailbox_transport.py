"""The common base of ShmTransport and MpiTransport: a rank writes messages into its mailbox, and counts them.

Receivers on the same node read messages from the sender's mailbox. In mpi.py, a progress engine exchanges messages
with other nodes.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np

from minidl.comm import memory
from minidl.comm.claims import Claims, Ledger
from minidl.comm.stats import Stats, concurrent
from minidl.comm.transport.base import Transport
from minidl.comm.transport.cycle import DutyCycle
from minidl.comm.transport.mailbox import Mailbox, Plan
from minidl.comm.transport.messages import ANY, Channel, Column, Message, Pending, Slot, State, Trust, unsent
from minidl.errors import ConfigError

T = TypeVar("T")
YIELDS = 8  # attempts before the first sleep
SHORTEST, LONGEST, GROWTH = 20e-6, 500e-6, 1.1  # duration of a sleep in seconds, and its growth factor
PATIENT = 3  # a rank may give no sign of life for this many times its longest time so far
BEAT = 0.1  # seconds between two signs of life of a thread that waits for a concurrent operation


class MailboxTransport(Transport):
    """A transport with mailboxes.

    mailbox: the mailboxes of all ranks that share memory with this one; set by `join`. cycle: of a rank that computes
    only in a part of the time.
    """

    mailbox: Mailbox
    segment: memory.Segment
    cycle: DutyCycle | None = None

    def __init__(
        self, rank: int, size: int, nodes: Sequence[int], stats: Stats, stall: float, began: int = 0
    ) -> None:
        super().__init__(rank, size, nodes, stats, stall, began)
        self._worker = Worker(self.beat)

    def load(self, nbytes: int) -> None:
        if self.cycle:
            self.cycle.begin()

    def elapse(self, what: str, amount: float, passes: int = 1) -> None:
        if self.cycle and what in ("gradient", "update", "mix"):  # the others are parts of waits
            self.cycle.rest()

    @contextmanager
    def working(self, what: str, amount: float = 0.0, passes: int = 1) -> Iterator[None]:
        if self.cycle:
            self.cycle.begin()
        with super().working(what, amount, passes):
            yield

    def map_rows(self, control: np.ndarray) -> np.ndarray:
        """Place `status`, `heard` and `trust` in a control area (memory.py). Returns its rows, as int64."""
        rows = control[memory.HEADER :][: self.size * memory.ROW].reshape(self.size, memory.ROW)
        numbers = rows.view(np.float64)
        self.status = numbers[:, : len(Column)]
        self.heard = cast("list[float]", numbers[:, memory.HEARD])
        self.trust = rows[:, memory.TRUST]
        self.status[self.rank, Column.PID], self.status[self.rank, Column.STALL] = os.getpid(), self.stall
        return rows

    def map_mailbox(self, plan: Plan, version: int = 0) -> None:
        """Map the memory for messages, which the segment has room for. version: see Mailbox."""
        begin = memory.control_size(self.size)
        data = np.frombuffer(self.segment.map(begin + plan.total), np.uint8, plan.total, begin)

        def allocate(start: int, stop: int) -> bool:
            with suppress(ConfigError):  # memory is short
                self.segment.reserve(begin + start, begin + stop)
                return True
            return False

        self.mailbox = Mailbox(data, plan, self.rank, self.status[:, Column.STATE], version, self.trust, allocate)

    def reserve(self, channel: Channel, peers: Sequence[int], nbytes: int) -> Slot | None:
        if not peers:
            return unsent(nbytes)
        slot = self.mailbox.reserve(channel, peers, nbytes, partial(self.sent, channel, tuple(peers)))
        if isinstance(slot, Slot):
            return slot
        if channel is Channel.MAIL:  # sends_skipped does not count collectives and requests
            self.stats.sends_skipped(peers[0] if slot == self.rank else slot)
        return None

    def sent(self, channel: Channel, peers: Sequence[int], nbytes: int) -> None:
        """Count a message of `nbytes`, which is in this rank's mailbox now."""
        for peer in peers:
            self.stats.sent(peer, nbytes)

    def take(self, channel: Channel, peer: int = ANY) -> Message | None:
        message = self.next_message(channel, peer)
        if message is not None:
            self.stats.received(message.sender, message.vector.nbytes)
        return message

    def next_message(self, channel: Channel, peer: int) -> Message | None:
        """Return a message or None, as `take` does, but do not count it."""
        return self.mailbox.take(channel, peer)

    def reserve_state(self, nbytes: int) -> Slot | None:
        slot = self.mailbox.reserve_state(nbytes)
        if slot is None:
            self.stats.reads_missed(self.rank)
        return slot

    def latest(self, peer: int) -> Message | None:
        message = self.newest(peer)
        if message is False:
            self.stats.reads_missed(peer)
        elif message is not None:
            self.stats.received(peer, message.vector.nbytes)
            return message
        return None

    def newest(self, peer: int) -> Message | Literal[False] | None:
        """Return what `latest` returns, or False if the peer replaced its state during every attempt to pin it."""
        return self.mailbox.latest(peer)

    def delivered(self) -> bool:
        states = self.status[:, Column.STATE]
        members = (states != State.DEAD) & (states < State.COMING)
        return not any(cells[members, self.rank].any() for cells in self.mailbox.cells)

    def drop_messages(self, channels: Iterable[Channel] = Channel) -> None:
        for channel in channels:
            while (message := self.next_message(channel, ANY)) is not None:
                message.release()

    def wait_and_drop(self, ready: Callable[[], bool], peers: Sequence[int]) -> None:
        """Before another `join`: wait until ready(), and meanwhile drop the messages that arrive."""

        def done() -> bool | None:
            self.drop_messages()
            return ready() or None

        self.wait(done, peers, "others to receive the last messages")

    @property
    def claims(self) -> Claims:
        return Ledger(self.mailbox.claims, self.mailbox.states, self.rank)

    def set_status(self, column: Column, value: float) -> None:
        self.beat()
        self.status[self.rank, column] = value
        if column is Column.STATE:
            self.status[self.rank, Column.STALL] = self.stall

    def beat(self) -> None:
        now, row = self.now(), self.status[self.rank]
        silence = now - self.heard[self.rank]
        self.heard[self.rank] = now
        if self.trust[self.rank]:  # this rank was frozen: its silence says nothing about its steps
            self.trust[self.rank] = Trust.TRUSTED
        elif PATIENT * silence > row[Column.PATIENCE] and row[Column.STATE] == State.TRAINING:
            row[Column.PATIENCE] = PATIENT * silence

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        before = self.status[self.rank, Column.PATIENCE]
        self.set_status(Column.PATIENCE, max(before, seconds))
        try:
            yield
        finally:
            self.set_status(Column.PATIENCE, before)

    def idle(self, attempt: int) -> None:
        """Yield the core at first. Then sleep for longer and longer, but at most LONGEST seconds at a time.

        A concurrent operation sleeps LONGEST while the replica computes: its attempts would take time from the
        gradient, and a core that it yields comes back only after a time slice.
        """
        beside = concurrent()
        if beside and not self._worker.awaited:
            self.sleep(LONGEST)
            return
        if attempt < YIELDS:
            os.sched_yield()
            return
        if not beside:
            self.beat()
        self.sleep(min(SHORTEST * GROWTH ** min(attempt - YIELDS, 40), LONGEST))

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Sleep for at most this many seconds. A transport may return earlier, when a message arrives."""

    def start(self, work: Callable[[], T]) -> Pending[T]:
        return self._worker.start(work)

    def shared(self, name: str) -> np.ndarray:
        return self.mailbox.shared(name)

    def close(self) -> None:
        self._worker.close()
        self.status, self.heard, self.trust = self.status.copy(), list(self.heard), self.trust.copy()
        self.__dict__.pop("mailbox", None)  # deleting the last view unmaps the memory
        self.segment.close()


class Worker:
    """One thread that runs functions in the order in which they were submitted.

    beat: called about every BEAT seconds by a thread that waits for a function. awaited: whether there is one.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self.beat, self.awaited = beat, False
        self._tasks: SimpleQueue[BackgroundCall[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], T]) -> BackgroundCall[T]:
        task = BackgroundCall(work, self)
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

    def __init__(self, work: Callable[[], T], worker: Worker) -> None:
        self._work, self._done, self._worker = work, threading.Event(), worker
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
        self._worker.awaited = True
        while not self._done.wait(BEAT):
            self._worker.beat()
        self._worker.awaited = False
        if self._error is not None:
            raise self._error
        return self._result
