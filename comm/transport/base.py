"""The interface of a transport: its primitives, the state of each rank, and waiting.

A transport moves messages between ranks: in shared memory (shm.py), by MPI (mpi.py) or in a simulation (sim.py).
A fabric (comm/fabric/base.py) contains a transport, and builds everything that methods use from these primitives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from minidl.comm import memory
from minidl.comm.claims import Claims
from minidl.comm.stats import Stats, concurrent
from minidl.comm.transport import pausing
from minidl.comm.transport.messages import (
    ANY,
    BufferSpec,
    Channel,
    Column,
    Freeze,
    Header,
    Message,
    PeerLost,
    Pending,
    Slot,
    State,
    Trust,
)
from minidl.errors import AbortedError as Aborted
from minidl.errors import tell

T = TypeVar("T")
LOOK = 64  # attempts of `wait` between two looks at the clock
SUSPENDED = 1.0  # seconds: if so much time passes between two looks, this process was suspended


class Transport(ABC):
    """The transport of one rank among `size` ranks.

    A job begins with the ranks below `began`. The other ranks are places, which newcomers may fill later
    (training/newcomer.py). replicas: the ranks that train or have died, in the order in which they came. servers: the
    other ranks that the job began with. beginners: the number of replicas that it began with. newcomer: whether this
    rank is one, and is no member yet.

    nodes[r]: the node of rank r. hosts[r]: the name of its host, "" if it is unknown. stall: seconds of waiting after
    which a rank prints what it waits for, and seconds without a sign of life after which it is suspected.
    """

    def __init__(
        self, rank: int, size: int, nodes: Sequence[int], stats: Stats, stall: float = 30.0, began: int = 0
    ) -> None:
        self.rank, self.size, self.nodes, self.stats, self.stall = rank, size, tuple(nodes), stats, stall
        self.began = self.beginners = began or size
        self.replicas: tuple[int, ...] = tuple(range(self.began))
        self.servers: tuple[int, ...] = ()
        self.status = np.zeros((size, len(Column)))  # status table; some transports replace it by shared memory
        self.hosts, self.heard = [""] * size, [0.0] * size  # heard: when the last sign of life of each rank arrived
        self.trust = np.zeros(size, np.int64)  # the Trust in each rank
        self.on_freeze = Freeze.WAIT
        stats.attach(self.began, self.now)
        self.newcomer = self.stop_wanted = False  # stop_wanted: whether a signal requested a stop
        self.interrupted: Callable[[], bool] = lambda: False  # whether this process has received such a signal
        self.fail_fast = False  # for synchronous methods: the death of any member ends every wait
        self.step = self.paused = 0  # the step begun last; the step after which the members changed last
        self.service: Callable[[], bool] | None = None  # see `Fabric.register`
        self.interrupt: Callable[[], None] | None = None  # `wait` calls it repeatedly: what it raises ends the wait

    # -- the primitives ----------------------------------------------------------------------------------

    @abstractmethod
    def join(self, buffers: BufferSpec, layout: str) -> None:
        """Allocate the memory. Outside a simulation, also wait until all ranks have called this function.

        All ranks may call it again, for other buffers. This drops what remains: messages that their receivers have not
        taken, published states and claims.

        layout: a hash of the arena's layout, equal on all ranks.
        Dead ranks do not delay the others. Raises PeerLost if a server is dead, or with `fail_fast` any replica, and
        ConfigError if memory is short or layouts differ; then other ranks may raise Aborted.
        """

    def enter(self, buffers: BufferSpec, layout: str) -> None:
        """Do what `join` does, as a newcomer of a running job, without the others. Raises ConfigError like `join`."""
        raise NotImplementedError

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since a moment that is about the same for all ranks."""

    @abstractmethod
    def reserve(self, channel: Channel, peers: Sequence[int], nbytes: int) -> Slot | None:
        """Return memory for a message of at most `nbytes` to these peers, without waiting. Write and commit it.

        Returns None if memory is full, or a peer is dead or has not released the previous message, or a slot for it is
        already reserved. On MAIL, the statistics count this as a skipped message.
        Raises ConfigError if the method requested smaller slots (BufferSpec). One thread at a time uses a channel.
        """

    @abstractmethod
    def take(self, channel: Channel, peer: int = ANY) -> Message | None:
        """Return the next message from a peer, or None. With ANY, choose fairly among the senders."""

    @abstractmethod
    def reserve_state(self, nbytes: int) -> Slot | None:
        """Return memory for a published state of at most `nbytes`, which `latest` reads as soon as it is committed.

        Returns None, and counts a missed read, if no memory is free or a slot for a state is already reserved.
        Raises ConfigError if the method requested smaller slots (BufferSpec).
        """

    @abstractmethod
    def latest(self, peer: int) -> Message | None:
        """Return a peer's published state, or None if this rank has seen this state or cannot read it now.

        If the peer is on another node, a call that returns None requests the state, unless a request is already on its
        way. A later call returns the reply: the state that the peer had published when the request reached it, or if
        this rank had seen that one, the peer's next state. So a reader that repeats the call until it gets a state gets
        one that is no older than the way there and back, and the time between two of its calls.
        """

    @abstractmethod
    def set_status(self, column: Column, value: float) -> None:
        """Write a number into this rank's row of the status table. The other ranks see it soon, not immediately."""

    @abstractmethod
    def idle(self, attempt: int) -> None:
        """Let other processes run. attempt: number of earlier calls of this function by the same `wait`."""

    @abstractmethod
    def start(self, work: Callable[[], T]) -> Pending[T]:
        """Run `work` concurrently with the replica: one function at a time, in the order of the calls."""

    @abstractmethod
    def shared(self, name: str) -> np.ndarray:
        """Return a float32 vector (see BufferSpec) that all ranks read and write without a lock (Niu et al. 2011).

        Raises ConfigError if the ranks share no memory.
        """

    # -- copies ------------------------------------------------------------------------------------------

    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], header: Header) -> bool:
        """Send a copy of the concatenated parts to each of the peers. Returns False if `reserve` fails.

        parts: contiguous vectors of one of the types in DTYPES (messages.py).
        """
        slot = self.reserve(channel, peers, _size(parts))
        return slot is not None and slot.send(parts, header)

    def publish(self, parts: Sequence[np.ndarray], header: Header) -> bool:
        """Publish a copy of the concatenated parts. Returns False if `reserve_state` fails."""
        slot = self.reserve_state(_size(parts))
        return slot is not None and slot.send(parts, header)

    # -- operations that some transports do faster than the fabric ---------------------------------------

    def native_allreduce(self, vector: np.ndarray) -> bool:
        """Compute vector = the sum of all replicas' vectors. Returns False if this is not supported."""
        return False

    def native_drain(self) -> Callable[[], bool] | None:
        """Begin `Fabric.drain`, and return a function that tells whether no message is in flight any more.

        Returns None if this is not supported; the fabric then sends markers.
        """
        return None

    # -- a change of the view (fabric/view.py) -----------------------------------------------------------

    @abstractmethod
    def delivered(self) -> bool:
        """Return whether every message of this rank to a member has been received and released."""

    def drop_messages(self, channels: Iterable[Channel] = Channel) -> None:
        """Release all messages that have arrived for this rank."""
        for channel in channels:
            while (message := self.take(channel)) is not None:
                message.release()

    # -- work and failure --------------------------------------------------------------------------------
    @property
    @abstractmethod
    def claims(self) -> Claims:
        """The claims of this rank: which pieces of the run's work it trains (comm/claims.py)."""

    def elapse(self, what: str, amount: float, passes: int = 1) -> None:
        """In a simulation, advance the clock by the time of this work. sim.py lists the kinds of work."""

    def load(self, nbytes: int) -> None:
        """In a simulation, advance the clock by what a batch takes besides the gradients of its images."""

    def aborted(self) -> bool:
        """Return whether another rank has failed."""
        return False

    def fail(self, code: int = 2) -> None:
        """End the other ranks, because this rank has failed and reported its error.

        code: the exit code of an MPI job. In other jobs, the code with which this rank exits counts.
        """

    def close(self) -> None:
        """Leave the job and free all resources."""

    # -- the roles and the state of each rank ------------------------------------------------------------

    def assign(self, replicas: Sequence[int]) -> None:
        """Set the ranks that train at the beginning of the job. The others that it began with are servers."""
        self.replicas = tuple(replicas)
        self.servers = _others(self.replicas, self.began)
        self.beginners = len(self.replicas)
        self.set_status(Column.SERVER, self.rank in self.servers)

    def include_newcomers(self) -> None:
        """Add the newcomers that are members now to `replicas`."""
        states, came = self.status[:, Column.STATE], self.status[:, Column.INCARNATION]
        if came.any():
            joined = (came > 0) & (states >= State.TRAINING) & (states < State.COMING) & (states != State.DEAD)
            ranks = {*self.replicas, *np.flatnonzero(joined).tolist()}
            self.replicas = tuple(sorted(ranks, key=lambda rank: (came[rank], rank)))

    def change_state(self, rank: int, old: State, new: State) -> bool:
        """Change the state of any rank from `old` to `new`, in one atomic operation. False if it is not `old`."""
        found = self.state(rank) is old
        if found:
            self.status[rank, Column.STATE] = new
        return found

    def state(self, peer: int) -> State:
        return State(int(self.status[peer, Column.STATE]))

    def alive(self, peer: int) -> bool:
        """Return whether a rank is a part of the job: neither dead, nor about to join."""
        return bool(memory.is_member(self.status[peer, Column.STATE]))

    def survivors(self) -> list[int]:
        """Return the replicas that are not dead, in order."""
        return [rank for rank in self.replicas if self.alive(rank)]

    @property
    def leader(self) -> int:
        """The replica that collects and writes the results of all: of those that are not dead, the first that came."""
        came = self.status[:, Column.INCARNATION]
        return min(self.survivors(), key=lambda rank: (came[rank], rank), default=self.replicas[0])

    # -- frozen ranks ------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Note a sign of life of this rank. Only its training thread calls this: another one may run while it hangs."""

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Announce that a `with` block may give no sign of life for this long."""
        yield

    def suspected(self, peer: int) -> bool:
        """Return whether a rank has given no sign of life for so long that it may be frozen."""
        return peer != self.rank and bool(self.trust[peer] != Trust.TRUSTED)

    def handle_freezes(self, how: Freeze) -> None:
        """Set what happens to suspected ranks from now on. All ranks of a job call this with the same value."""
        self.on_freeze = how

    def fence(self, peer: int) -> None:
        """Have a suspected rank killed, unless it gives a sign of life before. It becomes DEAD."""
        if self.suspected(peer):
            self.trust[peer] = Trust.CONDEMNED

    def fence_suspects(self) -> None:
        """Have suspected ranks killed if `on_freeze` says so: at once, or when no other replica trains any more.

        A server is killed at once, because others wait for its replies. Before the first step, the others wait.
        """
        if self.on_freeze is Freeze.WAIT or not self.trust.any():
            return
        if self.on_freeze is Freeze.LEAVE_OUT:
            training = self.status[:, Column.STATE] == State.TRAINING
            for server in np.flatnonzero(self.status[:, Column.SERVER] * training).tolist():
                self.fence(server)
            others = [self.state(rank) for rank in self.replicas if not self.suspected(rank)]
            if min(others, default=State.DEAD) < State.PAUSED or not any(map(memory.is_member, others)):
                return  # others train, or all are suspected: one of them may wake and train on
        for rank in range(self.size):
            if self.alive(rank) and (self.on_freeze is Freeze.LEAVE_OUT or self.status[rank, Column.STEP]):
                self.fence(rank)

    def left_out(self, rank: int) -> bool:
        """Return whether the others go on without this rank, because it is suspected."""
        return self.on_freeze is Freeze.LEAVE_OUT and self.suspected(rank)

    # -- time --------------------------------------------------------------------------------------------

    def wait(
        self, ready: Callable[[], T | None], peers: Sequence[int] = (), what: str = "", stall: float = 0.0,
        until: float = math.inf,
    ) -> T:  # fmt: skip
        """Wait until ready() returns a value other than None, and return it. stall: if not 0, replaces `self.stall`.

        until: the time at which a simulation calls ready() again, also if nothing has happened.
        Meanwhile, answer requests if a service is registered, and have suspected ranks killed (see `fence_suspects`).
        Raises PeerLost if `lost` returns a rank while ready() returns None. Raises Aborted if another rank has failed.
        """
        result = ready()
        if result is not None:
            return result
        began = told = looked = self.now()
        attempt = 0
        while True:
            paused, served = self.now(), self.poll_service()
            if served:
                self.stats.waited(began, paused)
                began = told = self.now()
            lost = self.lost(peers)
            result = ready()  # after the check for deaths: all messages of a dead peer have arrived by now
            if result is not None:
                break
            if lost is not None:
                raise PeerLost(lost, what)
            if self.aborted():
                raise Aborted
            self.consider_stopping()
            pausing.consider(self)
            if self.interrupt:
                self.interrupt()
            if self.on_freeze:
                self.fence_suspects()
            if not served:  # else more requests may have arrived meanwhile
                self.idle(attempt)
            attempt += 1
            if attempt % LOOK == 0:
                now = self.now()
                if now - looked > SUSPENDED:  # it does not count: this process did not wait for others
                    began, told = began + now - looked, told + now - looked
                looked = now
                if now - told > (stall or self.stall):
                    told = now
                    self._tell_stall(now - began, peers, what)
        self.stats.waited(began, self.now())
        return result

    def poll_service(self) -> bool:
        """Answer the requests that have arrived, unless in a concurrent operation. Returns whether there was any."""
        return self.service is not None and not concurrent() and self.service()

    def lost(self, peers: Sequence[int]) -> int | None:
        """Return a dead rank among the peers, or with `fail_fast` among all members; None if all are alive."""
        needed = (*self.replicas, *self.servers) if self.fail_fast else peers
        return next((peer for peer in needed if not self.alive(peer)), None)

    def _tell_stall(self, seconds: float, peers: Sequence[int], what: str) -> None:
        """Print what this rank waits for, and which ranks are silent: they may hold up those that it waits for."""
        ages = {rank: self.now() - self.heard[rank] for rank in range(self.size) if rank != self.rank}
        silent = [f"{self.described(rank)} for {age:.0f} s, in step {self.status[rank, Column.STEP]:.0f}"
                  for rank, age in ages.items() if self.alive(rank) and age > seconds / 2]  # fmt: skip
        near = ", ".join(f"{peer} (in step {self.status[peer, Column.STEP]:.0f})" for peer in peers)
        more = f"; no sign of life from {', '.join(silent)}" if silent else f"; peers: {near}" if near else ""
        tell(f"minidl: replica {self.rank} has waited {seconds:.0f} s for {what}{more}")

    def described(self, rank: int) -> str:
        """Return the name of a rank, with its host and process."""
        host, process = self.hosts[rank], int(self.status[rank, Column.PID])
        known = [f"host {host}"] * bool(host) + [f"process {process}"] * bool(process)
        return f"replica {rank} ({', '.join(known)})" if known else f"replica {rank}"

    @contextmanager
    def working(self, what: str, amount: float = 0.0, passes: int = 1) -> Iterator[None]:
        """Count the time of a `with` block as `what`: "gradient", "update" or "mix". For a simulated clock:

        amount: images of a gradient, elements of an update or a mix. passes: how often it passes over them.
        """
        began = self.now()
        yield
        self.elapse(what, amount, passes)
        self.stats.worked(what, began, self.now())

    def stopping(self) -> bool:
        """Return whether any rank was asked to stop."""
        return self.stop_wanted or self.interrupted() or bool(self.status[:, Column.STOP].any())

    def consider_stopping(self) -> None:
        """If a stop was requested, write 1 + self.step to the status table: this rank can stop after that step."""
        if self.stopping() and not self.status[self.rank, Column.STOP]:
            self.set_status(Column.STOP, 1 + self.step)


def _others(ranks: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the ranks below `count` that are not among these, which are in order."""
    if ranks[-1:] == (len(ranks) - 1,):  # the first ones: fast, because each of thousands of simulated ranks calls this
        return tuple(range(len(ranks), count))
    return tuple(sorted({*range(count)}.difference(ranks)))


def _size(parts: Sequence[np.ndarray]) -> int:
    return parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
