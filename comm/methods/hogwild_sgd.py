"""SGD on weights that all replicas share, without a lock (Niu, Recht, Re, Wright: "Hogwild!", NeurIPS 2011).

    x_i <- c                     a copy, in which elements may be of different age
    c   <- c - eta * g_i(x_i)    in place, while others do the same

        replica 0    |c ->  gradient  -> c| |c ->  gradient  -> c|        nobody waits
        replica 1       |c ->  gradient  -> c| |c ->  gradient  -> c|

This is the Hogwild SGD of You, Buluc, Demmel (SC 2017): `ps` without a server, which would handle one gradient at a
time. The optimizer updates c instead of x_i. Its vectors, such as the velocity of --momentum, stay local. All replicas
must be on one node.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Method, Replica
from minidl.comm.methods.hogwild import SharedVector, spec
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS: dict[str, dict[str, object]] = {}


class HogwildSGD(Method):
    synchronous = False
    alone = True

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.shared = SharedVector(fabric, replica.theta)

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        if config.lookahead:
            raise ConfigError(f"--lookahead {config.lookahead}: replicas of hogwild-sgd share their weights, and the "
                              "average of one would undo the steps of others; leave it out")  # fmt: skip
        return BufferSpec(shared=spec(size))

    def local(self, batch: Batch) -> float:
        """Compute g_i(x_i)."""
        return self.replica.gradient(batch)

    def exchange(self) -> None:
        """c <- c - eta * g_i, then x_i <- c for the next step"""
        with self.shared.writing() as center:
            self.replica.update(center)
        self.shared.read(self.replica.theta)
        self.replica.touch()

    def pause(self) -> None:
        self.shared.read_last(self.replica.theta)
        self.replica.touch()

    def center_of_run(self) -> np.ndarray:
        return self.replica.theta

    def center_now(self) -> np.ndarray:
        return self.shared.values

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        self.shared.values[:] = self.replica.theta

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        self.restart()
