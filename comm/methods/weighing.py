"""The weight of a received model in gossip (--mix): x_r <- x_r + weight * (x_s - x_r), for sender s and receiver r.

    half     1/2
    clock    c_s / (c_s + c_r), where c is the number of images that a replica has seen: slow replicas count less
    mass     m / (m + w_r), then w_r <- w_r + m, with the mass m of the message and the mass w_r of r (push-sum)

With `half`, both models have the same weight, but a message changes the average of all models, because only the
receiver's model changes. With `mass`, messages do not change the average weighted by w. The sender sends half of its
mass with its model, m = w_s / 2, and the receiver adds m to its mass (Kempe, Dobra, Gehrke: FOCS 2003; for SGD: Blot,
Picard, Cord, Thome: "GoSGD", 2016):

        w_s = 1 ──── 1/2, x_s ───>  w_r = 1           w_s = 1/2                   w_r = 3/2
        x_s                         x_r               x_s                         x_r <- (x_r + 1/2 * x_s) / (3/2)

A replica that receives less than it sends loses mass, so its model gets less weight. Masses are multiples of 2^-32, so
their sums are exact. Unless a replica dies, the masses of all P replicas and of the messages in flight sum to P. A
replica that joins a running job gets half of the mass of the replica whose weights it gets, so the sum remains.
"""

from __future__ import annotations

from math import floor

import numpy as np

from minidl.comm.fabric.base import Header
from minidl.comm.replica import Replica
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "mix": {
        "default": "half",
        "choices": {
            "half": "equal weights",
            "mass": "by mass, which moves with the messages: the average is preserved (push-sum)",
            "clock": "by the number of images that each replica has seen",
        },
        "help": "weights of the two models when one is mixed into the other",
    },
}
GRAIN = 2.0**-32


class Half:
    """Equal weights, and the base class of the other kinds."""

    def __init__(self, replica: Replica, blocks: int) -> None:
        self.replica = replica
        self.mass = np.ones(blocks)  # w_i of each block of the model (all of it, or a layer)

    def share(self, block: int) -> float:
        """Return the mass to send with a message; 0 if this replica has too little mass for a message."""
        return 1.0

    def sent(self, block: int, share: float) -> None:
        """Subtract the mass of a message that was sent."""

    def weight(self, header: Header, block: int) -> float:
        """Return the weight of a received model. Call this once per message: Mass.weight also adds its mass."""
        return 0.5


class Clock(Half):
    """Weights proportional to the number of images that a replica has seen."""

    def weight(self, header: Header, block: int) -> float:
        both = header.clock + self.replica.images
        return header.clock / both if both else 0.5


class Mass(Half):
    """Weights proportional to mass, which is conserved (push-sum)."""

    def share(self, block: int) -> float:
        return floor(self.mass[block] / (2 * GRAIN)) * GRAIN

    def sent(self, block: int, share: float) -> None:
        self.mass[block] -= share

    def weight(self, header: Header, block: int) -> float:
        self.mass[block] += header.weight
        return float(header.weight / self.mass[block])


def kind(config: Config) -> type[Half]:
    """Return the class for --mix. Raises ConfigError for `mass` with pull, and for other weights than 1/2 with swap."""
    if config.exchange == "swap" and config.mix != "half":
        raise ConfigError(f"--exchange swap excludes --mix {config.mix}: both replicas must move by the same amount; "
                          "expected --mix half")  # fmt: skip
    if config.mix == "mass" and config.exchange == "pull":
        raise ConfigError("--mix mass needs --exchange push or push-pull: "
                          "with pull several replicas read a model, so its mass would count repeatedly")  # fmt: skip
    return {"half": Half, "clock": Clock, "mass": Mass}[config.mix]
