"""The words in which replicas talk: letters and the notes on them, channels, and what stands on the board."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from minidl.errors import MinidlError

T = TypeVar("T", covariant=True)
ANY = -1  # any peer
CHUNK = 1 << 20  # bytes: sums travel through the tree in parts, so that one part rises while the next is added


class Channel(IntEnum):
    """What a message is part of. At most one is on its way from a replica to another on each channel."""

    MAIL = 0  # what a method sends: models, gradients, mass
    TREE = 1  # agreement
    CALL = 2  # a question to a server
    ANSWER = 3
    GATHER = 4  # what the leader collects; apart from TREE, where a death may leave half a sum


class Column(IntEnum):
    """What every replica writes of itself on the board, for all to read."""

    STATE = 0  # a State
    STEP = 1  # the step that it makes, or made last, counted from 1
    STOP = 2  # 1 + the steps after which it could stop; 0: it has not been asked to
    SPEED = 3  # images/s, lately


class State(IntEnum):
    JOINING = 0
    READY = 1  # compiled
    TRAINING = 2
    PAUSED = 3  # has trained as far as it will: what follows is about results
    FINISHED = 4  # (the leader) at the end of training, all is saved: now to the scores
    DEAD = 5
    STOPPED = 6  # (the leader) before the end, all is saved: that is all
    LOST = 7  # (the leader) before the end, since somebody has died: what the others have is saved, and that is all
    OVER = 8  # (the leader) the result is written


class Note(NamedTuple):
    """The few numbers that travel with a vector."""

    start: int = 0  # the first element of theta that it stands for
    weight: float = 1.0  # its mass (push-sum)
    clock: float = 0.0  # images that went into it
    round: int = 0
    marker: bool = False  # the last message on its way before a pause


class Letter:
    """A vector that came from a peer.

    vector: where it lies, read-only and good until `release`, which a `with` calls: mix it, do not keep it.
    """

    __slots__ = ("note", "release", "sender", "vector")

    def __init__(self, sender: int, vector: np.ndarray, note: Note, release: Callable[[], None]) -> None:
        self.sender, self.vector, self.note, self.release = sender, vector, note, release

    def __enter__(self) -> Letter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Needs(NamedTuple):
    """The memory that a method wants: decided before replicas join, since it is shared."""

    elements: int = 0  # float32 in the longest vector that is sent or published
    mail: int = 0  # vectors on their way at a time, for each replica
    publish: bool = False
    call: bool = False  # there is a server
    shared: tuple[tuple[str, int], ...] = ()  # (name, elements) of vectors that all write to


class PeerLost(MinidlError):
    """Somebody that was waited for has died."""

    def __init__(self, peer: int, what: str) -> None:
        super().__init__(f"replica {peer} died while others waited for {what}")
        self.peer = peer


class Pending(Protocol[T]):
    """Something that goes on meanwhile."""

    def wait(self) -> T: ...
