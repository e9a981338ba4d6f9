"""The simulated transport: any number of replicas in one process, on a virtual clock.

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
    saves           with `free_saves`, also the collectives of ranks whose timer is stopped (Stats): they collect states
                    for checkpoints and evaluations. These messages are not counted either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from greenlet import GreenletExit

from minidl.comm.claims import Ledger
from minidl.comm.cluster import Cluster
from minidl.comm.transport.event_loop import MAIL, STATE, STOP, Deadlock, EventLoop, InFlight, Rank, SimulatedProcess
from minidl.comm.transport.messages import (
    ANY,
    DTYPES,
    BufferSpec,
    Channel,
    Column,
    Header,
    Message,
    Pending,
    Slot,
    State,
    Trust,
    check_size,
    unsent,
)
from minidl.engine.device import aligned
from minidl.errors import ConfigError, MinidlError

T = TypeVar("T")
BLOCK = 1 << 16  # bytes
COLLECTIVE = (Channel.TREE, Channel.GATHER)


class Simulation(EventLoop):
    """A simulated cluster. ranks: the number of replicas and servers together.

    work, flops: define the cost of a gradient (Cluster.seconds_per_image). If neither is given, gradients take no time.
    trace: whether the meters record a timeline. begin: the virtual time at the beginning. Deaths, joins and freezes
    of the cluster that come earlier are left out. stall: virtual seconds after which a frozen rank is suspected.

        simulation = Simulation(load("two-racks"), ranks=8, seed=0, work="mlp digits", flops=2e5)
        results = simulation.run({rank: a function without arguments that uses simulation.transport(rank)})
        simulation.time    the duration of the run, in virtual seconds
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: int,
        seed: int = 0,
        work: str = "",
        flops: float = 0.0,
        trace: bool = False,
        begin: float = 0.0,
        stall: float = 30.0,
    ) -> None:
        super().__init__(cluster, ranks, seed, work, flops, begin, stall)
        self.free_saves = False
        self.transports: list[SimTransport] = [SimTransport(self, rank, trace) for rank in range(ranks)]
        self._block, self._used = np.empty(0, np.uint8), BLOCK  # see `memory`

    def transport(self, rank: int) -> SimTransport:
        return self.transports[rank]

    def memory(self, nbytes: int) -> np.ndarray:
        """Return uninitialised memory on a 64-byte boundary. Small pieces share a block, because `aligned` is slow."""
        if nbytes > BLOCK // 64:
            return aligned(nbytes, np.uint8, np.empty)
        begin = self._used
        self._used += -(-nbytes // 64) * 64
        if self._used > BLOCK:
            self._block, self._used = aligned(BLOCK, np.uint8, np.empty), 0
            return self.memory(nbytes)
        return self._block[begin : begin + nbytes]


class SimTransport(Rank):
    """The transport of one rank of a simulation."""

    simulation: Simulation

    def __init__(self, simulation: Simulation, rank: int, trace: bool = False) -> None:
        super().__init__(simulation, rank, trace)
        self.newest: tuple[int, np.ndarray, Header] | None = None  # (number, vector, header) of the published state
        self.number = self.dropped = 0  # of the last published state; of the last one of an earlier join
        self.publishing = False  # whether a slot for a published state is reserved
        self.seen: dict[int, int] = {}  # peer -> the number of its newest published state that this rank has seen
        self.asked: set[int] = set()
        self.answers: dict[int, tuple[int, np.ndarray, Header]] = {}
        self.lookers: set[int] = set()  # ranks that looked for a new state and found none; `publish` wakes them
        self.started: list[SimulatedProcess] = []
        self.joins = 0  # the number of calls of `join`

    # -- the primitives of a transport -------------------------------------------------------------------

    def join(self, buffers: BufferSpec, layout: str) -> None:
        simulation = self.simulation
        if simulation.layouts.setdefault(self.joins, layout) != layout:
            raise ConfigError(f"replica {self.rank} has another model: its layout differs from that of the others")
        if self.joins and self.joins == simulation.joins:  # the first rank that joins again
            simulation.claims[:] = 0
            for transport in simulation.transports:
                transport.unpublish()
        self.joins, self.buffers = self.joins + 1, buffers
        simulation.joins = max(simulation.joins, self.joins)
        used = [number - free for (number, _), free in zip(self.slots, self.free, strict=True)]  # still in flight
        self.slots = [*buffers.slots(self.rank, self.rank not in self.replicas).values()]
        self.free = [number - some for (number, _), some in zip(self.slots, used, strict=True)]
        for name, elements in buffers.shared:
            nodes = len(simulation.place.groups)
            if nodes > 1:
                raise ConfigError(f"shared vector {name!r}: ranks on {nodes} nodes share no memory")
            simulation.vectors.setdefault(name, np.zeros(elements, np.float32))

    def unpublish(self) -> None:
        """Drop this rank's published state, and the states that have arrived here. Their numbers continue."""
        self.newest, self.publishing, self.dropped = None, False, self.number
        self.answers.clear()

    def now(self) -> float:
        return self.simulation.time

    def reserve(self, channel: Channel, peers: Sequence[int], nbytes: int) -> Slot | None:
        self._check_here()
        if self.buffers is None:
            raise ConfigError(f"replica {self.rank} sends before it has joined")
        slots, capacity = self.slots[channel]
        if nbytes > capacity or not slots:
            check_size(nbytes, slots, capacity, channel.name)
        if not peers:
            return unsent(nbytes)
        way, used = self.on_way[channel], 1 if nbytes else 0  # an empty message needs no memory
        for peer in peers:
            if peer in way or used > self.free[channel] or not self.alive(peer):
                if channel is MAIL:
                    self.stats.sends_skipped(peer)
                return None
        self.free[channel] -= used
        way.update(peers)
        message = InFlight(channel, self.rank, set(peers), used)
        data = self.simulation.memory(nbytes)
        return Slot(data, partial(self._send, message, data), partial(self._cancel, message))

    def _send(self, message: InFlight, data: np.ndarray, nbytes: int, code: int, header: Header) -> None:
        self._check_here()
        self.heard[self.rank] = self.simulation.time
        message.free = message.channel in COLLECTIVE and self.simulation.free_saves and not self.stats.running
        if not message.free:
            for peer in message.receivers:
                self.stats.sent(peer, nbytes)
        message.vector, message.header = _sealed(data, nbytes, code), header
        self.simulation.send(message)

    def _cancel(self, message: InFlight) -> None:
        self.on_way[message.channel] -= message.receivers
        self.free[message.channel] += message.used
        self.wake()

    def take(self, channel: Channel, peer: int = ANY) -> Message | None:
        inbox = self.inbox[channel]
        if not inbox:
            return None
        if peer == ANY:
            peer = next(iter(inbox))
        message = inbox.pop(peer, None)
        if message is None:
            return None
        if not message.free:
            self.stats.received(peer, message.vector.nbytes)
        return Message(peer, message.vector, message.header, partial(self.simulation.release, message, self.rank))

    def reserve_state(self, nbytes: int) -> Slot | None:
        self._check_here()
        buffers = self.buffers or BufferSpec()
        check_size(nbytes, buffers.publish, buffers.nbytes, "published state")
        if self.publishing:
            self.stats.reads_missed(self.rank)
            return None
        self.publishing = True
        data = self.simulation.memory(nbytes)
        return Slot(data, partial(self._publish, data), partial(setattr, self, "publishing", False))

    def _publish(self, data: np.ndarray, nbytes: int, code: int, header: Header) -> None:
        self._check_here()
        self.number += 1
        self.newest = self.number, _sealed(data, nbytes, code), header
        self.publishing = False
        for rank in sorted(self.lookers):
            self.simulation.transports[rank].wake()
        self.lookers.clear()

    def latest(self, peer: int) -> Message | None:
        self._check_here()
        simulation, owner = self.simulation, self.simulation.transports[peer]
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
        simulation, owner = self.simulation, self.simulation.transports[peer]
        if (awake := simulation.freezes.wakes_at(peer)) > simulation.time:
            simulation.at(awake, self._answer, peer)
            return
        if owner.newest is None or owner.newest[0] <= self.seen.get(peer, 0) or not self.alive(peer):
            number = owner.newest[0] if owner.newest else 0
            simulation.at(simulation.time + simulation.link(peer, self.rank).alpha, self._nothing_new, peer, number)
            return
        owner.stats.sent(self.rank, owner.newest[1].nbytes)
        simulation.transfer(peer, self.rank, owner.newest[1].nbytes, self._answered, peer, owner.newest)

    def _answered(self, peer: int, found: tuple[int, np.ndarray, Header]) -> None:
        """Handle the arrival of a peer's state at this rank."""
        self.asked.discard(peer)
        if self.alive(peer) and found[0] > self.simulation.transports[peer].dropped:
            self.answers[peer] = found
        if self.alive(peer):
            self.wake()

    def _nothing_new(self, peer: int, number: int) -> None:
        """Handle a reply without a state. The peer may have published a state while the reply was in flight."""
        self.asked.discard(peer)
        owner = self.simulation.transports[peer]
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
        if self.state(self.rank) < State.FINISHED:  # else the others read the leader's last state
            self.set_status(STATE, State.FINISHED)

    def fence(self, peer: int) -> None:
        if self.suspected(peer) and self.trust[peer] != Trust.CONDEMNED:
            super().fence(peer)
            self.simulation.freezes.fence(peer)

    # -- faster than the inherited methods, because the simulation knows the state of all ranks ----------

    def stopping(self) -> bool:
        return self.stop_wanted or self.simulation.stop_asked

    def alive(self, peer: int) -> bool:
        return not self.simulation.dead or super().alive(peer)

    def lost(self, peers: Sequence[int]) -> int | None:
        return super().lost(peers) if self.simulation.dead else None

    def survivors(self) -> list[int]:
        return list(self.simulation.survivors(self.replicas))

    @property
    def leader(self) -> int:
        return next(iter(self.simulation.survivors(self.replicas)), self.replicas[0])

    def native_drain(self) -> Callable[[], bool]:
        simulation = self.simulation
        goal = simulation.drained + 1
        simulation.draining.add(self.rank)

        def drained() -> bool:
            simulation.look_whether_drained()
            return simulation.drained >= goal

        return drained

    # -- checks ------------------------------------------------------------------------------------------

    def _check_here(self) -> None:
        if self.gone:
            raise GreenletExit  # ends this greenlet: the rank is dead, or the simulation is over


class _Started:
    """A function that was passed to `start`, and its result. The function runs in a separate greenlet."""

    def __init__(self, transport: SimTransport, work: Callable[[], Any]) -> None:
        self.transport, self.work, self.done = transport, work, False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except Exception as error:
            self.error = error
        self.done = True
        self.transport.start_next()
        self.transport.wake()

    def wait(self) -> Any:
        self.transport.wait(lambda: self.done or None, (self.transport.rank,), "a concurrent operation")
        if self.error is not None:
            raise self.error
        return self.result


def _sealed(data: np.ndarray, nbytes: int, code: int) -> np.ndarray:
    """Return the message in a slot as a read-only vector; all receivers share it."""
    vector = data[:nbytes].view(DTYPES[code])
    vector.flags.writeable = False
    return vector


__all__ = ["Deadlock", "SimTransport", "Simulation"]
