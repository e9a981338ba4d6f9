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

    batch           with [host], the time of a message from the host to the device. It counts as "data".
    gradient        the device's fixed time, then images * seconds per image * jitter * straggler factor. The arithmetic
                    is done at the beginning of this last part.
    update, mix     for each pass over the elements: the start of a kernel (`kernel`), and elements * bytes moved per
                    element / memory bandwidth of the device. Each operation of vectors.py is one pass, a copy too.
                    A code of --compress is two passes (add what earlier codes lost, encode), reading one is another.
    sum             the additions and codes of a collective: passes of a mix if the device has `additions = true`, else
                    no time. A rank decodes what it sends, so a code is three passes.
    message         alpha + n * beta, for n bytes, on each link that it crosses; before that, it waits until the link is
                    free (network.py). Inside a node, only links with `shared = true` have a queue.
    published data  inside a node, `latest` takes alpha + n * beta. Between nodes, the request takes alpha, and the
                    reply takes the time of a message.
    shared vector   with [host] it is in the host's memory. A read or write takes the time of a message over [host], and
                    counts as waiting. Its elements change at the end of this time.
    the rest        no time. This includes Python, the status table, and releases of messages.
    saves           with `free_saves`, also the collectives of ranks whose timer is stopped (Stats): they collect states
                    for checkpoints and evaluations. These messages are not counted either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from minidl.comm.claims import Ledger
from minidl.comm.cluster import Cluster
from minidl.comm.transport.event_loop import MAIL, STATE, STOP, Deadlock, EventLoop, SimulatedProcess
from minidl.comm.transport.in_flight import InFlight
from minidl.comm.transport.messages import (
    ANY,
    CODES,
    DTYPES,
    SPARES,
    Channel,
    Column,
    Header,
    Message,
    PeerLost,
    Pending,
    Slot,
    State,
    Trust,
    check_size,
    unsent,
)
from minidl.comm.transport.network import DATA, HOST
from minidl.comm.transport.sim_joining import Joining
from minidl.errors import ConfigError, MinidlError

T = TypeVar("T")
COLLECTIVE = (Channel.TREE, Channel.GATHER)
# Bytes moved per element: SGD reads three vectors and writes two, a mix or a sum reads two and writes one.
TOUCHED = {"update": 20, "mix": 12, "sum": 12}


