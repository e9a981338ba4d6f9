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

Under `mpiexec --with-ft ulfm` the job survives ranks that are killed (failures.py). The thread looks for deaths a few
times a second, and drops the operations that wait for a dead rank. After a death it does not end MPI (MPI_Finalize):
with Open MPI 5.0 this hangs in every second job with two deaths.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minidl.comm.launch.job import MpiJob, explain
from minidl.comm.transport.failures import Failures
from minidl.comm.transport.mpi_library import load, refusal
from minidl.errors import tell

if TYPE_CHECKING:
    from mpi4py import MPI

TINY = 256  # bytes: messages of at most this size arrive together with their envelope, so they arrive in order
YIELDS = 10  # polls without progress before the first sleep
SHORTEST, LONGEST, GROWTH = 10e-6, 2e-3, 1.2  # duration of a sleep in seconds, and its growth factor
AWAITED = 300e-6  # seconds: the longest sleep while a thread waits for a message
PIECE = 32 << 10  # bytes: much less than the capacity of the system's buffers
LARGEST = 1 << 30  # bytes: longer messages are sent as one element of a larger type, because MPI's counts have 31 bits
LOOK = 0.2  # seconds between two looks for deaths
FLUSH = 0.1  # seconds in which MPI can deliver the last messages if it is not ended properly
FINALIZING = 5.0  # seconds: Open MPI's end can take forever if a rank dies meanwhile
LEFT = 99  # tag: the sender leaves; larger than the tags of mpi.py
ALL = -1  # instead of a peer: the operation needs all ranks

Call = Callable[[], None]


class Operation(NamedTuple):
    """What belongs to an MPI operation.

    data: kept alive until MPI no longer uses it. peer: the rank that the operation needs, or ALL.
    done: called when the operation is complete. lost: called instead if a rank that the operation needs has died.
    """

    data: Any = None
    peer: int = ALL
    done: Call | None = None
    lost: Call | None = None


class UnderWay(NamedTuple):
    """An MPI operation in progress."""

    request: MPI.Request
    operation: Operation
    began: float


