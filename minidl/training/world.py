"""This process among the ranks of a script: its fabric, and its replica.

`python -m minidl.launch --workers 4 script.py` and `mpiexec -n 4 python script.py` start a script several times. The
functions that such a script calls (fit, join, allreduce ...) share one `World`, which the first of them creates:

    world()  ->  collective   a function that all ranks call
                 enter        the model becomes a replica: the weights of rank 0, memory for the method's messages
                 leave        all have the result: it is no replica any more
                 abandon      an exception has ended the training on this rank

While a rank waits for others, it looks for what would make it wait forever, and raises an exception:

    the user stops the job           KeyboardInterrupt, in a collective. A training stops between two steps
    another rank has left (abandon)  ReplicaLeftError. The training has failed on all ranks
    another rank has ended           PeerLost

After a training that has failed, messages may be left. So the next call begins with a new `join`, which drops them.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from minidl.comm.fabric.base import BufferSpec, Column, Fabric, PeerLost, State
from minidl.comm.methods.base import Method
from minidl.comm.stats import concurrent
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.mpi import MpiTransport
from minidl.errors import AbortedError, ConfigError, MinidlError, ReplicaLeftError
from minidl.nn import Module
from minidl.run.config import Config
from minidl.training.agreement import agree, facts_of_model, facts_of_options
from minidl.training.job import find_job
from minidl.training.session import chosen

LEAVING = 2.0  # seconds that a rank which ends waits until others have received its last messages


class World:
    """The ranks that run a script. Without a launcher, or with a single MPI rank, `job` is None and the size is 1.

    joined: the replica of `join` that trains, or None.
    """

    def __init__(self) -> None:
        self.job = find_job()
        self.joined: object = None
        self._started = False
        self._training = False  # whether `leave` has not ended the training that `enter` has begun
        self._call = ""  # the function that this rank executes: what others are told that it waits for
        self._interruptible = self._recovering = False  # whether this function is a collective; whether it recovers
        if self.job is None or (self.job.size == 1 and not self.job.launched):
            self.job = None
            self.fabric = Fabric(LoopbackTransport())
            return
        if not self.job.launched:  # the launcher's ranks handle errors in minidl/launch.py
            self._previous_hook, sys.excepthook = sys.excepthook, self._uncaught  # also for errors of the next line
        self.fabric = self.job.join(Config())
        if not self.job.launched:
            sys.excepthook = self._uncaught  # in place of the transport's
            atexit.register(self.end)

    def start(self) -> None:
        """Join the other ranks, at the first call that needs them. All ranks call this."""
        if self._started or self.job is None:
            return
        self.fabric.fail_fast = True
        with self.waiting_in("the first call"):
            self.fabric.join(BufferSpec(), "script")
        self.fabric.fail_fast = False
        self.fabric.interrupt = self._check
        self._started = True

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def size(self) -> int:
        return self.fabric.size

    # -- waiting -----------------------------------------------------------------------------------------

    @contextmanager
    def collective(self, call: str) -> Iterator[Fabric]:
        """The block exchanges with all ranks, which all make this call. It may begin a training."""
        with self.waiting_in(call, interruptible=True):
            if self.fabric.stopping():
                self.fabric.transport.consider_stopping()
                raise KeyboardInterrupt(f"stopped in {call}")
            if self._training and self.joined is None:
                self._recover(call)
            yield self.fabric

    @contextmanager
    def waiting_in(self, call: str, interruptible: bool = False) -> Iterator[None]:
        """Within the block, which executes this call, what would make this rank wait forever raises an exception."""
        self._call, self._interruptible = call, interruptible
        try:
            yield
        except ReplicaLeftError as error:
            self.abandon(error)
            raise
        except PeerLost as lost:
            if self.fabric.fail_fast:  # the training needs all replicas
                self.abandon(lost)
            if not self.fabric.status[lost.peer, Column.ENDED]:
                raise
            raise PeerLost(lost.peer, call, f"replica {lost.peer} ended its script while others wait for it in {call}: "
                                            "all ranks must make the same calls") from None  # fmt: skip
        finally:
            self._call = ""

    def _check(self) -> None:
        """Raise an exception if this rank would wait forever. `wait` calls this repeatedly, in any thread."""
        fabric = self.fabric
        if not self._call and not concurrent():
            return
        if fabric.stopping():
            if self._interruptible and self._all_can_stop():
                raise KeyboardInterrupt(f"stopped in {self._call}")
        elif self._recovering:
            self._require_all_alive()
        elif (left := self._left()) is not None:
            raise ReplicaLeftError(f"{self._call}: replica {left} has left the training by an exception, so the others "
                                   "cannot complete it: catch exceptions on all ranks or on none")  # fmt: skip

    def _all_can_stop(self) -> bool:
        """Return whether no replica of a synchronous method will begin another step, in which it would need this one.

        If one has begun the next step, it has completed this rank's collective. So this rank will complete it, too.
        """
        fabric = self.fabric
        agreed = fabric.agreed_stop() if fabric.fail_fast else fabric.step
        return agreed is not None and agreed <= fabric.step

    def _left(self) -> int | None:
        """Return a rank that has left its training by an exception, or None."""
        left = self.fabric.status[:, Column.STATE] == State.LEFT
        return int(left.argmax()) if left.any() else None

    # -- a replica ---------------------------------------------------------------------------------------

    def require_finished(self, call: str) -> None:
        """Raise ConfigError if a replica of `join` has not finished."""
        if self.joined is not None:
            raise ConfigError(f"{call}: the replica of an earlier minidl.join has not finished: call its finish(), or "
                              "use it in a `with` block")  # fmt: skip

    def enter(self, call: str, model: Module, config: Config, facts: Mapping[str, object]) -> type[Method]:
        """Make the model a replica, with the weights of rank 0; return its method. All ranks call this.

        Raises ConfigError if the ranks differ in version, model, facts or options, or if memory is short.
        """
        with self.collective(call):
            return self._enter(call, model, config, facts)

    def _enter(self, call: str, model: Module, config: Config, facts: Mapping[str, object]) -> type[Method]:
        fabric = self.fabric
        kind, replicas = chosen(config, self.size)
        arena = model.flatten()
        agree(fabric, call, {**facts_of_model(model), **facts, **facts_of_options(config)})
        self._require_all_alive()
        self._training = True
        vectors = [arena.theta] if model.statistics is None else [arena.theta, model.statistics.theta]
        for vector in vectors:
            fabric.group(fabric.replicas).broadcast(vector, 0)
        arena.touch()
        if model.statistics is not None:
            model.statistics.touch()
        of_training = {*Column} - {Column.PID, Column.INCARNATION}
        for column in sorted(of_training, key=lambda column: column is Column.STATE):  # STATE is the last one
            fabric.set_status(column, 0)
        fabric.assign(replicas)
        fabric.stall, fabric.step, fabric.led_by = config.stall, 0, None
        if isinstance(fabric.transport, MpiTransport):
            fabric.transport.fast = config.reduce == "fast"
        fabric.fail_fast = True
        fabric.join(kind.buffers(arena.size, config), arena.layout_hash)
        fabric.fail_fast = kind.synchronous and self.size > 1
        fabric.handle_freezes(kind.on_freeze(config))
        return kind

    def leave(self) -> None:
        """Make this process a rank without a replica, when all have the result. All live ranks call this."""
        fabric, leader = self.fabric, self.fabric.leader
        fabric.fail_fast = False
        if self.rank == leader:  # the others must receive the result before this rank may end
            others = [rank for rank in range(self.size) if rank != leader]
            received = lambda: all(fabric.state(rank) >= State.FINISHED for rank in others) or None  # noqa: E731
            fabric.wait(received, (), "the others to receive the result")
        fabric.set_status(Column.STATE, State.FINISHED)
        fabric.set_status(Column.STALL, 0)  # the rank is not suspected while the script computes
        if isinstance(fabric.transport, MpiTransport):
            fabric.transport.fast = False  # the sums of the script have the same bits under every launcher
        fabric.assign(range(self.size))
        self._training, self.joined = False, None

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """If the block raises an exception, abandon the training that it has begun."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """An exception has ended the training on this rank: tell the others, which would wait for this rank forever.

        They learn of SystemExit when the script ends. ReplicaLeftError is the exception of another rank.
        """
        self.joined = None
        if self._training and not isinstance(error, SystemExit | ReplicaLeftError):
            self.fabric.set_status(Column.STATE, State.LEFT)
            self.fabric.set_status(Column.STALL, 0)  # the rank is not suspected while the script computes

    def _recover(self, call: str) -> None:
        """After a training that was abandoned, drop the messages that are left. All ranks call this."""
        fabric = self.fabric
        if self._left() is None:
            fabric.set_status(Column.STATE, State.LEFT)
        fabric.start(lambda: None).wait()  # returns when the last concurrent operation has noticed this
        fabric.fail_fast, fabric.replicas, fabric.led_by, self._recovering = False, tuple(range(self.size)), None, True
        try:
            self._require_all_alive()
            fabric.join(BufferSpec(), "script")
            fabric.set_status(Column.STATE, State.FINISHED)
            states = fabric.status[:, Column.STATE]  # LEFT may still be on its way from a rank whose state is older
            fabric.wait(lambda: ((states >= State.FINISHED) & (states != State.LEFT)).all() or None, (), "all ranks")
        finally:
            self._recovering = False
        self._training = False

    def _require_all_alive(self) -> None:
        """Raise PeerLost if a rank is dead: the others make no memory for messages without it."""
        dead = next((rank for rank in range(self.size) if not self.fabric.alive(rank)), None)
        if dead is not None:
            raise PeerLost(dead, self._call)

    # -- the end of a rank -------------------------------------------------------------------------------

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In an MPI rank, end the job after an uncaught exception: other ranks would wait for this one forever."""
        assert self.job
        with suppress(OSError, ValueError):
            sys.stdout.flush()  # the job ends without it
        if isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, AbortedError):
            code = 2
            time.sleep(0.5)  # mpiexec may kill the rank that reports the error as soon as this one exits
        elif isinstance(error, MinidlError):
            code = self.job.fail(place_of(trace) + str(error), secondary=isinstance(error, ReplicaLeftError))
        else:
            code = self.job.crash(lambda: self._previous_hook(kind, error, trace))
        os._exit(code)

    def end(self) -> None:
        """Leave the job at the end of the script. Ranks that still wait for this one get an error."""
        fabric = self.fabric
        deadline = time.monotonic() + LEAVING
        transport = fabric.transport
        while self._started and isinstance(transport, MailboxTransport) and not transport.delivered():
            if fabric.stopping() or time.monotonic() > deadline:  # after a stop, the others end as well
                break
            time.sleep(0.001)
        fabric.set_status(Column.ENDED, 1)
        fabric.set_status(Column.STATE, State.DEAD)
        fabric.close()


@cache
def _world() -> World:
    return World()


def world() -> World:
    """Return the world of this process. The first call starts the communication, which all ranks must do."""
    here = _world()
    here.start()
    return here


def begun() -> World | None:
    """Return the world of this process if the script has used it, else None."""
    return _world() if _world.cache_info().currsize else None


def place_of(trace: TracebackType | None) -> str:
    """Return "script.py, line 12: " for the line of the script in a traceback, or "" if the script is not in it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    return f"{Path(script).name}, line {lines[-1]}: " if script and lines else ""

