"""This process among the ranks of a script: its fabric, and its replica.

`python -m minidl.launch --workers 4 script.py` and `mpiexec -n 4 python script.py` start a script several times. The
functions that such a script calls (fit, join, allreduce ...) share one `World`, which the first of them creates:

    world()  ->  enter        the model becomes a replica: the weights of rank 0, memory for the method's messages
                 leave        it is no replica any more
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType

from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Freeze, PeerLost, State
from minidl.comm.methods.base import Method
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.mpi import MpiTransport
from minidl.errors import AbortedError, MinidlError
from minidl.nn import Module
from minidl.run.config import Config
from minidl.training.agreement import agree, facts_of_model, facts_of_options
from minidl.training.job import find_job
from minidl.training.session import chosen

LEAVING = 2.0  # seconds that a rank which ends waits until others have received its last messages


class World:
    """The ranks that run a script. Without a launcher, or with a single MPI rank, `job` is None and the size is 1."""

    def __init__(self) -> None:
        self.job = find_job()
        if self.job is None or (self.job.size == 1 and not self.job.launched):
            self.job = None
            self.fabric = Fabric(LoopbackTransport())
            return
        self.fabric = self.job.join(Config())
        if not self.job.launched:  # the launcher's ranks handle errors in minidl/launch.py
            self._previous_hook, sys.excepthook = sys.excepthook, self._uncaught
            atexit.register(self.end)
        self.fabric.join(BufferSpec(), "script")

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def size(self) -> int:
        return self.fabric.size

    # -- a replica ---------------------------------------------------------------------------------------

    def enter(self, call: str, model: Module, config: Config, facts: Mapping[str, object]) -> type[Method]:
        """Make the model a replica, with the weights of rank 0; return its method. All ranks call this.

        Raises ConfigError if the ranks differ in version, model, facts or options, or if memory is short.
        """
        fabric = self.fabric
        kind, replicas = chosen(config, self.size)
        arena = model.flatten()
        agree(fabric, call, {**facts_of_model(model), **facts, **facts_of_options(config)})
        if len(fabric.replicas) < self.size:
            dead = next(rank for rank in range(self.size) if not fabric.alive(rank))
            raise PeerLost(dead, "the beginning of another training")
        vectors = [arena.theta] if model.statistics is None else [arena.theta, model.statistics.theta]
        for vector in vectors:
            fabric.group(fabric.replicas).broadcast(vector, 0)
        arena.touch()
        if model.statistics is not None:
            model.statistics.touch()
        of_training = {*Column} - {Column.PID, Column.INCARNATION}
        for column in sorted(of_training, key=lambda column: column is Column.STATE):  # STATE is the last one
            fabric.set_status(column, 0)
        fabric.replicas = replicas
        fabric.stall, fabric.step, fabric.led_by = config.stall, 0, None
        if isinstance(fabric.transport, MpiTransport):
            fabric.transport.fast = config.reduce == "fast"
        fabric.join(kind.buffers(arena.size, config), arena.layout_hash)
        fabric.fail_fast = kind.synchronous and self.size > 1
        fabric.handle_freezes(Freeze.WAIT if kind.synchronous else Freeze.LEAVE_OUT)
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
        fabric.set_status(Column.STALL, 0)  # nobody suspects this rank while the script computes
        if isinstance(fabric.transport, MpiTransport):
            fabric.transport.fast = False  # the sums of the script have the same bits under every launcher
        fabric.replicas = tuple(range(self.size))

    # -- the end of a rank -------------------------------------------------------------------------------

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In an MPI rank, end the job after an uncaught exception: other ranks would wait for this one forever."""
        assert self.job
        if isinstance(error, KeyboardInterrupt):
            os._exit(130)
        if isinstance(error, AbortedError):
            self.fabric.fail()
        elif isinstance(error, MinidlError):
            self.job.fail(place_of(trace) + str(error))
        elif self.job.reports():
            self._previous_hook(kind, error, trace)  # prints the traceback, and ends the job

    def end(self) -> None:
        """Leave the job at the end of the script. Ranks that still wait for this one get an error."""
        fabric = self.fabric
        deadline = time.monotonic() + LEAVING
        transport = fabric.transport
        while isinstance(transport, MailboxTransport) and not transport.delivered() and time.monotonic() < deadline:
            time.sleep(0.001)
        fabric.set_status(Column.STATE, State.DEAD)
        fabric.close()


@cache
def world() -> World:
    """Return the world of this process. The first call starts the communication, which all ranks must do."""
    return World()


def place_of(trace: TracebackType | None) -> str:
    """Return "script.py, line 12: " for the line of the script in a traceback, or "" if the script is not in it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    return f"{Path(script).name}, line {lines[-1]}: " if script and lines else ""

