"""Frozen ranks of a simulation: their processes are stopped for a while, as by SIGSTOP, and then go on.

    frozen at 3 s                suspected at 3 s + stall            killed, if the others cannot end without it
       |------- makes no step -------|------- left out --------|     or wakes, and is trusted again

The messages that it has sent still arrive, and those for it wait. The event loop does here what the launcher does with
real processes (comm/launch/monitor.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import Column, State, Trust

NOTICE = 5.0  # virtual seconds after a request to stop, after which ranks that are still frozen are killed


class Task(Protocol):
    """A task of event_loop.py."""

    @property
    def transport(self) -> Transport: ...


class Loop(Protocol):
    """The parts of an EventLoop that this file uses."""

    time: float
    status: np.ndarray
    trust: np.ndarray
    stop_asked: bool
    ready: deque[Any]

    @property
    def running(self) -> Mapping[int, Task]: ...

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None: ...

    def die(self, rank: int) -> None: ...

    def wake_all(self) -> None: ...


class Freeze(NamedTuple):
    """began, ends: virtual seconds. held: the tasks that go on when it ends."""

    began: float
    ends: float
    held: list[Task]


class Freezes:
    """The frozen ranks of a simulation. planned: (time, rank, seconds) of each freeze. stall: see `--stall`."""

    def __init__(self, loop: Loop, planned: Sequence[tuple[float, int, float]], stall: float) -> None:
        self.loop, self.stall, self.ending = loop, stall, False
        self.present: dict[int, Freeze] = {}  # by rank
        for time, rank, seconds in planned:
            loop.at(time, lambda rank=rank, seconds=seconds: self.freeze(rank, seconds))

    def holds(self, task: Task) -> bool:
        """Return whether a task's rank is frozen. The task then goes on when the rank wakes."""
        freeze = self.present.get(task.transport.rank)
        if freeze is not None:
            freeze.held.append(task)
        return freeze is not None

    def wakes_at(self, rank: int) -> float:
        """Return the time at which a rank is not frozen any more."""
        freeze = self.present.get(rank)
        return self.loop.time if freeze is None else freeze.ends

    def fence(self, rank: int) -> None:
        """Kill a condemned rank."""
        self.loop.at(self.loop.time, self._kill, rank)

    def stop(self) -> None:
        """Kill those that are frozen from now on, when they have had time to notice the request to stop."""
        for rank, freeze in self.present.items():
            self.loop.at(self.loop.time + NOTICE, self._kill, rank, freeze.began)

    def end(self) -> None:
        """A rank has ended without an error: kill those that are suspected from now on, as they delay the end."""
        self.ending = True
        for rank, freeze in self.present.items():
            self._kill_suspect(rank, freeze.began)

    def forget(self, rank: int) -> None:
        """Forget a rank that has died."""
        self.present.pop(rank, None)
        self.loop.trust[rank] = Trust.TRUSTED

    def freeze(self, rank: int, seconds: float) -> None:
        """Stop a rank's process, unless it has ended or is frozen already."""
        loop = self.loop
        if rank in self.present or rank not in loop.running or loop.status[rank, Column.STATE] == State.DEAD:
            return
        self.present[rank] = Freeze(loop.time, loop.time + seconds, [])
        loop.at(loop.time + seconds, self._wake, rank, loop.time)
        if seconds > self.stall:
            loop.at(loop.time + self.stall, self._suspect, rank, loop.time)

    def _suspect(self, rank: int, began: float) -> None:
        loop = self.loop
        if self._since(rank) != began:
            return
        if loop.stop_asked:
            self._kill(rank)
            return
        loop.trust[rank] = Trust.SUSPECTED
        loop.wake_all()
        if self.ending:
            self._kill_suspect(rank, began)

    def _kill_suspect(self, rank: int, began: float) -> None:
        self.loop.at(max(self.loop.time, began + max(self.stall, NOTICE)), self._kill, rank, began)

    def _wake(self, rank: int, began: float) -> None:
        if self._since(rank) == began:
            self.loop.ready.extend(self.present[rank].held)
            self.forget(rank)

    def _kill(self, rank: int, began: float | None = None) -> None:
        if rank in self.present and began in (None, self._since(rank)):
            self.loop.die(rank)

    def _since(self, rank: int) -> float | None:
        """Return when the present freeze of a rank began, or None if it is not frozen."""
        return self.present[rank].began if rank in self.present else None