class Simulation(EventLoop):
    """A simulated cluster. ranks: the number of replicas and servers together.

    The last of them are places for those that join later, if the cluster has [[joins]]. work, flops: define the cost
    of a gradient (Cluster.seconds_per_image). If neither is given, gradients take no time. trace: whether the meters
    record a timeline. begin: the virtual time at the beginning. Deaths, joins and freezes of the cluster that come
    earlier are left out. stall: virtual seconds after which a frozen rank is suspected.

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
        self.free_saves, self.trace = False, trace
        self.transports: list[SimTransport] = [SimTransport(self, rank, trace) for rank in range(ranks)]

    def transport(self, rank: int) -> SimTransport:
        return self.transports[rank]

    def refill(self, rank: int) -> None:
        newcomer = SimTransport(self, rank, self.trace)
        newcomer.newcomer = True
        newcomer.take_over(self.transports[rank])
        self.transports[rank] = newcomer
        self.start(rank)


class SimTransport(Joining):
    """The transport of one rank of a simulation."""

    simulation: Simulation

    def __init__(self, simulation: Simulation, rank: int, trace: bool = False) -> None:
        super().__init__(simulation, rank, trace)
        self.started: list[SimulatedProcess] = []

    # -- the primitives of a transport -------------------------------------------------------------------

    def now(self) -> float:
        return self.simulation.time

    def reserve(self, channel: Channel, peers: Sequence[int], nbytes: int) -> Slot | None:
        message = self._occupy(channel, peers, nbytes)
        if message is None:
            return None
        if not peers:
            return unsent(nbytes)
        data = self.simulation.memory(nbytes)
        return Slot(data, partial(self._commit, message, data), partial(self._cancel, message))

    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], header: Header) -> bool:
        if len(parts) != 1 or parts[0].dtype not in CODES or not peers:
            return super().post(channel, peers, parts, header)
        # One vector is the usual case. It is copied without a slot, which would take longer than the rest.
        message = self._occupy(channel, peers, parts[0].nbytes)
        if message is not None:
            self._send(message, parts[0].copy(), header)
        return message is not None

    def _occupy(self, channel: Channel, peers: Sequence[int], nbytes: int) -> InFlight | None:
        """Occupy the edges to these peers, and a slot. Returns None if one of them is not free."""
        self._check_here()
        if self.buffers is None:
            raise ConfigError(f"replica {self.rank} sends before it has joined")
        slots, capacity = self.slots[channel]
        if nbytes > capacity or not slots:
            check_size(nbytes, slots, capacity, channel.name)
        way, used = self.on_way[channel], 1 if nbytes and peers else 0  # an empty message needs no memory
        for peer in peers:
            full = used > self.free[channel] and used > self.free[channel] + self._spares(channel)
            if peer in way or full or self._is_dead(peer):
                if channel is MAIL:
                    self.stats.sends_skipped(peer)
                return None
        self.free[channel] -= used
        way.update(peers)
        return InFlight(channel, self, set(peers), used)

    def _spares(self, channel: Channel) -> int:
        """Return the number of slots that replace those that suspected receivers hold. See mailbox.py."""
        held = [peer for peer in self.on_way[channel] if self.trust[peer] != Trust.TRUSTED]
        return min(SPARES.get(channel, 0), len(held))

    def _commit(self, message: InFlight, data: np.ndarray, nbytes: int, code: int, header: Header) -> None:
        self._check_here()
        self._send(message, data[:nbytes].view(DTYPES[code]), header)

    def _send(self, message: InFlight, vector: np.ndarray, header: Header) -> None:
        """Send a vector. It becomes read-only, because all receivers share it."""
        vector.flags.writeable = False
        self.heard[self.rank] = self.simulation.time
        message.free = message.channel in COLLECTIVE and self.simulation.free_saves and not self.stats.running
        if not message.free:
            for peer in message.receivers:
                self.stats.sent(peer, vector.nbytes)
        message.vector, message.header = vector, header
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

    def set_status(self, column: Column, value: float) -> None:
        """Write to the status table. All ranks of a simulation share it, so they see the change immediately."""
        if not self.gone and self.status[self.rank, column] != value:
            if column is STATE:
                self.simulation.write_state(self.rank, value)
            self.status[self.rank, column] = value
            self.simulation.stop_asked |= column is STOP
            self.simulation.board_changed(self.rank, column)
            if column is STATE:
                self.simulation.look_whether_drained()

    def change_state(self, rank: int, old: State, new: State) -> bool:
        self._check_here()
        simulation = self.simulation
        if self.state(rank) is not old:
            return False
        simulation.write_state(rank, new)
        simulation.board_changed(rank, STATE)
        simulation.transports[rank].wake()
        simulation.look_whether_drained()
        return True

    def wait(
        self, ready: Callable[[], T | None], peers: Sequence[int] = (), what: str = "", stall: float = 0.0,
        until: float = math.inf,
    ) -> T:  # fmt: skip
        task = self.simulation.current
        if task is None:
            raise MinidlError("a rank of a simulation waits outside Simulation.run, but events only happen inside")
        if until < math.inf:
            self.simulation.at(until, self.wake)
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

    def elapse(self, what: str, amount: float, passes: int = 1) -> None:
        self._check_here()
        if what == "shared":
            began = self.now()
            self._sleep(self.simulation.network.cross_host(self.rank, int(amount), HOST))
            self.stats.waited(began, self.now())
        elif what != "sum" or self._additions_take_time():
            self._sleep(self._seconds(what, amount, passes))

    def _additions_take_time(self) -> bool:
        simulation = self.simulation
        free = simulation.free_saves and not self.stats.running
        return simulation.place.devices[self.rank].additions and not free

    def _seconds(self, what: str, amount: float, passes: int) -> float:
        """Return the duration of work on this rank's device. The arguments are those of `working`."""
        simulation = self.simulation
        device, stragglers = simulation.place.devices[self.rank], simulation.cluster.stragglers
        if what in TOUCHED:
            return passes * (device.kernel + TOUCHED[what] * amount / device.memory) if amount else 0.0
        if what != "gradient":
            return 0.0
        if self.step == 0 or self.step != self.drawn:  # one draw for all parts of a step's gradient
            skipped = self.step - 1 if simulation.resumed and not self.drawn else 0  # drawn before the stop
            self.drawn = self.step
            for _ in range(1 + skipped):
                normal, uniform = self.chance.standard_normal(), self.chance.random()
            self.slowness = math.exp(device.jitter * normal - device.jitter**2 / 2)  # its mean is 1
            if uniform < stragglers.probability:
                self.slowness *= stragglers.factor
        return amount * simulation.image_seconds[self.rank] * self.slowness

    def close(self) -> None:
        if self.state(self.rank) < State.FINISHED:  # else the others read the leader's last state
            self.set_status(STATE, State.FINISHED)

    def load(self, nbytes: int) -> None:
        """Let the time pass that a batch takes: its copy to the device, and the fixed time of a gradient."""
        self._check_here()
        simulation, began = self.simulation, self.now()
        if simulation.cluster.host is not None:
            self._sleep(simulation.network.cross_host(self.rank, nbytes, DATA))
            self.stats.worked("data", began, self.now())
        if fixed := simulation.place.devices[self.rank].batch:
            began = self.now()
            self._sleep(fixed)
            self.stats.worked("gradient", began, self.now())

    def fence(self, peer: int) -> None:
        if self.suspected(peer) and self.trust[peer] != Trust.CONDEMNED:
            super().fence(peer)
            self.simulation.freezes.fence(peer)

    # -- faster than the inherited methods, because the simulation knows the state of all ranks ----------

    def stopping(self) -> bool:
        return self.stop_wanted or self.simulation.stop_asked

    def alive(self, peer: int) -> bool:
        return not self.simulation.absent or super().alive(peer)

    def lost(self, peers: Sequence[int]) -> int | None:
        return super().lost(peers) if self.simulation.absent else None

    def survivors(self) -> list[int]:
        return list(self.simulation.survivors(self.replicas))

    @property
    def leader(self) -> int:
        if self.simulation.arrivals.number:
            return super().leader
        return next(iter(self.simulation.survivors(self.replicas)), self.replicas[0])

    def native_drain(self) -> Callable[[], bool]:
        simulation = self.simulation
        goal = simulation.drained + 1
        simulation.draining.add(self.rank)

        def drained() -> bool:
            simulation.look_whether_drained()
            return simulation.drained >= goal

        return drained

    def delivered(self) -> bool:
        return all(self._ignored(peer, channel) for channel in Channel for peer in self.on_way[channel])

    def _ignored(self, peer: int, channel: Channel) -> bool:
        """Return whether this rank's message to a peer needs no release: a newcomer drops it before it is a member."""
        ranks = self.simulation.transports
        return not self.alive(peer) and (self._is_dead(peer) or self.rank in ranks[peer].inbox[channel])

    def _is_dead(self, peer: int) -> bool:
        """Return whether a rank gets no messages. A newcomer gets the state of a member before it is one."""
        return bool(self.simulation.absent) and bool(self.status[peer, STATE] == State.DEAD)


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
        while not self.done:
            try:
                self.transport.wait(lambda: self.done or None, (self.transport.rank,), "a concurrent operation")
            except PeerLost:  # the operation itself ends for this reason, soon
                self.transport.idle(0)
        if self.error is not None:
            raise self.error
        return self.result


__all__ = ["Deadlock", "SimTransport", "Simulation"]
