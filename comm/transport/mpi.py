"""The transport of an MPI job: shared memory between the ranks of a node, MPI messages between nodes.

As in shm.py, a rank writes messages into slots of its mailbox, and the ranks of its node read them there. To another
node, the sender's progress engine (progress_engine.py) sends the message from the slot without a copy. The engine
releases the slot when the receiver reports that it has released the message. So at most one message is in flight on
each channel from one rank to another, and the memory for arriving messages is bounded.

      rank 0        rank 1               |                  rank 2        rank 3
        |    memory    |      engine --- MPI --- engine       |    memory    |
        +-- mailbox ---+------- 1        |          2 --------+-- mailbox ---+

    tag                          the message
    MAIL TREE CALL ...           a message of this channel
    TAKEN + a channel            the receiver has released the message of this channel
    ASK, NEWS                    a request for the newest published state, and the reply, which the progress engine
                                 sends while the replica computes
    STATUS                       a rank's row of the status table, sent to one rank of every other node: its *relay*
    TRUST, DEATH                 whether a rank is trusted; a rank that the others go on without (mpi_monitor.py)
    CLAIM, CLAIMED               a request to the ledger of claimed work, in the memory of the first replica's node, and
                                 the reply, which the progress engine of a rank of that node sends: the keeper

mpi_nodes.py tells which ranks share memory.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np

from minidl.comm import memory
from minidl.comm.claims import Claims, Ledger
from minidl.comm.launch.job import MpiJob, recognise
from minidl.comm.remote_claims import GENERATIONS, RemoteClaims, serve
from minidl.comm.stats import Stats
from minidl.comm.transport.mailbox import LINE, Plan, read_header
from minidl.comm.transport.messages import (
    ANY,
    CHUNK,
    DTYPES,
    MAX_CHANNELS,
    BufferSpec,
    Channel,
    Column,
    Freeze,
    Message,
    State,
)
from minidl.comm.transport.mpi_monitor import DEATH, TRUST, NodeMonitor, NodeTransport
from minidl.comm.transport.mpi_nodes import WORD, Nodes, everyone, words
from minidl.comm.transport.mpi_states import ASK, NEWS, VERSIONS, RemoteStates
from minidl.comm.transport.progress_engine import TINY, ProgressEngine
from minidl.engine.device import aligned
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError, tell

if TYPE_CHECKING:
    from mpi4py import MPI

TAKEN = MAX_CHANNELS  # tags; the smaller ones are Channels
STATUS, CLAIM, CLAIMED = (DEATH + i for i in range(1, 4))
URGENT = (Column.STATE, Column.STOP, Column.LOSS)  # columns whose changes are sent immediately
TOLD = 0.02  # seconds: changes of columns that are not URGENT are sent at most once in this time
BEAT = 1.0  # seconds: signs of life are sent at most once in this time
NOTHING = np.zeros(0, np.uint8)
assert 8 * (3 + len(Column)) <= TINY, "rows of the status table must arrive in order"
PATIENCE = 2.0  # seconds: a rank that exits without `close` waits this long for the others to leave


class MpiTransport(NodeTransport):
    """One rank's transport. fast (--reduce fast): let MPI compute the sums, in an order that MPI chooses."""

    @classmethod
    def from_environment(cls, stats: Stats, stall: float = 30.0, fast: bool = False) -> MpiTransport:
        """Create the transport of this process. Raises ConfigError if no mpiexec or srun started it."""
        job = recognise()
        if job is None:
            raise ConfigError("this process is not a rank of an MPI job")
        return cls(job, stats, stall, fast)

    def __init__(self, job: MpiJob, stats: Stats, stall: float = 30.0, fast: bool = False) -> None:
        self.engine = engine = ProgressEngine(job)
        self.rank, self.size = engine.rank, engine.size
        self._offset = 0.0
        self._arrived: list[dict[int, Message]] = [{} for _ in Channel]
        self._states = RemoteStates(engine, stats)
        self._remote_claims: RemoteClaims | None = None  # if the ledger is on another node
        self._keepers: list[int] = []  # the ranks of the node that has the ledger
        self._keeper: int | None = None  # the one of them that this rank asks
        self._shelves: dict[int, list[np.ndarray]] = {}  # free receive buffers, by size
        self._mail = CHUNK
        self._untold, self._told, self._beat = False, 0.0, 0.0
        self._telling: dict[int, bool] = {}  # ranks to which a row is under way -> whether it has changed meanwhile
        self._news_came = threading.Condition()
        self._closed = self._joined = False
        self._joins = 0  # number of joins that this rank has left; ASK, STATUS, CLAIM and CLAIMED tell it
        self._sums: MPI.Comm | None = None  # of the replicas, if `fast`
        self._everyone = partial(everyone, engine)
        nodes = Nodes(engine)
        self.groups, self.segment, self.relays = nodes.groups, nodes.segment, []
        super().__init__(self.rank, self.size, nodes.numbers, stats, stall)
        self.beside = [peer for peer in range(self.size) if self.groups[peer] == self.groups[self.rank]]
        self.remote = frozenset(range(self.size)) - frozenset(self.beside)
        self.fast = fast
        self._map_board()
        self.elect()
        self.monitor = NodeMonitor(self)
        engine.room, engine.tick, engine.died, engine.deliver = self._room, self._tick, self._died, self._deliver
        self._previous_hook, sys.excepthook = sys.excepthook, self._unexpected
        atexit.register(self._left_open)

    def _map_board(self) -> None:
        """Place the status table in the segment, align the clocks of all nodes with rank 0's clock, learn the hosts."""
        self._generations = self.map_rows(words(self.segment, self.size))[:, memory.CLAIMS]
        self.engine.collective(self.engine.world.Ibarrier).wait()
        found = [word.split() for word in self._everyone(f"{time.monotonic()!r} {socket.gethostname()[:WORD // 2]}")]
        clocks, self.hosts = [float(clock) for clock, _ in found], [host for _, host in found]
        self._offset = clocks[0] - clocks[self.groups[self.rank]]
        self.heard[self.rank] = self.now()

    def join(self, buffers: BufferSpec, layout: str) -> None:
        servers = [rank for rank in range(self.size) if rank not in self.replicas]
        plan = Plan(self.size, buffers, servers, self.beside)
        begin = memory.control_size(self.size)
        head = self.groups[self.rank] == self.rank
        if self._joined:
            self._leave_mailbox()
        self._mail = buffers.nbytes
        if head:
            os.ftruncate(self.segment.fd, begin)  # so that the new memory is zero
            self.segment.lengthen(begin + plan.total, plan.used)
            self.segment.reserve(begin, begin + plan.parts[self.rank][1])
        words = self._everyone(f"{layout} {hashlib.sha256(repr(buffers).encode()).hexdigest()[:8]}")
        odd = next((rank for rank, word in enumerate(words) if word != words[0]), None)
        if odd is not None:
            self.close()
            if self.rank:
                raise Aborted
            raise ConfigError(f"replica {odd} has another model than replica 0, or requests different memory "
                              f"({words[odd]} against {words[0]}): give all ranks the same options")  # fmt: skip
        if not head:
            start, stop = plan.parts[self.rank]
            self.segment.reserve(begin + start, begin + stop)
        self.map_mailbox(plan, self._joins * VERSIONS)
        self._keepers = [peer for peer in range(self.size) if self.groups[peer] == self.groups[self.replicas[0]]]
        if (keeper := self._keepers[0]) in self.remote:
            self._keeper = keeper
            self._remote_claims = RemoteClaims(self._ask_keeper, self.wait, self._joins * GENERATIONS)
        self._sums = self.engine.ask(lambda: self.engine.split(self.rank in self.replicas)) if self.fast else None
        self._everyone("")  # wait until all nodes have allocated their memory
        self._joined = True

    def _leave_mailbox(self) -> None:
        """Before another `join`: wait until the messages of all ranks are delivered, then let go of the memory."""
        # From now on, the engine answers no requests for published states. Its thread runs what changes its data.
        self.engine.ask(lambda: setattr(self, "_joined", False))
        self.wait_and_drop(lambda: not self._states.answering and self.delivered(), ())
        self.wait_and_drop(self.engine.collective(self.engine.world.Ibarrier).is_set, ())
        self.engine.ask(self._forget)
        self._everyone("")  # wait until all ranks have left the memory

    def _forget(self) -> None:
        """Let go of the memory and of what remains of this join. Later messages of this join are ignored."""
        self._joins += 1
        del self.mailbox
        self._states.forget(self._joins)
        self._remote_claims = None
        if self._sums is not None:
            self._sums.Free()
            self._sums = None
        if self.groups[self.rank] == self.rank:  # only this rank of the node receives the rows of other nodes
            live = [peer for peer in sorted(self.remote) if self.alive(peer)]
            self.status[live] = 0

    # -- messages ----------------------------------------------------------------------------------------

    def sent(self, channel: Channel, peers: Sequence[int], nbytes: int) -> None:
        super().sent(channel, peers, nbytes)
        for peer in peers:
            if peer in self.remote:
                self.engine.send(peer, channel, self.mailbox.carry(channel, peer))

    def next_message(self, channel: Channel, peer: int) -> Message | None:
        arrived = self._arrived[channel]
        if peer in self.remote:
            return arrived.pop(peer, None)
        if peer == ANY and arrived:
            return self._next_of_all(channel, list(arrived))  # a copy: the engine's thread may add a message now
        return super().next_message(channel, peer)

    def _next_of_all(self, channel: Channel, remote: list[int]) -> Message:
        """Return a message: from the first sender after the previous one, be it on this node or on another.

        remote: the ranks of other nodes whose messages have arrived.
        """
        mailbox, arrived = self.mailbox, self._arrived[channel]
        turn = mailbox.turn[channel]
        distance, first = min(((sender - turn) % self.size, sender) for sender in remote)
        message = mailbox.take(channel, ANY, distance) if distance else None
        if message is None:
            mailbox.turn[channel] = first + 1
            message = arrived.pop(first)
        return message

    def newest(self, peer: int) -> Message | Literal[False] | None:
        if peer not in self.remote:
            return super().newest(peer)
        return self._states.newest(peer)

    @property
    def claims(self) -> Claims:
        return self._remote_claims or super().claims

    def _ask_keeper(self, request: np.ndarray) -> None:
        """Send a request to the rank that answers for the ledger."""
        assert self._keeper is not None
        self.engine.send(self._keeper, CLAIM, request.view(np.uint8))

    def set_status(self, column: Column, value: float) -> None:
        super().set_status(column, value)
        self._untold = True
        if column in URGENT:
            self.engine.order(self._tell)

    # -- called by the engine's thread -------------------------------------------------------------------

    def _room(self, tag: int, size: int) -> np.ndarray:
        """Return a buffer for an arriving message. Buffers of more than TINY bytes are reused."""
        if size <= TINY:
            return aligned(size, np.uint8)
        capacity = max(size, LINE + (CHUNK if tag in (Channel.TREE, Channel.GATHER) else self._mail))
        shelf = self._shelves.setdefault(capacity, [])
        return shelf.pop() if shelf else aligned(capacity, np.uint8)

    def _deliver(self, source: int, tag: int, room: np.ndarray, size: int) -> None:
        numbers = room[:size].view(np.int64) if tag > NEWS else NOTHING
        if tag < TAKEN:
            self._arrived[tag][source] = self._message(source, tag, room)
        elif tag < ASK:
            self.mailbox.carried(Channel(tag - TAKEN), source)
            return
        elif tag == ASK:
            self._states.asked(source, room)
            return
        elif tag == NEWS:
            self._states.arrived(source, self._message(source, NEWS, room), read_header(room.data)[-1])
        elif tag == STATUS:
            joins, heard, trust, *row = numbers.view(np.float64).tolist()
            known = self.heard[source]  # a relay that was frozen receives rows that are older than what its node knows
            if joins >= self._joins and heard >= known and self.status[source, Column.STATE] != State.DEAD:
                self.heard[source], self.status[source] = heard, row
                self.trust[source] = trust if heard > known else self.trust[source]  # equal: it is no sign of life
        elif tag in (TRUST, DEATH):
            self.monitor.learn(tag, *numbers.tolist())
        elif tag == CLAIM and numbers[0] // GENERATIONS == self._joins:
            ledger = Ledger(self.mailbox.claims, self.mailbox.states, self.rank)
            if (reply := serve(ledger, self._generations, source, numbers)) is not None:
                self.engine.send(source, CLAIMED, reply.view(np.uint8))
            return
        elif tag == CLAIMED and self._remote_claims is not None:
            self._remote_claims.reply(numbers)
        with self._news_came:
            self._news_came.notify_all()

    def _message(self, source: int, tag: int, room: np.ndarray) -> Message:
        """Return the message in a receive buffer: its header, and a view of its data."""
        nbytes, code, header, _ = read_header(room.data)
        vector = room[LINE : LINE + nbytes].view(DTYPES[code])
        held = [room]
        release = partial(self._release, source, tag, held)
        return Message(source, vector, header, release)

    def _release(self, source: int, tag: int, held: list[np.ndarray]) -> None:
        """Keep a receive buffer for reuse. Report the release to the sender, unless the buffer held a published state.

        A second call does nothing.
        """
        if not held:
            return
        room = held.pop()
        if room.size > TINY:
            self._shelves[room.size].append(room)
        if tag < TAKEN:
            self.engine.send(source, TAKEN + tag, NOTHING)

    def _tell(self) -> None:
        """Send this rank's row of the status table to the relay of every other node."""
        self._untold, self._told, rank = False, time.monotonic(), self.rank
        row = np.array([self._joins, self.heard[rank], self.trust[rank], *self.status[rank]]).view(np.uint8)
        for peer in self.relays:
            if peer in self._telling:  # it is frozen, or out of contact: rows would pile up
                self._telling[peer] = True
            else:
                self._telling[peer] = False
                self.engine.send(peer, STATUS, row, partial(self._row_sent, peer))

    def _row_sent(self, peer: int) -> None:
        self._untold |= self._telling.pop(peer)

    def _tick(self) -> None:
        """Send what is due: changes of the status table, and replies to requests for the newest state."""
        since = time.monotonic() - self._told
        if (self._untold and since > TOLD) or (since > BEAT and self.heard[self.rank] > self._beat):
            self._beat = self.heard[self.rank]
            self._tell()
        if self._joined:
            self._states.answer(self.mailbox)
            self.monitor.tick()

    def elect(self) -> None:
        """Choose the relay of each other node, which receives the rows of the status table, and a keeper if needed.

        Each is the first rank of its node that this one trusts, or the first live one. Called by the engine's thread.
        """
        live = sorted(filter(self.alive, range(self.size)), key=lambda rank: (self.suspected(rank), rank))
        relays = sorted({self.groups[peer]: peer for peer in reversed(live) if peer in self.remote}.values())
        if relays != self.relays:
            self.relays = relays
            self._tell()  # the last row may have been lost
        before, keeper = self._keeper, next((rank for rank in live if rank in self._keepers), None)
        if self._remote_claims is not None and before not in (None, keeper) and not self.trusts(before):
            self._keeper = keeper
            self._remote_claims.renew(before, keeper is not None)

    def _died(self, peer: int) -> None:
        """Handle the death of a rank. Called by the progress engine's thread, in each live rank."""
        self.status[peer, Column.STATE] = State.DEAD  # in the memory of this node
        self._states.died(peer)
        self.elect()
        first = next(rank for rank in range(self.size) if self.alive(rank))
        if self.rank == first and peer not in self.monitor.ended:
            what = "counts as dead" if peer in self.monitor.given_up else "died"
            tell(f"minidl: replica {peer} {what}")
        with self._news_came:
            self._news_came.notify_all()

    def handle_freezes(self, how: Freeze) -> None:
        super().handle_freezes(how)
        self.monitor.words[memory.ON_FREEZE] = how

    def now(self) -> float:
        return time.monotonic() + self._offset

    def sleep(self, seconds: float) -> None:
        with self._news_came:
            self.engine.waiting += 1
            self._news_came.wait(seconds)
            self.engine.waiting -= 1

    def shared(self, name: str) -> np.ndarray:
        if not self.remote:
            return super().shared(name)
        raise ConfigError("this method needs memory that all replicas share: run it on one node")

    def native_allreduce(self, vector: np.ndarray) -> bool:
        if self._sums is None or not self.fast:
            return False
        sums, place = self._sums, self.engine.in_place
        done = self.engine.collective(lambda: sums.Iallreduce(place, vector))
        self.wait(lambda: done.is_set() or None, (), "a collective operation")
        return True

    def fail(self, code: int = 2) -> None:
        if not self._closed:
            self.engine.abort(code)

    def _unexpected(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job after an uncaught exception, because other ranks would wait for this one forever."""
        self._previous_hook(kind, error, trace)
        tell(f"minidl: error: replica {self.rank}: {kind.__name__}: {error}")
        self.fail()

    def _left_open(self) -> None:
        """At exit without `close`, end the job unless the other ranks leave within PATIENCE."""
        if not self.engine.leave(PATIENCE):
            tell(f"minidl: error: replica {self.rank} ended before the others")
            self.fail()

    def close(self) -> None:
        """Leave MPI. Waits until all other ranks leave."""
        if self._closed:
            return
        self.set_status(Column.STALL, 0)  # a rank that waits for the others to leave is not suspected
        self.engine.leave()
        self.monitor.close()
        self._closed = True
        sys.excepthook = self._previous_hook
        atexit.unregister(self._left_open)
        super().close()
