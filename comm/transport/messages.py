"""The types of the communication layer: channels, slots, messages and their headers, the columns of the status table.

    sender      slot = reserve(channel, peers, nbytes)    write slot.bytes    slot.commit(header)
    receiver                                                                  message = take(channel)    release()

A message is an array of one of the types in DTYPES. It is sent as bytes, with the index of its type in DTYPES and its
number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from minidl.comm import atomic, memory
from minidl.engine.device import aligned
from minidl.errors import ConfigError, MinidlError
from minidl.kernels.elementwise.stream import CACHE

T = TypeVar("T", covariant=True)
ANY = -1  # any peer
MAX_CHANNELS = 8  # mpi.py adds it to the tag of a message
DTYPES = tuple(map(np.dtype, ("f4", "f8", "u1", "u2", "i1", "i2", "i4", "i8", "f2")))  # bfloat16 is sent as u2
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
CHUNK = 1 << 20  # bytes: collectives divide vectors into chunks, so that sending a chunk overlaps the sum of the next


class Channel(IntEnum):
    """The purpose of a message. On each channel at most one message is in flight from one rank to another."""

    MAIL = 0  # models from replica to replica, with their velocity or mass; a server's final state
    TREE = 1  # collectives
    CALL = 2  # a request to a server: a gradient
    ANSWER = 3  # the server's reply
    GATHER = 4  # vectors for the leader; not on TREE, where chunks of a sum may remain after a death


# By channel, how many slots of a rank can replace those that frozen receivers hold. On the other channels, a rank sends
# to one receiver only, or has a slot for each.
SPARES = {Channel.MAIL: 16, Channel.TREE: 16}


class Column(IntEnum):
    """A column of the status table. Every rank writes one row of the table, and all ranks read all rows."""

    STATE = 0  # a State
    STEP = 1  # the number of the current or last step, from 1; 0 before the first step
    STOP = 2  # 1 + the number of steps after which this rank can stop; 0: it has not noticed a request to stop
    SPEED = 3  # recent speed in images/s
    ACCURACY = 4  # training accuracy in this rank's latest finished epoch, 0 to 1
    LOSS = 5  # mean training loss in the same epoch
    IMAGES = 6  # images of this rank in the same epoch; 0: no epoch is finished yet, or it made no step in it
    STALL = 7  # seconds without a sign of life after which this rank is suspected; 0: never, it does not train
    PATIENCE = 8  # if it is longer than STALL, it replaces it: 3 times this rank's longest time without a sign of life
    PID = 9  # its process
    INCARNATION = 10  # 0: its process began with the job; n: it was the n-th newcomer of the job
    EPOCH = 11  # epochs that this rank has finished
    ENDED = 12  # 1: this rank is DEAD because its script has ended, without an error
    VIEW = 13  # how far this rank is with a change of the view: see fabric/view.py
    PAUSE = 14  # 1 + the number of steps after which this rank can pause for a newcomer: see transport/pausing.py
    JOINED = 15  # 1 + the number of steps after which the last newcomer joined this rank's view, or this rank joined
    SERVER = 16  # 1: this rank is a server, which no other rank can replace; 2: another one would take its place
    RESULT = 17  # the last result that it has received from a leader: see `led` in training/vectors.py
    TOLD = 18  # 1: this rank has said why the job ends
    CENTER = 19  # 1: this rank has the final center (methods/elastic.py)


class State(IntEnum):
    """The state of a rank. (leader): the meaning if the leader is in this state. The leader writes all results."""

    JOINING = 0
    READY = 1  # its kernels are compiled
    TRAINING = 2
    PAUSED = 3  # has made its last training step; the collection of states follows
    FINISHED = 4  # (leader) all steps are made, and everything is saved; in a simulation: this rank has ended
    DEAD = 5
    STOPPED = 6  # (leader) stopped before the last step; everything is saved, and nothing follows
    LOST = 7  # (leader) a replica died before the last step; the state of the others is saved, and nothing follows
    OVER = 8  # (leader) the result is written
    LEFT = 9  # in a script: it has left its training by an exception
    COMING = 10  # it was started in a running job, and compiles; it is no member yet
    ARRIVED = 11  # it is ready, and waits for the state of a member; it is no member yet


class Trust(IntEnum):
    """What the monitor thinks of a rank. The monitor writes it; a rank that gives a sign of life is trusted again.

    The monitor is the launcher on one node, and the event loop in a simulation.
    """

    TRUSTED = 0
    SUSPECTED = 1  # it has given no sign of life for longer than its STALL and PATIENCE
    CONDEMNED = 2  # in addition, another rank cannot go on without it: the monitor kills it (`Transport.fence`)


class Freeze(IntEnum):
    """What happens to a suspected rank. A server that would be left out is killed, because no rank can replace it."""

    WAIT = 0  # the others wait for it, if they need it
    LEAVE_OUT = 1  # the others go on without it. If it has not woken when they have finished or stopped, it is killed
    KILL = 2  # it is killed at once


class View(NamedTuple):
    """The members of a job: the replicas that train together.

    number: how often the members have changed; in a synchronous method, how many have died. members: ranks, in order.
    """

    number: int
    members: tuple[int, ...]


class Header(NamedTuple):
    """The header of a message: the numbers that are sent with a vector."""

    start: int = 0  # the vector begins with theta[start]
    weight: float = 1.0  # mass of push-sum, the learning rate for a parameter server, or eta * rho for a center
    clock: float = 0.0  # number of images that the sender has trained on
    round: int = 0  # number of steps of the sender, or of a server's model; in `Fabric.gather`, 1 if fail_fast, else 0
    marker: bool = False  # the last message (`Fabric.drain`), the first one to a center (succession.py), or a reply


class Message:
    """A received message: a vector from a peer, and its header.

    vector: a view of the receive buffer, valid until `release`. Do not write to it. A `with` block releases the message
    at its end.
    """

    __slots__ = ("header", "release", "sender", "vector")

    def __init__(self, sender: int, vector: np.ndarray, header: Header, release: Callable[[], None]) -> None:
        self.sender, self.vector, self.header, self.release = sender, vector, header, release

    def __enter__(self) -> Message:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Slot:
    """Memory for one message or published state: the sender reserves it, writes the data and commits it.

    bytes: uint8 (nbytes,), the memory that was reserved. It begins on a 64-byte boundary and contains arbitrary values.
    A slot keeps its edges busy until `commit` or `cancel`. A `with` block cancels a slot that was not committed:

        slot = fabric.reserve(Channel.MAIL, [peer], theta.size)
        if slot is not None:
            with slot:
                quantise(theta, out=slot.array(np.int8))
                slot.commit(header)
    """

    __slots__ = ("_abandon", "_deliver", "_dtype", "bytes")

    def __init__(
        self, data: np.ndarray, deliver: Callable[[int, int, Header], object], abandon: Callable[[], object]
    ) -> None:
        """data: see `bytes`. deliver(nbytes, index in DTYPES, header) sends the message, abandon() frees the slot."""
        self.bytes, self._dtype = data, DTYPES[2]
        self._deliver: Callable[[int, int, Header], object] | None = deliver
        self._abandon = abandon

    def array(self, dtype: type | np.dtype) -> np.ndarray:
        """Return the memory as a vector of this type, which also becomes the type of the message."""
        self._dtype = np.dtype(dtype)
        return self.bytes.view(self._dtype)

    def commit(
        self, header: Header = Header(), nbytes: int | None = None, dtype: type | np.dtype | None = None  # noqa: B008
    ) -> None:  # fmt: skip
        """Send the message, or publish the state. Do not write to the slot afterwards.

        nbytes: number of bytes to send, from the beginning of the slot. Default: all.
        dtype: type of the message. Default: the type passed to the last call of `array`, or uint8.
        Raises MinidlError if the slot was committed or cancelled before, or nbytes or dtype does not fit.
        """
        kind = self._dtype if dtype is None else np.dtype(dtype)
        size = self.bytes.size if nbytes is None else nbytes
        deliver, code = self._deliver, CODES.get(kind)
        if deliver is None:
            raise MinidlError("this slot was already committed or cancelled: reserve another one")
        if code is None:
            raise MinidlError(f"a message of {kind}: expected one of {', '.join(map(str, DTYPES))}")
        if not 0 <= size <= self.bytes.size or size % kind.itemsize:
            raise MinidlError(f"a message of {size} bytes of {kind}: expected a multiple of {kind.itemsize}, at most "
                              f"the {self.bytes.size} bytes of the slot")  # fmt: skip
        self._deliver = None
        deliver(size, code, header)

    def send(self, parts: Sequence[np.ndarray], header: Header) -> bool:
        """Copy contiguous vectors of one type into the slot, one behind the other, and commit it. Returns True.

        If that fails, the slot is cancelled.
        """
        try:
            out = self.array(parts[0].dtype)
            if len(parts) == 1:
                _copy(parts[0], out)
            else:
                at = 0
                for part in parts:
                    _copy(part, out[at : at + part.size])
                    at += part.size
                if any([part.dtype != out.dtype for part in parts]):
                    raise MinidlError(f"parts of {', '.join(str(part.dtype) for part in parts)}: expected one type")
            self.commit(header)
        except BaseException:
            self.cancel()
            raise
        return True

    def cancel(self) -> None:
        """Free the slot without sending anything. Without effect after `commit`."""
        if self._deliver is not None:
            self._deliver = None
            self._abandon()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


def unsent(nbytes: int) -> Slot:
    """Return a slot for a message without receivers."""
    return Slot(aligned(nbytes, np.uint8), lambda *message: None, lambda: None)


def _copy(source: np.ndarray, out: np.ndarray) -> None:
    """out = source. The stores to a large, aligned vector of floats bypass the caches."""
    if out.nbytes >= CACHE and out.ctypes.data % 64 == 0 and out.dtype in DTYPES[:2]:
        atomic.copy_past(source, out)
    else:
        out[:] = source


class BufferSpec(NamedTuple):
    """The memory that a method needs for messages. It is allocated once, when the ranks join."""

    nbytes: int = 0  # size of the longest message or published state, in bytes: 4 * n for n float32
    mail: int = 0  # number of messages that a rank can have in flight on MAIL, besides those to frozen ranks
    publish: bool = False  # whether ranks publish states
    call: bool = False  # whether there is a server
    serving: tuple[int, ...] = ()  # the replicas that answer requests (`Fabric.register`)
    heirs: bool = False  # whether every other rank may do so later; its slots for replies get memory when it does
    shared: tuple[tuple[str, int], ...] = ()  # (name, elements) of each float32 vector that all ranks write to

    def slots(self, rank: int, size: int, server: bool) -> dict[Channel, tuple[int, int]]:
        """Return for every channel the number of slots of a rank among `size`, and the bytes of each.

        server: whether it is one. It has a slot for the reply to each rank. So a rank that is frozen, or that computes
        before it receives its reply, delays no other.
        """
        call, answer = 1 - server, size * (server or self.heirs or rank in self.serving)
        return {
            Channel.MAIL: (self.mail, self.nbytes),
            Channel.TREE: (3, CHUNK),  # a message to the parent, a message to the children, and a reserve
            Channel.CALL: (call * self.call, self.nbytes),
            Channel.ANSWER: (answer * self.call, self.nbytes),
            Channel.GATHER: (1, CHUNK),
        }

    def late(self, rank: int, server: bool) -> bool:
        """Return whether the slots of a rank for replies get memory only when it uses them."""
        return self.heirs and not (server or rank in self.serving)


def check_size(nbytes: int, slots: int, capacity: int, what: str) -> None:
    """Raise ConfigError if `nbytes` do not fit into one of the method's `slots`, which have `capacity` bytes each."""
    if nbytes > (capacity if slots else 0):
        raise ConfigError(
            f"{what}: a message of {nbytes} bytes, but the method requested "
            f"{f'slots of {capacity} bytes' if slots else 'no slots'}: request more in `buffers`"
        )


