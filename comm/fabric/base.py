"""The fabric: the interface through which training methods communicate. It is the same for every transport.

A training method (methods/) defines what replicas exchange. It is written once, for this interface. A fabric consists
of a transport (comm/transport/), which moves messages, and of operations that this file builds from the transport's
primitives:

    shm.py         processes of one node, in shared memory
    mpi.py         ranks of an MPI job: shared memory within a node, messages between nodes
    sim.py         a simulated cluster, in one process, on a virtual clock
    loopback.py    one rank without peers

The primitives (transport/base.py): `reserve` returns memory for a message, whose `commit` sends it, and `take` receives
one; `reserve_state` does the same for this rank's published state, and `latest` reads the published state of a peer;
`post` and `publish` send and publish a copy; `status` is the status table; `now` reads the clock; `wait` waits. So a
sum has the same bits on all transports. The exception is `--reduce fast`, where MPI computes the sums.

    state, newest wins     publish, latest               gossip by pull
    messages, none lost    send, poll, exchange          gossip by push, D-PSGD
    request and reply      call, serve, register         the parameter server
    collectives            allreduce, broadcast ...      allreduce, local SGD, checkpoints
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from minidl.comm.claims import Claims
from minidl.comm.fabric import boundary
from minidl.comm.fabric.group import Group
from minidl.comm.fabric.service import Call, Handler, Service, drop_replies, receive
from minidl.comm.fabric.wire import EXACT, Wire
from minidl.comm.stats import Stats
from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import (
    ANY,
    CHUNK,
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
    View,
)
from minidl.comm.transport.pausing import Pause
from minidl.errors import AbortedError as Aborted

T = TypeVar("T")


class OfTransport(Generic[T]):
    """An attribute of the transport, which the fabric has under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, fabric: Fabric, owner: type) -> T:
        value: T = getattr(fabric.transport, self.name)
        return value

    def __set__(self, fabric: Fabric, value: T) -> None:
        setattr(fabric.transport, self.name, value)


