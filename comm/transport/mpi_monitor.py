"""Frozen ranks of an MPI job, and nodes out of contact. There is no launcher of ours that could look for them.

    first rank of a node       looks for signs of life of the others on its node (comm/launch/monitor.py)
    second rank of a node      looks for signs of life of the first one
    both                       tell the other nodes whom they suspect, and whom they trust again (TRUST)
    first rank of each node    looks for signs of life that arrive from the other nodes: a rank that is alone on its
                               node may be frozen, a link may be cut

"First" and "second" are among the ranks that are alive and trusted. So another rank takes over if the first one is
frozen itself.

A rank that must end is killed, if the job survives that (failures.py) and the rank is on this node. Else the others
treat it as dead (DEATH): they save, and it is killed when they leave. If it wakes before, it ends itself, or stops
itself again where its death would end the job. The others cannot save if it is the leader, which has locked the run's
folder: the job ends at once.

If a link is cut, each side sees the other one as frozen. Only one side may go on: the one with more replicas, or with
the leader if they have the same number. The other one waits until it hears of them again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from minidl.comm import memory
from minidl.comm.launch.job import HYDRA
from minidl.comm.launch.monitor import Monitor, main_thread, tell
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.messages import Column, State, Trust
from minidl.comm.transport.mpi_states import NEWS
from minidl.comm.transport.progress_engine import ProgressEngine

TRUST, DEATH = NEWS + 1, NEWS + 2  # tags
AGAIN = 5.0  # seconds after which a suspicion is told again


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

    def trusts(self, rank: int) -> bool:
        """Return whether a rank is alive and not suspected. A rank trusts itself."""
        return self.alive(rank) and not self.suspected(rank)

    @abstractmethod
    def elect(self) -> None:
        """Choose the ranks to which this one sends what concerns other nodes, among those that it trusts."""


class LinkMonitor(Monitor):
    """Looks for signs of life that arrive from other nodes. Each is one of all ranks of its node.

    Of the ranks that look at other nodes, only the first one prints what it sees.
    """

    late = 2.0
    killing = "it counts as dead"

    def __init__(self, transport: NodeTransport, words: memoryview[int], numbers: memoryview[float]) -> None:
        super().__init__(words, numbers)
        self.transport = transport
        self._latest: dict[int, float] = {}  # by group, the time of the last sign of life

    def look(self, processes: Mapping[int, int], ending: bool) -> list[int]:
        groups, heard = self.transport.groups, self.transport.heard
        self._latest.clear()
        for rank in processes:
            self._latest[groups[rank]] = max(self._latest.get(groups[rank], 0.0), heard[rank])
        return super().look(processes, ending)

    def sign(self, rank: int, process: int) -> tuple[tuple[float, int], str]:
        return (self._latest[self.transport.groups[rank]], 0), ""

    def name(self, rank: int, process: int) -> str:
        return self.transport.described(rank)

    def tell(self, words: str) -> None:
        before = [rank for rank in range(self.transport.rank) if self.transport.trusts(rank)]
        if not any(map(self.in_contact, before)):
            super().tell(words)

    def may_end_others(self) -> bool:
        return self.may_go_on() or bool(self.words[memory.STOP])

    def may_go_on(self) -> bool:
        """Return whether this side of a cut link may go on without the other one."""
        transport = self.transport
        here = {rank: self.in_contact(rank) for rank in transport.survivors()}
        more = sum(here.values()) - len(here) / 2
        return more > 0 or (more == 0 and here[transport.leader])

    def in_contact(self, rank: int) -> bool:
        return rank in self.transport.beside or self._silent.get(rank, 0.0) <= self.late


class NodeMonitor:
    """The part of one rank. Its progress engine calls `tick`."""

    def __init__(self, transport: NodeTransport) -> None:
        self.transport = transport
        control = memoryview(transport.segment.map(memory.control_size(transport.size)))
        self.words, numbers = control.cast("q"), control.cast("d")
        self.near, self.far = Monitor(self.words, numbers), LinkMonitor(transport, self.words, numbers)
        self.ended: set[int] = set()  # ranks that this one has ended
        self.given_up: set[int] = set()  # ranks that all treat as dead, although their processes may live
        self._next = 0.0  # when to look next
        self._told: dict[int, tuple[int, float]] = {}  # by rank, what this one has told of it (Trust), and when
        self._trusted: list[int] = []
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
        live = [rank for rank in range(transport.size) if transport.alive(rank) and rank not in self.ended]
        near = {rank: int(transport.status[rank, Column.PID]) for rank in self._near(live)}
        far = {rank: 0 for rank in live if rank in transport.remote} if self._looks_far(live) else {}
        self._next = now + self.near.pause(near or far or {transport.rank: 0})
        for rank in self.near.look(near, False):
            self.end(rank)
        for rank in self.far.look(far, False):
            if not self.far.may_go_on():
                self._leave()
            self.end(rank)
        self._tell(near)
        self._condemn(far)
        trusted = [rank for rank in live if transport.trusts(rank)]
        if trusted != self._trusted:
            self._trusted = trusted
            transport.elect()

    def _near(self, live: list[int]) -> list[int]:
        """Return the ranks of this node that this one looks at."""
        transport = self.transport
        beside = [rank for rank in live if rank in transport.beside]
        trusted = [rank for rank in beside if transport.trusts(rank)]
        if trusted[:1] == [transport.rank]:
            return [rank for rank in beside if rank != transport.rank]
        return trusted[:1] if trusted[1:2] == [transport.rank] else []

    def _looks_far(self, live: list[int]) -> bool:
        """Return whether this rank looks at the other nodes."""
        transport = self.transport
        return [rank for rank in transport.beside if rank in live and transport.trusts(rank)][:1] == [transport.rank]

    # -- messages about trust ----------------------------------------------------------------------------

    def _tell(self, near: Iterable[int]) -> None:
        """Tell the other nodes how much this rank trusts those that it looks at."""
        for rank in near:
            self._send(rank, self.transport.relays)

    def _condemn(self, far: Iterable[int]) -> None:
        """Tell the nodes of suspected ranks which of them the others cannot wait for."""
        transport, groups = self.transport, self.transport.groups
        for rank in far:
            if transport.trust[rank] == Trust.CONDEMNED:
                self._send(rank, [peer for peer in far if groups[peer] == groups[rank] and peer != rank])

    def _send(self, rank: int, peers: Sequence[int]) -> None:
        """Tell these ranks how much this one trusts another, if that is new. Repeat a suspicion: it may be lost."""
        now, trust = time.monotonic(), int(self.transport.trust[rank])
        told, when = self._told.get(rank, (Trust.TRUSTED, 0.0))
        if trust != told or (trust and now - when > AGAIN):
            self._told[rank] = trust, now
            for peer in peers:
                self.transport.engine.send(peer, TRUST, np.array([rank, trust]).view(np.uint8))

    def learn(self, tag: int, rank: int, trust: int) -> None:
        """Handle a message of another rank about a rank."""
        transport = self.transport
        if tag == DEATH:
            self.given_up.add(rank)
            if rank == transport.rank:
                transport.status[rank, Column.STATE] = State.DEAD  # `tick` ends it again if it goes on
                self._end_itself()
            transport.engine.bury([rank])
        elif rank not in transport.beside:
            transport.trust[rank] = max(trust, transport.trust[rank]) if trust else trust
        elif trust == Trust.CONDEMNED and transport.trust[rank] == Trust.SUSPECTED:
            transport.trust[rank] = trust  # the others cannot wait for it

    # -- the end of a frozen rank ------------------------------------------------------------------------

    def end(self, rank: int) -> None:
        """End a frozen rank."""
        transport = self.transport
        self.ended.add(rank)
        if transport.engine.failures is None and rank == transport.leader:
            tells = tell if rank in transport.beside else self.far.tell
            tells("this ends the job, because that replica holds the folder of the run; --resume continues the run "
                  "from its last checkpoint")  # fmt: skip
            self._kill(rank)
            transport.engine.end_job(1)
        elif transport.engine.failures is not None and rank in transport.beside:
            self._kill(rank)
        else:
            self._give_up(rank)

    def close(self) -> None:
        """Kill the ranks that the others have given up. This ends the job. Ranks of other nodes end with the job."""
        transport = self.transport
        if transport.engine.failures is None:
            for rank in self.ended:
                self._kill(rank)
        if transport.rank == transport.leader and self.given_up - {*transport.beside}:
            transport.engine.end_job(0)

    def _kill(self, rank: int) -> None:
        if rank in self.transport.beside:
            with suppress(OSError):
                os.kill(int(self.transport.status[rank, Column.PID]), signal.SIGKILL)

    def _leave(self) -> None:
        """End this node, which was asked to stop while it cannot reach the others."""
        tell("this node is out of contact, and ends; --resume continues the run from its last checkpoint")
        for rank in sorted(self.transport.beside, key=lambda rank: rank == self.transport.rank):  # itself last
            self._kill(rank)

    def _end_itself(self) -> None:
        """End this rank, which was frozen, and which the others have given up."""
        # An exit with an error code ends the job, also with ULFM. A death by a signal does not.
        os.kill(os.getpid(), signal.SIGSTOP if self.transport.engine.failures is None else signal.SIGKILL)

    def _bereaved(self, *signal_and_frame: object) -> None:
        """End this rank: `mpiexec -disable-auto-cleanup` of MPICH sends SIGUSR1 if another one has died.

        The first live rank of the node says so.
        """
        transport = self.transport
        before = [rank for rank in transport.beside if rank < transport.rank]
        dead = [main_thread(int(transport.status[rank, Column.PID]))[1] in ("", "Z", "X") for rank in before]
        if all(dead) and not transport.status[before, Column.TOLD].any():
            transport.status[transport.rank, Column.TOLD] = 1
            tell("a rank has died, which ends a job of MPICH; --resume continues a run from its last checkpoint")
        time.sleep(0.5)  # lets mpiexec forward the line
        os._exit(1)

    def _give_up(self, rank: int) -> None:
        """Make all ranks treat a rank as dead, also itself if it wakes."""
        transport = self.transport
        self.given_up.add(rank)
        for peer in range(transport.size):
            if peer != transport.rank and transport.alive(peer):
                transport.engine.send(peer, DEATH, np.array([rank, 0]).view(np.uint8))
        transport.engine.order(partial(transport.engine.bury, [rank]))  # after the messages: it sends none to the dead