class PeerLost(MinidlError):
    """A rank died while another one waited for it. message: replaces the usual text."""

    def __init__(self, peer: int, what: str, message: str = "") -> None:
        super().__init__(message or f"replica {peer} died while others waited for {what}")
        self.peer = peer


class Pending(Protocol[T]):
    """An operation in progress. `wait` waits until it is complete and returns its result."""

    def wait(self) -> T: ...


def check_limits(columns: Sequence[int], channels: Sequence[int]) -> None:
    """Raise ImportError if there are more status columns or channels than the memory or the tags of MPI can hold."""
    if max(columns) >= memory.COLUMNS:
        raise ImportError(
            f"column {max(columns)} of the status table: expected at most column {memory.COLUMNS - 1}, because the "
            "next word has another use: lengthen ROW in comm/memory.py"
        )
    if max(channels) >= MAX_CHANNELS:
        raise ImportError(
            f"channel {max(channels)}: expected at most channel {MAX_CHANNELS - 1}, because the tags of mpi.py have no "
            "room for more: enlarge MAX_CHANNELS in comm/transport/messages.py"
        )
    if list(BufferSpec().slots(0, 1, server=False)) != list(channels):
        raise ImportError("channels: expected slots for each of them, in order, in BufferSpec.slots")


check_limits([*Column], [*Channel])
