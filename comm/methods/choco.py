"""Compressed D-PSGD: CHOCO-SGD (Koloskova, Stich, Jaggi: ICML 2019). Replicas send codes of differences.

    x_i  <- x_i - eta * g_i(x_i)
    q_i   = Q(x_i - h_i)                                 the only message, to the neighbours
    h_j  <- h_j + q_j                                    for i and its neighbours j
    x_i  <- x_i + gamma * sum_j W_ij * (h_j - h_i)

h_i is what all others know of x_i. What a code loses remains in x_i - h_i, and is a part of the next difference. W is
constant, so a replica keeps the sum s_i = sum_j W_ij * h_j instead of each h_j: s_i <- s_i + sum_j W_ij * q_j. Then it
moves by gamma * (s_i - h_i). The average of all x_i does not change by it, because the columns of W sum to 1. The less
of a difference a code moves, the smaller gamma must be (--gamma).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minidl.comm import codecs
from minidl.comm.codecs import Codec
from minidl.comm.fabric.base import Fabric
from minidl.comm.methods.compression import DifferenceCodes
from minidl.comm.replica import Replica
from minidl.comm.topology import split
from minidl.errors import ConfigError
from minidl.run.config import Config

FIXED = ("ring", "torus", "complete", "star", "exponential", "file")  # topologies with one round


class Differences(DifferenceCodes):
    """The state of a replica: known: h_i; mixed: s_i, (n,) like theta. All replicas begin with equal weights."""

    def __init__(self, replica: Replica, fabric: Fabric, codec: Codec, gamma: float | None) -> None:
        super().__init__(replica, fabric, codec)
        self.gamma = codec.gamma if gamma is None else gamma
        self.known, self.mixed = replica.theta.copy(), replica.theta.copy()
        self.code = self.empty_code()  # q_i

    def encode(self, key: int) -> np.ndarray:
        """Return the code of x_i - h_i. h_i <- h_i + q_i"""
        return self.encode_difference(self.replica.theta, self.known, self.code, key)

    def add(self, code: np.ndarray, weight: float) -> None:
        """s_i <- s_i + weight * q"""
        self.add_code(code, weight, self.mixed)

    def move(self) -> None:
        """x_i <- x_i + gamma * (s_i - h_i)"""
        self.replica.pull(self.mixed, self.known, self.gamma, out=self.rest)
        self.replica.axpy(1.0, self.rest, self.replica.theta)

    def agree(self, targets: Sequence[int], weights: Mapping[int, float]) -> None:
        """h_i <- x_i, and s_i as it follows from that. All members call this when the graph has changed.

        targets: the ranks that read from this one. weights: of the ranks from which it reads, and of this one.
        """
        self.known[:] = self.replica.theta
        self.mixed[:] = self.fabric.group(self.fabric.replicas).mix(self.known, targets, weights)

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """All replicas begin with other weights, which are equal."""
        self.known[:] = self.mixed[:] = self.replica.theta

    def vectors(self) -> dict[str, np.ndarray]:
        return {"known": self.known, "mixed": self.mixed}


def checked(config: Config) -> Codec | None:
    """Return the codec of --compress, or None. Raises ConfigError if D-PSGD cannot compress with these options."""
    codec = codecs.build(config.compress)
    if codec is None:
        return None
    if split(config.topology)[0] not in FIXED or config.topology.startswith("base-"):
        raise ConfigError(f"compress {config.compress} needs a graph that is the same in every step, and topology "
                          f"{config.topology} is not: expected --topology {', '.join(FIXED)}")  # fmt: skip
    for option, value in (("overlap", False), ("velocity", "local")):
        found = getattr(config, option)
        if found != value:
            raise ConfigError(f"compress {config.compress} excludes {option} {found}: leave one of them out")
    return codec