class Fabric:
    """A transport, and operations for methods. The operations use only the transport's primitives.

    replicas: the ranks that train; the default is all ranks. led_by: if set, the only leader that `gather` accepts.
    """

    # transport/base.py explains these attributes. Those that never change are copied, because that is faster.
    rank: int
    size: int
    nodes: tuple[int, ...]
    stats: Stats
    began, beginners = OfTransport[int](), OfTransport[int]()
    servers, newcomer = OfTransport[tuple[int, ...]](), OfTransport[bool]()
    replicas, leader = OfTransport[tuple[int, ...]](), OfTransport[int]()
    status, step = OfTransport[np.ndarray](), OfTransport[int]()
    trust, on_freeze = OfTransport[np.ndarray](), OfTransport[Freeze]()
    stop_wanted, fail_fast = OfTransport[bool](), OfTransport[bool]()
    stall, claims = OfTransport[float](), OfTransport[Claims]()
    service, interrupt = OfTransport["Callable[[], bool] | None"](), OfTransport["Callable[[], None] | None"]()

    def __init__(self, transport: Transport, replicas: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.rank, self.size, self.nodes, self.stats = transport.rank, transport.size, transport.nodes, transport.stats
        if replicas is not None:
            transport.assign(replicas)
        # The transport's operations that methods and the training loop use; transport/base.py explains them.
        self.close, self.fail, self.aborted = transport.close, transport.fail, transport.aborted
        self.now, self.wait, self.working, self.elapse = (
            transport.now, transport.wait, transport.working, transport.elapse,
        )  # fmt: skip
        self.post, self.take, self.publish, self.latest = (
            transport.post, transport.take, transport.publish, transport.latest,
        )  # fmt: skip
        self.load, self.reserve, self.reserve_state = transport.load, transport.reserve, transport.reserve_state
        self.assign, self.change_state = transport.assign, transport.change_state
        self.state, self.alive, self.survivors, self.set_status = (
            transport.state, transport.alive, transport.survivors, transport.set_status,
        )  # fmt: skip
        self.lost = transport.lost
        self.idle, self.start, self.stopping, self.shared = (
            transport.idle, transport.start, transport.stopping, transport.shared,
        )  # fmt: skip
        self.beat, self.busy, self.suspected, self.left_out, self.handle_freezes = (
            transport.beat, transport.busy, transport.suspected, transport.left_out, transport.handle_freezes,
        )  # fmt: skip
        self._calls: dict[int, deque[Call]] = {}  # by server, the calls whose replies have not been received
        self._service: Service | None = None
        self._groups: dict[tuple[int, ...], Group] = {}
        self._silent: set[tuple[int, float]] = set()  # ranks, with their incarnation, whose marker has come (`drain`)
        self.led_by: int | None = None
        self._begin_view()

    def _begin_view(self) -> None:
        self.view = View(0, self.replicas)
        self._seen = b""  # what `view` was made of

    def join(self, buffers: BufferSpec, layout: str) -> None:
        """Allocate the memory for messages (`Transport.join`). What remains of an earlier training is dropped."""
        self._silent.clear()
        self.drop_calls()
        self.transport.join(buffers, layout)
        self._begin_view()

    def enter(self, buffers: BufferSpec, layout: str) -> None:
        """Do what `join` does, as a newcomer of a running job (`Transport.enter`)."""
        self.transport.enter(buffers, layout)
        self._begin_view()

    # -- membership --------------------------------------------------------------------------------------

    def look(self) -> View:
        """Return the members that this replica sees now: the live replicas, without those that are left out.

        With `fail_fast`, return those on which all members have agreed (training/regroup.py).

        With Freeze.LEAVE_OUT, suspected replicas are left out until they wake. Other replicas may train the pieces that
        they had claimed.
        """
        if self.fail_fast:
            return self.view
        states = self.status[:, Column.STATE]
        out = (states == State.DEAD) | (states >= State.COMING)
        if self.on_freeze is Freeze.LEAVE_OUT:
            out |= self.trust != Trust.TRUSTED
        seen = out.tobytes() + self.status[:, Column.INCARNATION].tobytes()
        if seen != self._seen:
            first, self._seen = not self._seen, seen
            self.transport.include_newcomers()
            members = tuple(rank for rank in self.replicas if not out[rank] or rank == self.rank)
            for rank in self.replicas:
                if rank not in members and self.suspected(rank):
                    self.claims.revoke(rank)
            if not first or members != self.view.members:
                self.view = View(self.view.number + 1, members)
        return self.view

    def adopt(self, view: View) -> None:
        """Continue with the members of this view, on which all have agreed. No message of an earlier one is left."""
        self.view, self.replicas = view, view.members
        self._groups.clear()  # a newcomer in the place of a dead rank makes the group of another view

    # -- messages, none lost -----------------------------------------------------------------------------

    def send(self, peer: int, *parts: np.ndarray, header: Header = Header()) -> bool:  # noqa: B008 (immutable)
        """Send a message to a peer. Returns False, without sending, if the peer is dead or `post` returns False."""
        return self.alive(peer) and self.post(Channel.MAIL, (peer,), parts, header)

    def poll(self) -> Iterator[Message]:
        """Yield the messages that have arrived."""
        while (message := self.take(Channel.MAIL)) is not None:
            with message:
                if message.header.marker and not message.vector.size:
                    self._silent.add((message.sender, message.header.clock))  # it has entered `drain` before this one
                else:
                    yield message

    def exchange(
        self, sources: Sequence[int], targets: Sequence[int], *parts: np.ndarray, header: Header = Header()  # noqa: B008
    ) -> Callable[[], Iterator[Message]]:  # fmt: skip
        """Send to all targets. Returns a function that waits for and yields one message from each source, in order."""
        what = f"the exchange of round {header.round}"
        if targets:
            self.wait(lambda: self.post(Channel.MAIL, targets, parts, header) or None, targets, what)

        def messages() -> Iterator[Message]:
            for source in sources:
                with self.wait(lambda: self.take(Channel.MAIL, source), (source,), what) as message:
                    yield message

        return messages

    def drain(self, handle: Callable[[Message], None]) -> None:
        """Wait until all messages to and from this replica have been received. All replicas must call this.

        `handle` processes the messages that arrive meanwhile. As its last message, each replica sends a marker to every
        other live replica (Chandy and Lamport 1985). A simulation knows which messages are in flight without markers.
        """
        drained = self.transport.native_drain()
        if drained is None:
            self._drain_with_markers(handle)
            return

        def done() -> bool | None:
            for message in self.poll():
                handle(message)
            return drained() or None

        self.wait(done, (self.rank,), "the end of all messages in flight")

    def _drain_with_markers(self, handle: Callable[[Message], None]) -> None:
        empty, came = np.zeros(0, np.float32), self.status[:, Column.INCARNATION]
        marker = Header(marker=True, clock=float(came[self.rank]))
        told: set[tuple[int, float]] = set()  # ranks, with their incarnation, to which this one has sent its marker

        def done() -> bool | None:
            for message in self.poll():
                handle(message)
            members = self.replicas
            others = {(peer, float(came[peer])) for peer in self.survivors() if peer != self.rank}
            told.update([peer for peer in others - told if self.post(Channel.MAIL, peer[:1], (empty,), marker)])
            if not others <= told & self._silent:
                return None
            self.transport.include_newcomers()  # after the look at the others: training/newcomer.py says why
            return self.replicas == members or None

        self.wait(done, (), "the end of all messages in flight")
        self._silent.clear()

    # -- request and reply -------------------------------------------------------------------------------

    def call(self, server: int, parts: Sequence[np.ndarray], out: np.ndarray, header: Header = Header()) -> Header:  # noqa: B008
        """Send a request to a server, wait for the reply, and copy it to `out`. Returns the reply's header."""
        return self.call_start(server, parts, out, header).wait()

    def call_start(
        self, server: int, parts: Sequence[np.ndarray], out: np.ndarray, header: Header = Header()  # noqa: B008
    ) -> Pending[Header]:  # fmt: skip
        """Send a request to a server. `wait` of the returned object waits for the reply, as `call` does.

        The request contains a copy of the parts. If another request of this rank has not arrived yet, this function
        waits until it has. Several calls may be in progress. The replies are copied in the order of the calls, also if
        `wait` is called in another order.
        """
        calls = self._calls.setdefault(server, deque())

        def posted() -> bool | None:
            receive(self.transport, calls)  # the server may have no memory for replies until this one is received
            return self.post(Channel.CALL, (server,), parts, header) or None

        self.wait(posted, (server,), "a free server")
        return Call(self.transport, server, out, calls)

    def hang_up(self, server: int) -> None:
        """Drop the calls of a server that has died, and what remains of its replies. `wait` of a call then fails."""
        self._calls.pop(server, deque()).clear()
        drop_replies(self.transport, server)

    def drop_calls(self) -> None:
        """Drop all calls of this rank, and the requests that it has taken. It answers no others until `register`."""
        self._calls.clear()
        if self._service:
            self._service.drop()
        self.transport.service = self._service = None

    def register(self, handle: Handler | None) -> None:
        """Answer requests with `handle` from now on, while this rank waits and when it begins a step. None: stop that.

        handle(message) returns the reply: its parts, and its header. It runs in the thread of the replica. It does not
        run while the replica waits for the result of `allreduce_start`. For a replica, BufferSpec.serving must name it.
        First waits until an earlier handler has answered the requests that were taken.
        """
        old = self._service
        if old is not None:
            self.wait(lambda: old.answered() or None, (), "others to receive replies")
        self.transport.service = self._service = None
        if handle:
            self._service = Service(self.transport, handle)
            self.transport.service = self._service.poll

    def serve(self, handle: Handler) -> None:
        """Answer requests, one at a time, until every replica is dead or has reached State.PAUSED."""
        self.register(handle)
        service = self._service
        assert service is not None

        def done() -> bool | None:
            members = self.replicas
            if any(self.state(replica) < State.PAUSED for replica in members):
                return None  # `wait` answers the requests
            self.transport.include_newcomers()  # after the look at the states: training/newcomer.py says why
            if self.replicas != members:
                return None
            service.poll()  # after the look at the states: a replica sends its last request before it pauses
            return True if service.answered() else None

        self.wait(done, (), "requests")
        self.register(None)

    # -- collectives -------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Group:
        """Return a group of ranks, which must contain this rank, for collectives among them (group.py)."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = Group(self.transport, key)
        return self._groups[key]

    def allreduce(self, vector: np.ndarray, wire: Wire = EXACT, ring: bool = False) -> None:
        """vector = the sum of all replicas' vectors (float32 or float64), with the same bits on all replicas.

        The order of the additions depends on how the replicas are grouped into nodes, except along a ring (group.py).
        wire: what the vectors look like in messages (wire.py).
        """
        if ring or wire is not EXACT or not self.transport.native_allreduce(vector):
            self.group(self.replicas).allreduce(vector, wire, ring)

    def allreduce_start(self, vector: np.ndarray, wire: Wire = EXACT, ring: bool = False) -> Pending[None]:
        """Start a concurrent `allreduce`. Do not use the vector before `wait` of the returned object has returned."""
        return self.concurrently(lambda: self.allreduce(vector, wire, ring))

    def concurrently(self, work: Callable[[], T]) -> Pending[T]:
        """Run collectives concurrently with the replica, one function at a time, in the order of the calls."""
        return self.stats.beside(self.start, work)

    def broadcast(self, vector: np.ndarray, root: int = 0) -> None:
        """vector = the vector of rank `root`, on all ranks, servers included."""
        self.group(sorted({*self.replicas, *self.servers})).broadcast(vector, root)

    def barrier(self) -> None:
        """Wait until all replicas have called this function."""
        self.allreduce(np.zeros(1))

    def gather(self, vector: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Collect the vectors of all live replicas, as `Group.gather`: at the leader, yield (rank, vector).

        Raises PeerLost also if `led_by` is set and is not the leader.
        """
        if self.led_by not in (None, self.leader):
            raise PeerLost(self.led_by, "the collection of vectors")
        self.transport.include_newcomers()
        yield from self.group(self.replicas).gather(vector)

    # -- stopping ----------------------------------------------------------------------------------------

    def begin_step(self, steps: int, synchronous: bool) -> bool:
        """Begin a step after `steps` completed steps. Returns False if the replica must stop instead.

        synchronous: all replicas stop, or pause for a newcomer, after the same step (boundary.py). Raises Pause in the
        second case. Raises Aborted if another rank has failed.
        Also answers the requests that have arrived, if a service is registered.
        """
        if self.aborted():
            raise Aborted
        self.transport.poll_service()
        if boundary.stops(self.transport, steps, self.agreed_stop) if synchronous else self.stopping():
            return False
        self.step = steps + 1
        self.set_status(Column.STEP, self.step)
        return True

    def agreed_stop(self) -> float | None:
        """Return the last step of a run that is asked to stop, or None while a replica may still begin another one."""
        stops = {rank: self.status[rank, Column.STOP] for rank in self.survivors()}
        wishes = [stop for rank, stop in stops.items() if stop or self.state(rank) < State.PAUSED]
        return None if 0 in wishes else float(max(wishes)) - 1


__all__ = [
    "ANY",
    "CHUNK",
    "Aborted",
    "BufferSpec",
    "Channel",
    "Column",
    "Fabric",
    "Freeze",
    "Group",
    "Header",
    "Message",
    "Pause",
    "PeerLost",
    "Pending",
    "Slot",
    "State",
    "Trust",
    "View",
]  # fmt: skip
