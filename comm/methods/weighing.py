"""How gossip weighs two models (--mix): x_r <- x_r + weight (x_s - x_r), where r receives and s has sent.

    half     1/2
    clock    c_s / (c_s + c_r), with c the images that a replica has seen: a slow replica counts for less
    mass     w_s / (w_s + w_r), and w_r <- w_r + w_s: what the sender gave away, the receiver has now (push-sum)

With `half` every exchange is fair, and yet the average of all models moves at each: the receiver moves, the sender
does not. With `mass` the average weighted by w never moves. Half of the sender's mass goes along with its model,
and is added to the receiver's (Kempe, Dobra, Gehrke: FOCS 2003; for SGD: Blot, Picard, Cord, Thome: "GoSGD", 2016):

        w_s = 1 ──── 1/2, x_s ───>  w_r = 1           w_s = 1/2                   w_r = 3/2
        x_s                         x_r               x_s                         x_r <- (1 x_r + 1/2 x_s) / (3/2)

A replica that hears less than it says becomes light, and counts for little where it is heard. Mass held and on its way
is P, always: exactly so, since it is counted in grains of 2^-32, of which a sum never has to be rounded.
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
    """Both count the same."""

    def __init__(self, replica: Replica, blocks: int) -> None:
        self.replica = replica
        self.mass = np.ones(blocks)  # w_i of each block; the sum over all replicas is P

    def share(self, block: int) -> float:
        """What goes along with a message; 0: there is nothing to give."""
        return 1.0

    def sent(self, block: int, share: float) -> None:
        """The message has left."""

    def weight(self, note: Note, block: int) -> float:
        """How far to go towards the model that came."""
        return 0.5


class Clock(Half):
    def weight(self, note: Note, block: int) -> float:
        both = note.clock + self.replica.images
        return note.clock / both if both else 0.5


class Mass(Half):
    def share(self, block: int) -> float:
        return floor(self.mass[block] / (2 * GRAIN)) * GRAIN

    def sent(self, block: int, share: float) -> None:
        self.mass[block] -= share

    def weight(self, note: Note, block: int) -> float:
        self.mass[block] += note.weight
        return float(note.weight / self.mass[block])


def kind(config: Config) -> type[Half]:
    """The class for --mix. Raises ConfigError for mass that would have to be copied."""
    if config.mix == "mass" and config.exchange == "pull":
        raise ConfigError("--mix mass needs --exchange push or push-pull: "
                          "with pull a model is read by many, and its mass would count many times")  # fmt: skip
    return {"half": Half, "clock": Clock, "mass": Mass}[config.mix]
