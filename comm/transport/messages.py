"""The types of the communication layer: channels, messages and their headers, the columns of the status table."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from minidl.errors import MinidlError

T = TypeVar("T", covariant=True)
ANY = -1  # any peer
CHUNK = 1 << 20  # bytes: collectives divide vectors into chunks, so that sending a chunk overlaps the sum of the next


class Channel(IntEnum):
    """The purpose of a message. On each channel at most one message is in flight from one rank to another."""

    MAIL = 0  # models from replica to replica, with their velocity or mass; a server's final state
    TREE = 1  # collectives
    CALL = 2  # a request to a server: a gradient
    ANSWER = 3  # the server's reply
    GATHER = 4  # vectors for the leader; not on TREE, where chunks of a sum may remain after a death


class Column(IntEnum):
    """A column of the status table. Every rank writes one row of the table, and all ranks read all rows."""

    STATE = 0  # a State
    STEP = 1  # the number of the current or last step, from 1; 0 before the first step
    STOP = 2  # 1 + the number of steps after which this rank can stop; 0: it has not noticed a request to stop
    SPEED = 3  # recent speed in images/s
    ACCURACY = 4  # training accuracy in this rank's latest finished epoch, 0 to 1
    LOSS = 5  # mean training loss in the same epoch
    IMAGES = 6  # images of this rank in the same epoch; 0: no epoch is finished yet, or it made no step in it


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


class Header(NamedTuple):
    """The header of a message: the numbers that are sent with a vector."""

    start: int = 0  # the vector begins with theta[start]
    weight: float = 1.0  # mass of push-sum, or the learning rate for a parameter server
    clock: float = 0.0  # number of images that the sender has trained on
    round: int = 0  # number of steps of the sender, or of a server's model; in `Fabric.gather`, 1 if fail_fast, else 0
    marker: bool = False  # whether this is the sender's last message (`Fabric.drain`)


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


class BufferSpec(NamedTuple):
    """The memory that a method needs for messages. It is allocated once, when the ranks join."""

    elements: int = 0  # length of the longest message or published state, in float32
    mail: int = 0  # number of messages that a rank can have in flight on MAIL
    publish: bool = False  # whether ranks publish states
    call: bool = False  # whether there is a server
    shared: tuple[tuple[str, int], ...] = ()  # (name, elements) of each vector that all ranks write to


class PeerLost(MinidlError):
    """A rank died while another one waited for it."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(f"replica {peer} died while others waited for {what}")
        self.peer = peer


class Pending(Protocol[T]):
    """An operation in progress. `wait` waits until it is complete and returns its result."""

    def wait(self) -> T: ...
