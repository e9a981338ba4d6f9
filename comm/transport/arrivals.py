"""Ranks that join a simulation while it runs, as `--join` adds replicas to a real job.

    place       empty ── `fill` ──> COMING ── ARRIVED ──> a member (training/newcomer.py) ── a death ──> empty

The event loop does here what the launcher does with real processes (comm/launch/local.py). A newcomer of the same rank
as a dead one is another process: it has a new transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from minidl.comm import memory
from minidl.comm.cluster import Cluster, Place
from minidl.comm.transport.messages import Column, State


class Loop(Protocol):
    """The parts of an EventLoop that this file uses."""

    time: float
    status: np.ndarray
    stop_asked: bool

    @property
    def running(self) -> Mapping[int, object]: ...

    @property
    def servers(self) -> tuple[int, ...]: ...

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None: ...

    def refill(self, rank: int) -> None: ...

    def die(self, rank: int) -> None: ...


class Arrivals:
    """The ranks that join later. number: of the newcomers so far. invited: whether ranks can join now."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.number, self.invited = loop, 0, True

    def fill(self, rank: int) -> None:
        """Start a newcomer in a place. Without effect if the place is not empty, or if the job is about to end."""
        loop = self.loop
        row = loop.status[rank]
        empty = row[Column.STATE] == State.DEAD and rank not in loop.running and rank not in loop.servers
        if not empty or not self.invited or loop.stop_asked:
            return
        self.number += 1
        joined = row[Column.JOINED]  # others may need it still
        row[:] = 0
        row[Column.JOINED] = joined
        row[Column.STATE], row[Column.INCARNATION] = State.DEAD, self.number  # DEAD until it has entered
        loop.refill(rank)

    def is_newcomer(self, rank: int) -> bool:
        """Return whether `fill` has started this rank, and it is no member yet."""
        row = self.loop.status[rank]
        return not memory.is_member(row[Column.STATE]) and bool(row[Column.INCARNATION])

    def look(self) -> None:
        """If no member runs any more, end the newcomers."""
        loop = self.loop
        if self.number and all(self.is_newcomer(rank) for rank in loop.running):
            for rank in list(loop.running):
                loop.at(loop.time, loop.die, rank)


def beginners(cluster: Cluster, place: Place, begin: float) -> int:
    """Return how many ranks are there at the virtual time `begin`. The others join later.

    A rank joins late if the first of its events is a join. If it dies first, a newcomer fills its place again.
    Raises ConfigError unless the late ranks are the last ones, and join in their order: a run begins with the first
    ranks.
    """
    first: dict[int, tuple[float, bool]] = {}
    deaths, joins = [(*event, False) for event in place.deaths], [(*event, True) for event in place.joins]
    for time, rank, joining in sorted([*deaths, *joins], key=lambda event: (event[0], event[2])):
        first.setdefault(rank, (time, joining))
    late = [(rank, time) for rank, (time, joining) in sorted(first.items()) if joining]
    ranks = len(place.nodes)
    began, times = ranks - len(late), [time for _, time in late]
    for number, (rank, _) in enumerate(late, began):
        if rank != number or times != sorted(times) or began < 2:
            raise cluster.wrong(f"[[joins]] rank {rank}: expected that the last of the {ranks} ranks join, in their "
                                "order, and that the run begins with at least two ranks")  # fmt: skip
    return ranks - sum(time > begin or not begin for time in times)
