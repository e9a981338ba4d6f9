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
CHUNK = 1 << 20  # bytes: a sum moves through the tree in chunks, so that one chunk moves up while the next is added


class Channel(IntEnum):
    """The purpose of a message. On each channel at most one message is in flight from one replica to another."""

    MAIL = 0  # what a method sends: models, gradients, mass
    TREE = 1  # collectives
    CALL = 2  # a request to a server
    ANSWER = 3  # its reply
    GATHER = 4  # vectors for the leader; not on TREE, where a death may leave part of a sum behind


class Column(IntEnum):
    """A column of the status table, in which every replica writes one row and all replicas read."""

    STATE = 0  # a State
    STEP = 1  # its current or last step, counted from 1
    STOP = 2  # 1 + the number of steps after which it can stop; 0: no stop was requested
    SPEED = 3  # recent speed in images/s


class State(IntEnum):
    """The state of a replica. (leader): the meaning when the leader of a training run sets it."""

    JOINING = 0
    READY = 1  # compiled
    TRAINING = 2
    PAUSED = 3  # has made its last training step; what follows concerns results
    FINISHED = 4  # (leader) the end of training: everything is saved, and evaluation follows
    DEAD = 5
    STOPPED = 6  # (leader) stopped before the end: everything is saved, and nothing follows
    LOST = 7  # (leader) a replica died before the end: the state of the others is saved, and nothing follows
    OVER = 8  # (leader) the result is written


class Note(NamedTuple):
    """The header of a message: the numbers that are sent with a vector."""

    start: int = 0  # the vector is theta[start:...]
    weight: float = 1.0  # mass of push-sum
    clock: float = 0.0  # number of images that the sender has trained on
    round: int = 0
    marker: bool = False  # the sender's last message before a pause


class Letter:
    """A received message: a vector from a peer, and its header.

    vector: a view of the receive buffer, not a copy. Read it, do not write to it or keep it: it is valid until
    `release`, which the end of a `with` block calls.
    """

    __slots__ = ("note", "release", "sender", "vector")

    def __init__(self, sender: int, vector: np.ndarray, note: Note, release: Callable[[], None]) -> None:
        self.sender, self.vector, self.note, self.release = sender, vector, note, release

    def __enter__(self) -> Letter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Needs(NamedTuple):
    """The memory that a method needs. It is shared, so its size is fixed before the replicas join."""

    elements: int = 0  # length in float32 of the longest vector that is sent or published
    mail: int = 0  # vectors that a replica can have in flight on MAIL
    publish: bool = False
    call: bool = False  # whether there is a server
    shared: tuple[tuple[str, int], ...] = ()  # (name, elements) of vectors that all ranks write to


class PeerLost(MinidlError):
    """A replica died while another one waited for it."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(f"replica {peer} died while others waited for {what}")
        self.peer = peer


class Pending(Protocol[T]):
    """An operation in progress. `wait` waits until it is complete and returns its result."""

    def wait(self) -> T: ...
