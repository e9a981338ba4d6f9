"""Streams, events and graphs of the fake driver: lists of work that is done late, or at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], None]


@dataclass
class Stream:
    """Work in the order in which it was asked for. captured: instead of being done, work goes to this list."""

    eager: bool
    waiting: deque[Work] = field(default_factory=deque)
    captured: list[Work] | None = None

    def add(self, work: Work) -> None:
        if self.captured is not None:
            self.captured.append(work)
            return
        self.waiting.append(work)
        if self.eager:
            self.finish()

    def finish(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do the work that waits, in order, until a condition is met."""
        while self.waiting and not until():
            self.waiting.popleft()()


class Event:
    """A point in the work of a stream."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0  # how often
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded, self.stream = self.recorded + 1, stream
        number = self.recorded

        def reach() -> None:
            self.reached = max(self.reached, number)

        stream.add(reach)

    def wait(self, number: int) -> None:
        """Do the work of the event's stream until the event has happened for the `number`-th time."""
        if self.stream is not None:
            self.stream.finish(until=lambda: self.reached >= number)
