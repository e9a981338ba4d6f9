"""Frozen ranks of an MPI job. There is no launcher of ours that could look for them, so the ranks of a node do it.

    first rank of the node      looks for signs of life of the others (comm/launch/monitor.py)
    second rank of the node     looks for signs of life of the first one
    other nodes                 learn from messages whom this node trusts (TRUST), and whom they cannot wait for

"First" and "second" are among the ranks that are alive and trusted. So another rank takes over if the first one is
frozen itself. If a rank is alone on its node, only its messages tell the others that it is alive: the first rank of the
job looks at their age.

A rank that must end is killed, if the job survives that (failures.py). If the death of a process would end the job, the
others treat the rank as dead: they save, and it is killed when they leave. If it wakes before, it stops itself again.
They cannot save if it is the leader, which has locked the run's folder: the job ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np

from minidl.comm import memory
from minidl.comm.launch.job import HYDRA
from minidl.comm.launch.monitor import FATES, Monitor, main_thread, tell
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.messages import Column, State, Trust
from minidl.comm.transport.mpi_states import NEWS
from minidl.comm.transport.progress_engine import ProgressEngine

TRUST, DEATH = NEWS + 1, NEWS + 2  # tags


class NodeTransport(MailboxTransport):
    """A transport between nodes, as the monitor sees it.

    groups[r]: the first rank of the node of rank r. beside, remote: the ranks of this node, and of the others. relays:
    the ranks that receive rows of the status table for the other nodes.
    """

    engine: ProgressEngine
    groups: list[int]
    beside: list[int]
    remote: frozenset[int]
    relays: list[int]


class NodeMonitor:
    """The part of one rank. Its progress engine calls `tick`."""

    def __init__(self, transport: NodeTransport) -> None:
        self.transport = transport
        control = memoryview(transport.segment.map(memory.control_size(transport.size)))
        self.words = control.cast("q")
        self.monitor = Monitor(self.words, control.cast("d"))
        self.ended: set[int] = set()  # ranks that this one has ended
        self._next = 0.0  # when to look next
        self._told: dict[int, int] = {}  # by rank, the Trust that the other nodes know
        if transport.engine.job.launcher == HYDRA and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._bereaved)  # else it ends the process without a message

    def tick(self) -> None:
        transport, now = self.transport, time.monotonic()
        if now < self._next:
            return
        if transport.state(transport.rank) == State.DEAD and not transport.status[transport.rank, Column.ENDED]:
            self._end_itself()
        if transport.stopping():
            self.words[memory.STOP] = self.words[memory.STOP] or signal.SIGTERM
        near = self._near()
        processes = {rank: int(transport.status[rank, Column.PID]) for rank in near}
        self._next = now + self.monitor.pause(processes or {transport.rank: 0})
        for rank in self.monitor.look(processes, False):
            self.end(rank)
        if transport.rank == transport.leader:
            self._look_far()
        self._tell()

    def _near(self) -> list[int]:
        """Return the ranks of this node that this one looks at."""
        transport = self.transport
        live = [rank for rank in transport.beside if transport.alive(rank) and rank not in self.ended]
        trusted = [rank for rank in live if not transport.trust[rank] or rank == transport.rank]
        if transport.rank == trusted[0]:
            return [rank for rank in live if rank != transport.rank]
        return trusted[:1] if transport.rank == trusted[1] else []

    def _look_far(self) -> None:
        """Look for signs of life of ranks that are alone on their nodes."""
        transport = self.transport
        for rank in self._alone():
            row = transport.status[rank]
            silent, patience = transport.now() - transport.heard[rank], max(row[Column.STALL], row[Column.PATIENCE])
            trains = row[Column.STALL] and transport.state(rank) not in (State.JOINING, State.READY)
            if trains and silent > patience + 2 and not transport.trust[rank]:
                transport.trust[rank] = Trust.SUSPECTED
                tell(f"{transport.described(rank)} has shown no sign of life for {silent:.0f} s: "
                     f"{FATES[self.monitor.fate(rank)]}")  # fmt: skip
            elif transport.trust[rank] == Trust.CONDEMNED:
                tell(f"{transport.described(rank)} still shows no sign of life: the others end without it")
                self.end(rank)

    def _tell(self) -> None:
        """Tell the other nodes whom this rank suspects or condemns, and whom it trusts again."""
        transport = self.transport
        for rank in range(transport.size):
            trust = int(transport.trust[rank])
            if trust != self._told.get(rank, Trust.TRUSTED) and transport.alive(rank):
                self._told[rank] = trust
                self._send_trust(rank, trust)

    def learn(self, tag: int, rank: int, trust: int) -> None:
        """Handle a message of another rank about a rank."""
        transport = self.transport
        if tag == DEATH and rank == transport.rank:
            self._end_itself()
        elif tag == DEATH:
            transport.engine.bury([rank])
        elif rank not in transport.beside:
            transport.trust[rank] = self._told[rank] = trust
        elif trust == Trust.CONDEMNED and transport.trust[rank] == Trust.SUSPECTED:
            transport.trust[rank] = trust  # the others cannot wait for it

    def end(self, rank: int) -> None:
        """End a frozen rank."""
        transport = self.transport
        self.ended.add(rank)
        if transport.engine.failures is None and rank == transport.leader:
            tell("this ends the job, because that replica holds the folder of the run; --resume continues the run from "
                 "its last checkpoint")  # fmt: skip
            self._kill(rank)
            transport.engine.end_job(1)
        elif transport.engine.failures is not None and rank in transport.beside:
            self._kill(rank)
        else:
            self._give_up(rank)

    def close(self) -> None:
        """Kill the ranks that the others have given up. Their deaths end the job."""
        if self.transport.engine.failures is None:
            for rank in self.ended:
                self._kill(rank)

    def _kill(self, rank: int) -> None:
        if rank in self.transport.beside:
            with suppress(OSError):
                os.kill(int(self.transport.status[rank, Column.PID]), signal.SIGKILL)

    def _end_itself(self) -> None:
        """End this rank, which was frozen, and which the others have given up."""
        if self.transport.engine.failures is not None:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _bereaved(self, *signal_and_frame: object) -> None:
        """End this rank: `mpiexec -disable-auto-cleanup` of MPICH sends SIGUSR1 if another one has died.

        The first live rank of the node says so.
        """
        transport = self.transport
        before = [rank for rank in transport.beside if rank < transport.rank]
        if all(main_thread(int(transport.status[rank, Column.PID]))[1] in ("", "Z", "X") for rank in before):
            tell("a rank has died, which ends a job of MPICH; --resume continues a run from its last checkpoint")
        time.sleep(0.5)  # lets mpiexec forward the line
        os._exit(1)

    # -- messages ----------------------------------------------------------------------------------------

    def _alone(self) -> list[int]:
        """Return the live ranks of other nodes whose nodes have no other live rank."""
        transport, groups = self.transport, self.transport.groups
        live = [groups[rank] for rank in range(transport.size) if transport.alive(rank)]
        return [rank for rank in transport.remote if transport.alive(rank) and live.count(groups[rank]) == 1]

    def _send_trust(self, rank: int, trust: int) -> None:
        """Tell the relays of other nodes, and the ranks on the node of this rank, how much it is trusted."""
        transport, groups = self.transport, self.transport.groups
        near = [peer for peer in transport.remote if transport.alive(peer) and groups[peer] == groups[rank]]
        for peer in {*transport.relays, *near} - {rank}:
            transport.engine.send(peer, TRUST, np.array([rank, trust]).view(np.uint8))

    def _give_up(self, rank: int) -> None:
        """Make all ranks treat a rank as dead."""
        transport = self.transport
        for peer in range(transport.size):
            if peer != transport.rank and transport.alive(peer):
                transport.engine.send(peer, DEATH, np.array([rank, 0]).view(np.uint8))
        transport.engine.bury([rank])
