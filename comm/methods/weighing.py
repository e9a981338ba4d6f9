"""The weight of a received model in gossip (--mix): x_r <- x_r + weight (x_s - x_r), for receiver r and sender s.

    half     1/2
    clock    c_s / (c_s + c_r), with c the images that a replica has seen: a slow replica counts less
    mass     w_s / (w_s + w_r), and w_r <- w_r + w_s: the mass moves from the sender to the receiver (push-sum)

With `half` both models count the same, but every exchange moves the average of all models, because the receiver moves
and the sender does not. With `mass` the average weighted by w never moves. The sender sends half of its mass with its
model, and the receiver adds it to its own (Kempe, Dobra, Gehrke: FOCS 2003; for SGD: Blot, Picard, Cord, Thome:
"GoSGD", 2016):

        w_s = 1 ──── 1/2, x_s ───>  w_r = 1           w_s = 1/2                   w_r = 3/2
        x_s                         x_r               x_s                         x_r <- (1 x_r + 1/2 x_s) / (3/2)

A replica that receives less than it sends loses mass, and its model counts less at its receivers. The mass of all
replicas and messages in flight is always P, exactly: masses are multiples of 2^-32, whose sums need no rounding.
"""

from __future__ import annotations

from math import floor

import numpy as np

from minidl.comm.fabric.base import Note
from minidl.comm.replica import Replica
from minidl.errors import ConfigError
from minidl.run.config import Config

GRAIN = 2.0**-32


class Half:
    """Both models count the same."""

    def __init__(self, replica: Replica, blocks: int) -> None:
        self.replica = replica
        self.mass = np.ones(blocks)  # w_i of each block; the sum over all replicas and messages is P

    def share(self, block: int) -> float:
        """Return the mass to send with a message; 0 if this replica has too little to send any."""
        return 1.0

    def sent(self, block: int, share: float) -> None:
        """Called when the message was sent."""

    def weight(self, note: Note, block: int) -> float:
        """Return the weight of a received model."""
        return 0.5


class Clock(Half):
    """The model that has seen more images counts more."""

    def weight(self, note: Note, block: int) -> float:
        both = note.clock + self.replica.images
        return note.clock / both if both else 0.5


class Mass(Half):
    """Each model counts by its mass, which is conserved (push-sum)."""

    def share(self, block: int) -> float:
        return floor(self.mass[block] / (2 * GRAIN)) * GRAIN

    def sent(self, block: int, share: float) -> None:
        self.mass[block] -= share

    def weight(self, note: Note, block: int) -> float:
        self.mass[block] += note.weight
        return float(note.weight / self.mass[block])


def kind(config: Config) -> type[Half]:
    """Return the class for --mix. Raises ConfigError for `mass` with pull, which would copy mass."""
    if config.mix == "mass" and config.exchange == "pull":
        raise ConfigError("--mix mass needs --exchange push or push-pull: "
                          "with pull many replicas read a model, and its mass would count many times")  # fmt: skip
    return {"half": Half, "clock": Clock, "mass": Mass}[config.mix]
