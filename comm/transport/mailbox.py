"""Mailboxes: processes that share memory send vectors to each other without locks and without waiting.

Every rank has slots that only this rank writes. A slot holds a header (length, type, the fields of Header, the version
of a published state) and the data. A vector is copied once, into a slot, and readers read it there. Two protocols
define which slots may be read and which may be overwritten.

1. Messages. The sender names the receivers, and no message is lost. Each pair (sender, receiver) has one int64 cell per
channel:

    sender    cell == 0? write a slot       cell = k + 1  ------>  cell > 0? read slot k in place         receiver
              slot k is free again if no cell names it    <------  cell = 0

2. Published states. Any rank may read them, and a new state replaces the old one. For each writer, one word names the
slot with the newest state. Each pair (writer, reader) has another word, the pin. It names the slot that the reader is
reading:

    writer    write a slot that is not the newest          newest = slot, version
              and that no pin names; if there is none,
              publish nothing
    reader    newest?   pin = slot   still the newest?     read it in place            pin = 0

So a writer never waits for a reader, and a reader gets a complete vector or nothing. Each writer has three slots for
published states: one for the newest state, one that a slow reader may pin, and one to write. A dead reader's cells and
pins are ignored. atomic.py orders the stores and loads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from minidl.comm import atomic
from minidl.comm.memory import pages
from minidl.comm.transport.messages import ANY, CHUNK, BufferSpec, Channel, Header, Message
from minidl.engine.device import address
from minidl.errors import MinidlError
from minidl.kernels.elementwise.stream import CACHE

LINE = 64  # bytes: size of a cache line; slots and rows of words begin on separate lines
HEADER = struct.Struct("=5q2dq")  # elements, whether float64, start, round, marker, weight, clock, version
PUBLISHED = len(Channel)  # index of the pool of slots for published states
SLOTS = 3  # number of slots in that pool
TRIES = 8  # attempts to pin a published state that changes at each attempt


class Pool(NamedTuple):
    """A rank's slots for one purpose.

    start: the offset of the first slot. slots: the number of slots with room for data; each has `stride` bytes.
    empty: the number of slots for messages without data. They come after the others, and each has LINE bytes.
    """

    start: int
    slots: int
    stride: int
    empty: int

    def slot(self, k: int) -> int:
        """Return the offset of slot k."""
        if k < self.slots:
            return self.start + k * self.stride
        return self.start + self.slots * self.stride + (k - self.slots) * LINE

    @property
    def stop(self) -> int:
        return self.slot(self.slots + self.empty)


class Plan:
    """The layout of the memory of `size` ranks. All ranks compute the same layout.

    servers: the ranks that are servers. here: the ranks that map this memory; only these have slots in it. None: all
    ranks. total: the size in bytes.
    parts[r]: (start, stop) of the bytes that only rank r writes. All ranks write the bytes before parts[0].
    """

    def __init__(
        self, size: int, buffers: BufferSpec, servers: Sequence[int] = (), here: Sequence[int] | None = None
    ) -> None:
        self.size, self.row = size, _lines(8 * size)
        self.cells = [channel * size * self.row for channel in Channel]
        self.newest = len(Channel) * size * self.row
        self.pins = self.newest + size * LINE
        at = self.pins + size * self.row
        self.shared: dict[str, tuple[int, int]] = {}
        for name, elements in buffers.shared:
            self.shared[name] = at, elements
            at += _lines(4 * elements)
        self.parts: list[tuple[int, int]] = []
        self.pools: list[list[Pool]] = []  # [rank][channel]
        for rank in range(size):
            begin = at = pages(at)  # separate pages for each rank, on its NUMA node
            pools = []
            present = here is None or rank in here
            for count, capacity in self._slots(buffers, rank in servers):
                pools.append(Pool(at, count * present, LINE + _lines(capacity), size * present))
                at = pools[-1].stop
            self.pools.append(pools)
            self.parts.append((begin, at))
        self.total = pages(at)

    @staticmethod
    def _slots(buffers: BufferSpec, server: bool) -> list[tuple[int, int]]:
        """Return (number of slots, bytes in each) for every channel, and for published states."""
        model = 4 * buffers.elements
        call, answer = (0, 2) if server else (1, 0)
        return [
            (buffers.mail, model),  # MAIL
            (3, CHUNK),  # TREE: a message to the parent, a message to the children, and a reserve
            (call * buffers.call, model),  # CALL
            (answer * buffers.call, model),  # ANSWER
            (1, CHUNK),  # GATHER
            (SLOTS * buffers.publish, model),
        ]


class Mailbox:
    """One rank's interface to the mailboxes.

    memory: uint8 (Plan.total,), aligned to a cache line. states: float64 (size,), the State of each rank.
    """

    def __init__(self, memory: np.ndarray, plan: Plan, rank: int, states: np.ndarray) -> None:
        self.plan, self.rank, self.states = plan, rank, states
        self.bytes, self.memory = memory.data, memory
        self.vectors = memory.view(np.float32), memory.view(np.float64)
        size, row = plan.size, plan.row
        self.cells = [self._words(at, size, row) for at in plan.cells]
        self.newest = self._words(plan.newest, size, LINE)
        self.pins = self._words(plan.pins, size, row)
        self.turn = [0] * len(Channel)
        self.version = 0
        self.seen = [0] * size

    def _words(self, at: int, rows: int, row: int) -> np.ndarray:
        return self.memory[at : at + rows * row].view(np.int64).reshape(rows, row // 8)

    # -- messages ----------------------------------------------------------------------------------------

    def post(self, channel: Channel, peers: Sequence[int], parts: Sequence[np.ndarray], header: Header) -> int | None:
        """Send a message to these peers. Returns None if it was sent.

        Else returns a peer that is dead or has not released the previous message, or this rank if no slot is free.
        Raises MinidlError if the message is longer than a slot.
        """
        pool, cells = self.plan.pools[self.rank][channel], self.cells[channel]
        to = np.array(peers, np.int64)
        empty = not any(part.size for part in parts)
        first, last = (pool.slots, pool.slots + pool.empty) if empty else (0, pool.slots)
        slot = atomic.find_slot(cells, self.states, self.rank, to, first, last)
        if slot < 0:
            return -1 - slot
        self._write(pool, slot, parts, header, 0)
        atomic.deliver(cells, self.rank, to, slot)
        return None

    def take(self, channel: Channel, peer: int = ANY, among: int = 0) -> Message | None:
        """Return the next message from a peer, or None. With ANY, begin with the peer after the previous sender.

        among: if not 0, with ANY only so many ranks from that peer on may be the sender.
        """
        cells = self.cells[channel]
        first, count = (self.turn[channel], among or self.plan.size) if peer == ANY else (peer, 1)
        found = atomic.take(cells, self.rank, first, count)
        if found < 0:
            return None
        sender, slot = found >> 32, found & 0xFFFFFFFF
        if peer == ANY:
            self.turn[channel] = sender + 1
        release = partial(atomic.give_back, cells, self.rank, sender, slot)
        return self._read(channel, sender, slot, release)

    # -- published states --------------------------------------------------------------------------------

    def publish(self, parts: Sequence[np.ndarray], header: Header) -> bool:
        """Publish a state. Returns False, and publishes nothing, if readers have pinned all slots but the newest."""
        slot = atomic.find_unpinned(self.newest, self.pins, self.states, self.rank, SLOTS)
        if slot < 0:
            return False
        self.version += 1
        self._write(self.plan.pools[self.rank][PUBLISHED], slot, parts, header, self.version)
        atomic.announce(self.newest, self.rank, self.version, SLOTS, slot)
        return True

    def latest(self, peer: int) -> Message | Literal[False] | None:
        """Return a peer's published state; None if it is not new; False if it changed at every attempt."""
        newest = atomic.pin(self.newest, self.pins, peer, self.rank, self.seen[peer], SLOTS, TRIES)
        if newest == 0:
            return None
        if newest < 0:
            assert newest == -1, f"the previous message of peer {peer} was not released"
            return False
        self.seen[peer] = newest
        release = partial(atomic.unpin, self.pins, peer, self.rank)
        return self._read(PUBLISHED, peer, newest % SLOTS, release)

    # -- for messages to ranks that do not map this memory -----------------------------------------------

    def carry(self, channel: Channel, peer: int) -> np.ndarray:
        """Return the bytes (header and data) of this rank's message to a peer, so that MPI can send them.

        Until `carried` is called, the bytes do not change, and the message counts as one that the peer is reading.
        """
        slot = atomic.take(self.cells[channel], peer, self.rank, 1) & 0xFFFFFFFF
        return self._bytes(self.plan.pools[self.rank][channel].slot(slot))

    def carried(self, channel: Channel, peer: int) -> None:
        """Free the slot of this rank's message to a peer. Call this after the peer has released its copy."""
        cells = self.cells[channel]
        atomic.give_back(cells, peer, self.rank, -1 - int(cells[peer, self.rank]))

    def show(self) -> tuple[Message, np.ndarray] | None:
        """Return this rank's published state and its bytes, or None if `latest` fails. Release the state after use."""
        self.seen[self.rank] = 0
        message = self.latest(self.rank)
        if not isinstance(message, Message):
            return None
        return message, self._bytes(address(message.vector) - address(self.memory) - LINE)

    def _bytes(self, at: int) -> np.ndarray:
        """Return the bytes of the header and data of the slot at offset `at`."""
        count, kind = HEADER.unpack_from(self.bytes, at)[:2]
        return self.memory[at : at + LINE + count * (8 if kind else 4)]

    # -- slots -------------------------------------------------------------------------------------------

    def _write(self, pool: Pool, slot: int, parts: Sequence[np.ndarray], header: Header, version: int) -> None:
        """Write header and data into a slot. Raises MinidlError if the data are longer than the slot."""
        at, kind = pool.slot(slot), parts[0].dtype == np.float64
        count = sum(part.size for part in parts)
        room = pool.stride - LINE if slot < pool.slots else 0
        size = count * parts[0].itemsize
        if size > room:
            raise MinidlError(f"a message of {size} bytes, but the method requested slots of {room} bytes")
        numbers = header.start, header.round, header.marker, header.weight, header.clock
        HEADER.pack_into(self.bytes, at, count, kind, *numbers, version)
        place = self._vector(at, kind, count)
        for part in parts:
            _copy(part, place[: part.size])
            place = place[part.size :]

    def _read(self, channel: int, sender: int, slot: int, release: partial[None]) -> Message:
        at = self.plan.pools[sender][channel].slot(slot)
        count, kind, start, round, marker, weight, clock, _ = HEADER.unpack_from(self.bytes, at)
        header = Header(start, weight, clock, round, bool(marker))
        return Message(sender, self._vector(at, kind, count), header, release)

    def _vector(self, at: int, kind: int, count: int) -> np.ndarray:
        """Return the data of the slot at offset `at`.

        The array is writable for readers as well, because Numba compiles functions again for read-only arrays.
        """
        first = (at + LINE) >> (3 if kind else 2)
        return self.vectors[kind][first : first + count]

    def shared(self, name: str) -> np.ndarray:
        """Return a float32 vector that all ranks read and write."""
        at, elements = self.plan.shared[name]
        return self.vectors[0][at // 4 : at // 4 + elements]


def _copy(source: np.ndarray, out: np.ndarray) -> None:
    """out = source. The stores to a large, aligned vector bypass the caches."""
    if out.nbytes >= CACHE and out.ctypes.data % LINE == 0:
        atomic.copy_past(source, out)
    else:
        out[:] = source


def _lines(size: int) -> int:
    """Round a size in bytes up to whole cache lines."""
    return -(-size // LINE) * LINE