class ProgressEngine:
    """The progress engine of one rank. Its thread calls these functions, which the fabric sets:

    room(tag, size)                    to get a buffer for an arriving message: uint8, at least `size` bytes
    deliver(source, tag, room, size)   when the message in this buffer is complete
    tick()                             after every poll
    died(rank)                         when a rank has died, and all messages from it that still arrive are delivered

    dead: the ranks that have died. The engine receives no message before `deliver` is set, so set the other two first.
    Raises an error (see `refusal`) if MPI is missing or does not fit the launcher.
    """

    def __init__(self, job: MpiJob) -> None:
        self.job = job
        self.rank, self.size = job.rank, job.size
        self.room: Callable[[int, int], np.ndarray] = lambda tag, size: np.empty(size, np.uint8)
        self.deliver: Callable[[int, int, np.ndarray, int], None] | None = None
        self.tick: Callable[[], None] = lambda: None
        self.died: Callable[[int], None] = lambda rank: None
        self.dead: set[int] = set()
        self._mpi: Any = load(job)
        self._orders: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._under_way: list[UnderWay] = []
        self._dropped: list[UnderWay] = []  # kept, because MPI may still use their data
        self._pace = AWAITED  # seconds in which the link transfers PIECE bytes
        self.waiting = 0  # number of threads that wait for a message
        self._leaving = self._announced = self._left = False
        self._finalizing = np.inf  # when this thread has begun to end MPI
        self._gone: set[int] = set()  # the ranks that have announced that they leave
        self._looked = 0.0  # time of the last look for deaths
        self.failures: Failures | None = None  # None: a death ends the job
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

    def send(self, peer: int, tag: int, data: np.ndarray, sent: Call | None = None) -> None:
        """Send bytes. They must not change until the engine's thread calls `sent`, also if the peer has died."""
        start = partial(self._started, self.world.Isend, data, peer, tag)
        self.order(lambda: self._begin(start, Operation(data, peer, sent, sent)))

    def order(self, order: Callable[[], object]) -> None:
        """Run a function in the engine's thread, after the orders before it."""
        self._orders.put(order)

    def ask(self, question: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread; return its result."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self.order(lambda: answer.put(question()))
        return answer.get()

    def collective(self, start: Callable[[], MPI.Request], needed: bool = True) -> threading.Event:
        """Start a collective operation. The returned event is set when the operation is complete.

        If a rank dies meanwhile, the job ends, because the others cannot complete it. Or, if it is not `needed`, the
        event is never set.
        """
        done = threading.Event()
        operation = Operation(start, ALL, done.set, self._cut_short if needed else None)
        self.order(lambda: self._begin(start, operation))
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
        self.order(lambda: setattr(self, "_leaving", True))
        deadline = time.monotonic() + patience if patience is not None else np.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            if self.failures and time.monotonic() - self._finalizing > FINALIZING:
                break  # a rank has died meanwhile
        return not self._thread.is_alive()

    def abort(self, code: int) -> None:
        """End all ranks of the job."""
        self.order(lambda: self.end_job(code))
        self._thread.join(10)
        os._exit(code)

    # -- the engine's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._owner:
                self._mpi.Init_thread(self._mpi.THREAD_SERIALIZED)
            # In a communicator of their own, minidl's messages cannot be taken for those of the user's script.
            self.world = self._mpi.COMM_WORLD.Dup()
            self.world.Set_errhandler(self._mpi.ERRORS_RETURN)
            self.failures = Failures(self._mpi, self.world) if self.job.survives else None
            self._work()
            if self._owner and not self.dead:
                self._finalizing = time.monotonic()
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
            self._look()
            if moved:
                vain, nap = 0, SHORTEST
            elif vain < YIELDS:
                vain += 1
                time.sleep(0)
            else:
                nap = min(GROWTH * nap, self._longest())
                if self._obey(nap):
                    vain, nap = 0, SHORTEST
        until = time.monotonic() + FLUSH * bool(self.dead)
        while self._receive() or time.monotonic() < until:
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

    def _begin(self, start: Callable[[], MPI.Request], operation: Operation) -> None:
        """Start an operation, unless a rank that it needs is dead."""
        if self.dead and (operation.peer == ALL or operation.peer in self.dead):
            call(operation.lost)
            return
        try:
            request = start()
            if not request.Test():
                self._under_way.append(UnderWay(request, operation, time.monotonic()))
                return
        except self._mpi.Exception as error:
            self._survive(error)
            call(operation.lost)
            return
        call(operation.done)

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
        ended: list[Call | None] = []
        for move in self._under_way:
            operation = move.operation
            try:
                if not move.request.Test():
                    still.append(move)
                    continue
                ended.append(operation.done)
                size = operation.data.nbytes if isinstance(operation.data, np.ndarray) else 0
                if size > PIECE:
                    self._pace = min(LONGEST, PIECE / size * (time.monotonic() - move.began))
            except self._mpi.Exception as error:
                self._survive(error)
                ended.append(operation.lost)
        self._under_way = still
        for then in ended:
            call(then)
        return bool(ended)

    def _receive(self) -> bool:
        """Begin to receive the next message, if any has arrived. Returns whether a message has arrived."""
        if self.deliver is None:
            return False
        status = self._mpi.Status()
        try:
            message = self.world.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if message is None:
                return False
            source, tag, size = status.Get_source(), status.Get_tag(), status.Get_elements(self._mpi.BYTE)
            if size <= TINY:
                room = self.room(tag, size)
                message.Recv([room[:size], self._mpi.BYTE])
        except self._mpi.Exception as error:
            self._survive(error)
            return False
        if size > TINY:
            room = self.room(tag, size)
            data = room[:size]
            start = partial(self._started, message.Irecv, data)
            self._begin(start, Operation(data, source, partial(self._arrived, source, tag, room, size)))
        else:
            self._arrived(source, tag, room, size)
        return True

    def _arrived(self, source: int, tag: int, room: np.ndarray, size: int) -> None:
        """Handle a message that is complete. Messages of a dead rank are dropped."""
        if tag == LEFT:
            self._gone.add(source)
        elif source not in self.dead:
            assert self.deliver is not None
            self.deliver(source, tag, room, size)

    def _leave(self) -> None:
        """After `leave`: when no operation is in progress, agree with the other ranks that MPI can end."""
        if not self._leaving or self._under_way:
            return
        if self.failures is None and not self.dead:
            self._leaving = False
            done, again = lambda: setattr(self, "_left", True), lambda: setattr(self, "_leaving", True)
            self._begin(self.world.Ibarrier, Operation(done=done, lost=again))
            return
        others = set(range(self.size)) - {self.rank}  # a barrier would not survive a death, so they send messages
        if not self._announced:
            self._announced = True
            for peer in others:
                self.send(peer, LEFT, np.empty(0, np.uint8))
        elif others <= self._gone | self.dead:
            self._left = True

    # -- deaths ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """A few times a second, look for ranks that have died."""
        if self.failures is None or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if new := self.failures.new():
            while self._receive() or self._complete():  # what these ranks have sent before their death
                pass
            self.bury(new)

    def bury(self, ranks: Sequence[int]) -> None:
        """From now on, treat these ranks as dead. End what waits for them. Called by this thread."""
        new = [rank for rank in ranks if rank not in self.dead and rank != self.rank]
        self.dead.update(new)
        ended = (ALL, *new) if new else ()
        lost = [move for move in self._under_way if move.operation.peer in ended]
        self._under_way = [move for move in self._under_way if move.operation.peer not in ended]
        self._dropped += lost
        for move in lost:
            call(move.operation.lost)
        for rank in new:
            if rank not in self._gone:  # else it has ended properly
                self.died(rank)

    def _survive(self, error: MPI.Exception) -> None:
        """Look for deaths soon if an error reports one. Raise any other error."""
        if self.failures is None or not self.failures.reports(error):
            raise error
        self._looked = 0.0

    def _cut_short(self) -> None:
        """End the job: a rank has died before all have joined."""
        if self.rank == min(set(range(self.size)) - self.dead):
            dead = ", ".join(map(str, sorted(self.dead)))
            tell(f"minidl: error: replica {dead} died before all replicas had joined")
            self.end_job(2)

    def end_job(self, code: int) -> None:
        """End all ranks of the job. Called by this thread."""
        time.sleep(0.2)  # lets mpiexec forward the output: it discards the rest when the job aborts
        self._mpi.COMM_WORLD.Abort(code)


def call(then: Call | None) -> None:
    if then is not None:
        then()
