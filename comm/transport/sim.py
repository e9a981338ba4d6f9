"""The simulated fabric: any number of replicas in one process, on a virtual clock.

An event-driven simulation keeps a heap of future events, ordered by time. It repeatedly removes the earliest event and
runs it; an event may add others to the heap. The clock jumps from one event to the next. So simulating an hour of a
thousand machines takes only as long as this machine needs for their arithmetic.

    clock 3.20 s    heap    3.25 s  rank 7's gradient is complete
                            3.31 s  a message of rank 2 arrives at rank 5
                            3.90 s  rank 0 dies

Each replica is a greenlet: a function whose stack can be suspended and resumed. Where a real replica waits, the
greenlet switches to the event loop (event_loop.py), and the awaited event switches back. So a method runs the same code
as on real machines. One thread runs all greenlets. Events of the same virtual time run in the order in which they were
scheduled. So runs with the same seed are bit-identical.

The arithmetic is real. Durations are computed from the description of the cluster (cluster.py):

    gradient        images * seconds per image * jitter * straggler factor. The arithmetic is done at the beginning of
                    this time.
    update, mix     elements * bytes moved per element / memory bandwidth of the device
    message         alpha + n * beta, for n bytes. Between nodes, the message occupies the network card of the sender's
                    node for n * beta, and the card sends one message at a time. Inside a node there is no queue. A lost
                    message passes through the card again after the link's timeout.
    published data  inside a node, `latest` takes alpha + n * beta. Between nodes, the request takes alpha, and the
                    reply takes the time of a message.
    the rest        no time. This includes Python, the status table, and releases of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from greenlet import GreenletExit

from minidl.comm.claims import Ledger
from minidl.comm.cluster import Cluster
from minidl.comm.fabric.base import ANY, BufferSpec, Channel, Column, Header, Message, Pending, State
from minidl.comm.transport.event_loop import MAIL, STATE, STOP, Deadlock, EventLoop, InFlight, Rank, SimulatedProcess
from minidl.errors import ConfigError, MinidlError

T = TypeVar("T")
LIMITED = (Channel.MAIL, Channel.CALL, Channel.ANSWER)  # channels whose messages hold at most buffers.elements float32


class Simulation(EventLoop):
    """A simulated cluster. ranks: the number of replicas and servers together.

    work, flops: define the cost of a gradient (Cluster.seconds_per_image). If neither is given, gradients take no time.
    trace: whether the meters record a timeline.

        simulation = Simulation(load("two-racks"), ranks=8, seed=0, work="mlp digits", flops=2e5)
        results = simulation.run({rank: a function without arguments that uses simulation.fabric(rank)})
        simulation.time    the duration of the run, in virtual seconds
    """

    def __init__(
        self, cluster: Cluster, ranks: int, seed: int = 0, work: str = "", flops: float = 0.0, trace: bool = False
    ) -> None:
        super().__init__(cluster, ranks, seed, work, flops)
        self.fabrics: list[SimTransport] = [SimTransport(self, rank, trace) for rank in range(ranks)]

    def fabric(self, rank: int) -> SimTransport:
        return self.fabrics[rank]


class SimTransport(Rank):
    """The fabric of one rank of a simulation."""

    simulation: Simulation

    def __init__(self, simulation: Simulation, rank: int, trace: bool = False) -> None:
        super().__init__(simulation, rank, trace)
        self.newest: tuple[int, np.ndarray, Header] | None = None  # (number, vector, header) of the published state
        self.seen: dict[int, int] = {}  # peer -> the number of its newest published state that this rank has seen
        self.asked: set[int] = set()
        self.answers: dict[int, tuple[int, np.ndarray, Header]] = {}
        self.lookers: set[int] = set()  # ranks that looked for a new state and found none; `publish` wakes them
        self.started: list[SimulatedProcess] = []

    # -- the primitives of a transport -------------------------------------------------------------------

    def join(self, buffers: BufferSpec, layout: str) -> None:
        simulation = self.simulation
        simulation.layout = simulation.layout or layout
        if layout != simulation.layout:
            raise ConfigError(f"replica {self.rank} has another model: its layout differs from that of the others")
        self.buffers = buffers
        serves = self.rank not in self.replicas
        self.free = [buffers.mail, 3, int(buffers.call), (2 if serves else 1) * buffers.call, 3]  # messages, by Channel
        for name, elements in buffers.shared:
            nodes = len(simulation.place.groups)
            if nodes > 1:
                raise ConfigError(f"shared vector {name!r}: ranks on {nodes} nodes share no memory")
            simulation.vectors.setdefault(name, np.zeros(elements, np.float32))

    def now(self) -> float:
        return self.simulation.time

    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], header: Header) -> bool:
        self._check_here()
        way = self.on_way[channel]
        for peer in peers:
            if peer in way or not self.alive(peer):
                if channel is MAIL:
                    self.stats.sends_skipped(peer)
                return False
        if not self.free[channel]:
            self._check_joined(channel)
            return False
        vector = _snapshot(parts)
        if channel in LIMITED:
            self._check_length(vector)
        if not peers:
            return True
        self.free[channel] -= 1
        way.update(peers)
        self.heard[self.rank] = self.simulation.time
        for peer in peers:
            self.stats.sent(peer, vector.nbytes)
        self.simulation.send(InFlight(channel, self.rank, set(peers), vector, header))
        return True

    def take(self, channel: Channel, peer: int = ANY) -> Message | None:
        inbox = self.inbox[channel]
        if not inbox:
            return None
        if peer == ANY:
            peer = next(iter(inbox))
        message = inbox.pop(peer, None)
        if message is None:
            return None
        self.stats.received(peer, message.vector.nbytes)
        return Message(peer, message.vector, message.header, partial(self.simulation.release, message, self.rank))

    def publish(self, parts: Sequence[np.ndarray], header: Header) -> None:
        self._check_here()
        vector = _snapshot(parts)
        self._check_length(vector)
        self.newest = ((self.newest[0] if self.newest else 0) + 1, vector, header)
        for rank in sorted(self.lookers):
            self.simulation.fabrics[rank].wake()
        self.lookers.clear()

    def latest(self, peer: int) -> Message | None:
        self._check_here()
        simulation, owner = self.simulation, self.simulation.fabrics[peer]
        if self.nodes[peer] != self.nodes[self.rank]:
            found = self.answers.pop(peer, None)
            if found is None and peer not in self.asked and self.alive(peer):
                self.asked.add(peer)
                simulation.at(simulation.time + simulation.link(self.rank, peer).alpha, self._answer, peer)
        else:
            found = owner.newest
            if found is None or found[0] <= self.seen.get(peer, 0):
                owner.lookers.add(self.rank)
                found = None
        if found is None:
            return None
        number, vector, header = found
        self.seen[peer] = number
        self.stats.received(peer, vector.nbytes)
        if owner.nodes[peer] == self.nodes[self.rank]:
            self._sleep(simulation.cluster.inside.alpha + vector.nbytes * simulation.cluster.inside.beta)
        return Message(peer, vector, header, lambda: None)

    def _answer(self, peer: int) -> None:
        """Handle the arrival of this rank's request at a peer: if the peer's state is new, send it back."""
        simulation, owner = self.simulation, self.simulation.fabrics[peer]
        if owner.newest is None or owner.newest[0] <= self.seen.get(peer, 0) or not self.alive(peer):
            number = owner.newest[0] if owner.newest else 0
            simulation.at(simulation.time + simulation.link(peer, self.rank).alpha, self._nothing_new, peer, number)
            return
        owner.stats.sent(self.rank, owner.newest[1].nbytes)
        simulation.transfer(peer, self.rank, owner.newest[1].nbytes, self._answered, peer, owner.newest)

    def _answered(self, peer: int, found: tuple[int, np.ndarray, Header]) -> None:
        """Handle the arrival of a peer's state at this rank."""
        self.asked.discard(peer)
        if self.alive(peer):
            self.answers[peer] = found
            self.wake()

    def _nothing_new(self, peer: int, number: int) -> None:
        """Handle a reply without a state. The peer may have published a state while the reply was in flight."""
        self.asked.discard(peer)
        owner = self.simulation.fabrics[peer]
        if owner.newest is not None and owner.newest[0] > number:
            self.wake()
        else:
            owner.lookers.add(self.rank)

    def set_status(self, column: Column, value: float) -> None:
        """Write to the status table. All ranks of a simulation share it, so they see the change immediately."""
        if not self.gone and self.status[self.rank, column] != value:
            self.status[self.rank, column] = value
            self.simulation.stop_asked |= column is STOP
            self.simulation.board_changed(self.rank, column)
            if column is STATE:
                self.simulation.look_whether_drained()

    def wait(
        self, ready: Callable[[], T | None], peers: Sequence[int] = (), what: str = "", stall: float = 0.0
    ) -> T:
        task = self.simulation.current
        if task is None:
            raise MinidlError("a rank of a simulation waits outside Simulation.run, but events only happen inside")
        before = task.peers, task.what
        task.peers, task.what = peers, what
        try:
            return super().wait(ready, peers, what)
        finally:
            task.peers, task.what = before

    def idle(self, attempt: int) -> None:
        """Suspend the running greenlet until an event after which `wait` must call ready() again."""
        self._check_here()
        task = self.simulation.current
        assert task is not None
        self.simulation.park(task)

    def start(self, work: Callable[[], T]) -> Pending[T]:
        """Run `work` in a separate greenlet."""
        pending = _Started(self, work)
        task = self.simulation.add_task(self, pending.run)
        self.started.append(task)
        if len(self.started) == 1:
            self.simulation.ready.append(task)
        return pending

    def start_next(self) -> None:
        """Run the next function passed to `start`, because the present one has ended."""
        self.started.pop(0)
        if self.started:
            self.simulation.ready.append(self.started[0])

    def shared(self, name: str) -> np.ndarray:
        return self.simulation.vectors[name]

    @property
    def claims(self) -> Ledger:
        """Claims take no time. A rank that waits for a piece looks again when a rank's status changes."""
        return Ledger(self.simulation.claims, self.simulation.status[:, STATE], self.rank)

    def elapse(self, what: str, amount: float) -> None:
        self._check_here()
        self._sleep(self.simulation.seconds(self, what, amount))

    def close(self) -> None:
        if self.state(self.rank) != State.DEAD:
            self.set_status(STATE, State.FINISHED)

    # -- faster than the inherited methods, because the simulation knows the state of all ranks ----------

    def stopping(self) -> bool:
        return self.stop_wanted or self.simulation.stop_asked

    def alive(self, peer: int) -> bool:
        return not self.simulation.dead or super().alive(peer)

    def lost(self, peers: Sequence[int]) -> int | None:
        return super().lost(peers) if self.simulation.dead else None

    def survivors(self) -> list[int]:
        return list(self.simulation.survivors(self.replicas))

    def drain(self, handle: Callable[[Message], None]) -> None:
        """Wait until all replicas have called `drain` and no mail is in flight."""
        simulation = self.simulation
        goal = simulation.drained + 1
        simulation.draining.add(self.rank)

        def done() -> bool | None:
            for message in self.poll():
                handle(message)
            simulation.look_whether_drained()
            return simulation.drained >= goal or None

        self.wait(done, (self.rank,), "the end of all messages in flight")

    # -- checks ------------------------------------------------------------------------------------------

    def _check_here(self) -> None:
        if self.gone:
            raise GreenletExit  # ends this greenlet: the rank is dead, or the simulation is over

    def _check_joined(self, channel: Channel) -> None:
        if self.buffers is None:
            raise ConfigError(f"replica {self.rank} sends before it has joined")
        if not self.on_way[channel]:
            raise ConfigError(f"replica {self.rank} sends on {channel.name}, for which its method requested no memory")

    def _check_length(self, vector: np.ndarray) -> None:
        """Raise ConfigError if a message is longer than a slot of shared memory would be."""
        if self.buffers is None or vector.nbytes > 4 * self.buffers.elements:
            raise ConfigError(f"a message of {vector.size} {vector.dtype}; the method requested memory for "
                              f"{self.buffers.elements if self.buffers else 0} float32")  # fmt: skip


class _Started:
    """A function that was passed to `start`, and its result. The function runs in a separate greenlet."""

    def __init__(self, fabric: SimTransport, work: Callable[[], Any]) -> None:
        self.fabric, self.work, self.done = fabric, work, False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except Exception as error:
            self.error = error
        self.done = True
        self.fabric.start_next()
        self.fabric.wake()

    def wait(self) -> Any:
        self.fabric.wait(lambda: self.done or None, (self.fabric.rank,), "a concurrent operation")
        if self.error is not None:
            raise self.error
        return self.result


def _snapshot(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return a read-only copy of the concatenated parts; all receivers share it."""
    vector = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
    vector.flags.writeable = False
    return vector


__all__ = ["Deadlock", "SimTransport", "Simulation"]
