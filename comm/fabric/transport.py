"""What a transport does: the primitives, who is there, and how one waits.

A transport carries letters between ranks, in memory (shm.py), by MPI (mpi.py) or in a simulation (sim.py). What methods
do with them is made of these primitives in base.py, once for all.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from minidl.comm.fabric.words import ANY, Channel, Column, Letter, Needs, Note, PeerLost, Pending, State
from minidl.comm.meter import Meter
from minidl.errors import AbortedError as Aborted

T = TypeVar("T")


class Transport(ABC):
    """One rank's place among `size` ranks.

    replicas: the ranks that train; the others serve. nodes[r]: the node of rank r. stall: seconds after which somebody
    who waits says for whom.
    """

    def __init__(self, rank: int, size: int, nodes: Sequence[int], meter: Meter, stall: float = 30.0) -> None:
        self.rank, self.size, self.nodes, self.meter, self.stall = rank, size, tuple(nodes), meter, stall
        self.replicas: tuple[int, ...] = tuple(range(size))
        self.board = np.zeros((size, len(Column)))  # a transport may put one in its place that lies elsewhere
        self.heard = [0.0] * size  # when a peer last gave a sign of life, as far as this rank knows
        meter.attach(size, self.now)
        self.stop_wanted = False  # a signal came
        self.fail_fast = False  # the death of any replica ends all waiting: synchronous methods
        self.step = 0

    # -- the primitives ----------------------------------------------------------------------------------

    @abstractmethod
    def join(self, needs: Needs, layout: str) -> None:
        """Get the memory, and meet the others. layout: the arena's hash, which must be the same for all.

        Raises ConfigError where layouts differ or memory is short.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds since some moment that all ranks agree on, roughly."""

    @abstractmethod
    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], note: Note) -> bool:
        """Send a copy of the parts, one behind the other, to every one of the peers, without waiting.

        False: nothing was sent, since one of them has not taken the message before it, or no memory is free.
        All parts are of one type, float32 or float64, one axis, contiguous.
        """

    @abstractmethod
    def take(self, channel: Channel, peer: int = ANY) -> Letter | None:
        """The next message from a peer, or from the next in turn that sent one."""

    @abstractmethod
    def publish(self, parts: Sequence[np.ndarray], note: Note) -> None:
        """Let peers see a copy of the parts, as the newest. Never waits: with no memory free, nothing is published."""

    @abstractmethod
    def latest(self, peer: int) -> Letter | None:
        """What a peer published last, as far as it has come; None where that was seen before, or is not here yet.

        Where it lies on another node it is asked for, and comes with a later call.
        """

    @abstractmethod
    def announce(self, column: Column, value: float) -> None:
        """Write a number on the board; others see it soon."""

    @abstractmethod
    def idle(self, attempt: int) -> None:
        """Let others work, after so many attempts in vain."""

    @abstractmethod
    def start(self, work: Callable[[], T]) -> Pending[T]:
        """Do work beside this replica's own: after what was started before it, in the same order on all replicas."""

    @abstractmethod
    def shared(self, name: str) -> np.ndarray:
        """A float32 vector (see Needs.shared) that all ranks read and write, without any lock (Niu et al. 2011).

        Raises ConfigError where ranks share no memory.
        """

    def elapse(self, what: str, amount: float) -> None:
        """Work was done that takes time: a simulation moves its clock. Others' moves by itself."""

    def aborted(self) -> bool:
        """Whether another rank has failed."""
        return False

    def fail(self) -> None:
        """This rank ends with an error, and has said so: see to it that the others end, too."""

    def close(self) -> None:
        """Leave. Nothing is left behind."""

    # -- who is there ------------------------------------------------------------------------------------

    def state(self, peer: int) -> State:
        return State(int(self.board[peer, Column.STATE]))

    def alive(self, peer: int) -> bool:
        return bool(self.board[peer, Column.STATE] != State.DEAD)

    def survivors(self) -> list[int]:
        """The replicas that are not dead, in order."""
        return [rank for rank in self.replicas if self.alive(rank)]

    @property
    def leader(self) -> int:
        """The replica that speaks for all: the first that is alive."""
        return next(iter(self.survivors()), self.replicas[0])

    # -- time --------------------------------------------------------------------------------------------

    def wait(
        self, ready: Callable[[], T | None], peers: Sequence[int] = (), what: str = "", stall: float = 0.0
    ) -> T:
        """Wait until ready() is something, and return it. stall: in place of the fabric's.

        Raises PeerLost where one of the peers is dead and it still is nothing, Aborted where another rank has failed.
        """
        result = ready()
        if result is not None:
            return result
        began, attempt, told = self.now(), 0, self.now()
        while True:
            lost = self.lost(peers)
            result = ready()  # after looking who is dead: what was sent before is here
            if result is not None:
                break
            if lost is not None:
                raise PeerLost(lost, what)
            if self.aborted():
                raise Aborted
            self._consider_stopping()
            self.idle(attempt)
            attempt += 1
            if attempt % 64 == 0 and self.now() - told > (stall or self.stall):
                told = self.now()
                self._tell_stall(told - began, peers, what)
        self.meter.waited(began, self.now())
        return result

    def lost(self, peers: Sequence[int]) -> int | None:
        """One that is dead of the peers, or of all replicas where the death of any ends all waiting."""
        return next((peer for peer in (self.replicas if self.fail_fast else peers) if not self.alive(peer)), None)

    def _tell_stall(self, seconds: float, peers: Sequence[int], what: str) -> None:
        ages = ", ".join(f"{peer} (last heard of {self.now() - self.heard[peer]:.0f} s ago, in step "
                         f"{self.board[peer, Column.STEP]:.0f})" for peer in peers)  # fmt: skip
        line = f"minidl: replica {self.rank} has waited {seconds:.0f} s for {what}"
        print(f"{line} of replica {ages}" if ages else line, file=sys.stderr, flush=True)

    @contextmanager
    def working(self, what: str, amount: float = 0.0) -> Iterator[None]:
        """Count the time of some work: "gradient" of `amount` images, "update" or "mix" of `amount` elements."""
        began = self.now()
        yield
        self.elapse(what, amount)
        self.meter.worked(what, began, self.now())

    def stopping(self) -> bool:
        return self.stop_wanted or bool(self.board[:, Column.STOP].any())

    def _consider_stopping(self) -> None:
        if self.stopping() and not self.board[self.rank, Column.STOP]:
            self.announce(Column.STOP, 1 + self.step)
