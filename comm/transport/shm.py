"""The transport of one node: processes that share memory.

The launcher (local.py) has created a memory segment and passed its descriptor to all ranks. Rank 0 sets the length of
the segment. Each rank allocates the part that it writes, and maps the complete segment, which consists of

    control area (memory.py)    the status table, in which the launcher marks dead ranks, and the flags stop and abort
    data                        mailboxes (mailbox.py)

The segment has room for more ranks than a job begins with. A place costs address space, but no memory until a newcomer
fills it (`enter`).
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence

import numpy as np

from minidl.comm import claims, memory
from minidl.comm.launch import local
from minidl.comm.stats import Stats
from minidl.comm.transport.mailbox import Plan
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.messages import BufferSpec, Column, Freeze, State
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError

LEAVING, LEFT = -1, 0  # instead of a layout: this rank's messages are delivered; it has let go of the memory


class ShmTransport(MailboxTransport):
    """One rank's transport. segment: memory that begins with a control area for `size` ranks."""

    def __init__(
        self, rank: int, size: int, segment: memory.Segment, stats: Stats, stall: float = 30.0, began: int = 0
    ) -> None:
        super().__init__(rank, size, [0] * size, stats, stall, began)
        self.segment = segment
        control = np.frombuffer(segment.map(memory.control_size(size)), np.int64)
        self.control, self.layouts = control, self.map_rows(control)[:, memory.LAYOUT]
        self.hosts = [socket.gethostname()] * size
        self.heard[rank] = self.now()
        self._joins = 0  # number of calls of `join`

    @classmethod
    def from_environment(cls, stats: Stats, stall: float = 30.0) -> ShmTransport:
        """Create the transport of this process. Raises ConfigError if minidl's launcher did not start it."""
        local.follow()
        place = local.place()
        if place is None:
            raise ConfigError("this process was not started by minidl's launcher")
        transport = cls(place.rank, place.ranks, memory.Segment(place.fd), stats, stall, place.began)
        transport.newcomer = place.incarnation > 0
        return transport

    def join(self, buffers: BufferSpec, layout: str) -> None:
        plan = Plan(self.size, buffers, self.servers)
        self._leave_mailbox(self.servers)
        self.layouts[self.rank], self._joins = LEFT, self._joins + 1
        self.wait(lambda: self._allocated(plan) or None, self.servers, "shared memory")
        if self.control[memory.SIZE] == plan.total:
            self._map(plan)
        self.layouts[self.rank] = _word(f"{layout} {plan.total}")
        self.wait(lambda: bool(self._live_layouts().all()) or None, self.servers, "all ranks to join")
        layouts = self._live_layouts()
        if self.layouts[self.rank] != layouts[0]:
            raise ConfigError("this replica's model, or the memory that it requests, differs from replica 0's: "
                              "give all replicas the same options")  # fmt: skip
        if (layouts != layouts[0]).any():
            raise Aborted  # the rank whose layout differs from that of the first rank reports the error

    def _map(self, plan: Plan) -> None:
        """Allocate this rank's part of the memory, and map all of it."""
        begin = memory.control_size(self.size)
        start, stop = plan.parts[self.rank]
        self.segment.reserve(begin + start, begin + stop)
        self.map_mailbox(plan)

    def enter(self, buffers: BufferSpec, layout: str) -> None:
        """See Transport. Drop what a dead process has left in this place. This rank's state is COMING then."""
        plan = Plan(self.size, buffers, self.servers)
        self.include_newcomers()
        self.replicas = (*(rank for rank in self.replicas if rank != self.rank), self.rank)
        word = _word(f"{layout} {plan.total}")
        if word != self.layouts[self.leader]:
            raise ConfigError("this replica's model, or the memory that it requests, differs from that of the job")
        self._map(plan)
        self.mailbox.take_over()
        self.claims.revoke(self.rank)
        self.layouts[self.rank], self._joins = word, int(self.control[memory.JOINS])
        self.set_status(Column.STATE, State.COMING)

    def change_state(self, rank: int, old: State, new: State) -> bool:
        at = memory.at(rank, memory.STATE)
        return bool(claims.swap(self.control, at, *np.array([old, new], np.float64).view(np.int64).tolist()))

    def _allocated(self, plan: Plan) -> bool:
        """Return whether the memory for this call of `join` has its length. The first live rank sets it.

        If that rank dies before, the next one sets the length again: no rank has mapped the memory yet.
        """
        if self.control[memory.JOINS] == self._joins:
            return True
        if self._first_alive() != self.rank or self._live_layouts().any():
            return False  # the others must leave the previous memory first
        begin = memory.control_size(self.size)
        os.ftruncate(self.segment.fd, begin)  # so that the new memory is zero
        self.segment.lengthen(begin + plan.total, sum(stop - start for start, stop in plan.parts[: self.began]))
        self.segment.reserve(begin, begin + plan.parts[0][0])
        self.control[memory.SIZE], self.control[memory.JOINS] = plan.total, self._joins
        return True

    def _first_alive(self) -> int:
        return int((self.status[:, Column.STATE] != State.DEAD).argmax())

    def _live_layouts(self) -> np.ndarray:
        """Return the layout of each rank that is not dead. A rank that dies does not delay the others."""
        return self.layouts[self.status[:, Column.STATE] != State.DEAD]

    def _leave_mailbox(self, servers: Sequence[int]) -> None:
        """Before another `join`: wait until the messages of all ranks are delivered, then let go of the memory."""
        if "mailbox" in self.__dict__:
            self.wait_and_drop(self.delivered, ())
            self.layouts[self.rank] = LEAVING
            self.wait_and_drop(lambda: bool((self._live_layouts() <= LEFT).all()), servers)
            del self.mailbox

    def now(self) -> float:
        return time.monotonic()  # the same clock for all processes of a node

    def set_status(self, column: Column, value: float) -> None:
        if column is Column.STATE and value == State.TRAINING:
            local.settle()
        super().set_status(column, value)

    def handle_freezes(self, how: Freeze) -> None:
        super().handle_freezes(how)
        self.control[memory.ON_FREEZE] = how

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def stopping(self) -> bool:
        return bool(self.control[memory.STOP]) or super().stopping()

    def aborted(self) -> bool:
        return bool(self.control[memory.ABORT])

    def fail(self, code: int = 2) -> None:
        self.control[memory.ABORT] = 1

    def close(self) -> None:
        self.control, self.layouts = self.control.copy(), self.layouts.copy()
        super().close()


def _word(text: str) -> int:
    """Return a hash of a text, never 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1
