"""The transport of one node: processes that share memory.

The launcher (local.py) has created a memory segment and passed its descriptor to all ranks. Rank 0 sets the length of
the segment. Each rank allocates the part that it writes, and maps the complete segment, which consists of

    control area (memory.py)    the status table, in which the launcher marks dead ranks, and the flags stop and abort
    data                        mailboxes (mailbox.py)
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence

import numpy as np

from minidl.comm import memory
from minidl.comm.launch import local
from minidl.comm.stats import Stats
from minidl.comm.transport.mailbox import Mailbox, Plan
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.messages import BufferSpec, Column, Freeze, State
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError

LEAVING, LEFT = -1, 0  # instead of a layout: this rank's messages are delivered; it has let go of the memory


class ShmTransport(MailboxTransport):
    """One rank's transport. segment: memory that begins with a control area for `size` ranks."""

    def __init__(self, rank: int, size: int, segment: memory.Segment, stats: Stats, stall: float = 30.0) -> None:
        super().__init__(rank, size, [0] * size, stats, stall)
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
        return cls(place.rank, place.ranks, memory.Segment(place.fd), stats, stall)

    def join(self, buffers: BufferSpec, layout: str) -> None:
        begin = memory.control_size(self.size)
        servers = [rank for rank in range(self.size) if rank not in self.replicas]
        plan = Plan(self.size, buffers, servers)
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._leave_mailbox(others)
        self.layouts[self.rank], self._joins = LEFT, self._joins + 1
        if self.rank == 0:
            self.wait(lambda: not self.layouts.any() or None, others, "all ranks to leave the previous memory")
            os.ftruncate(self.segment.fd, begin)  # so that the new memory is zero
            self.segment.lengthen(begin + plan.total)
            self.segment.reserve(begin, begin + plan.parts[0][1])
            self.control[memory.SIZE], self.control[memory.JOINS] = plan.total, self._joins
        self.wait(lambda: self.control[memory.JOINS] == self._joins or None, others, "shared memory")
        total = int(self.control[memory.SIZE])
        if total == plan.total:
            if self.rank:
                start, stop = plan.parts[self.rank]
                self.segment.reserve(begin + start, begin + stop)
            mapped = self.segment.map(begin + total)
            data = np.frombuffer(mapped, np.uint8, total, begin)
            self.mailbox = Mailbox(data, plan, self.rank, self.status[:, Column.STATE])
        self.layouts[self.rank] = _word(f"{layout} {plan.total}")
        self.wait(lambda: self.layouts.all() or None, others, "all ranks to join")
        if self.layouts[self.rank] != self.layouts[0]:
            raise ConfigError("this replica's model, or the memory that it requests, differs from replica 0's: "
                              "give all replicas the same options")  # fmt: skip
        if (self.layouts != self.layouts[0]).any():
            raise Aborted  # the rank whose layout differs from that of rank 0 reports the error

    def _leave_mailbox(self, others: Sequence[int]) -> None:
        """Before another `join`: wait until the messages of all ranks are delivered, then let go of the memory."""
        if "mailbox" in self.__dict__:
            self.wait_and_drop(self.delivered, ())
            self.layouts[self.rank] = LEAVING
            self.wait_and_drop(lambda: bool((self.layouts <= LEFT).all()), others)
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

    def fail(self) -> None:
        self.control[memory.ABORT] = 1

    def close(self) -> None:
        self.control, self.layouts = self.control.copy(), self.layouts.copy()
        super().close()


def _word(text: str) -> int:
    """Return a hash of a text, never 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1
