"""Elastic averaging, asynchronous, with Nesterov's momentum: each replica visits the center in its own time.

    if tau divides t:    d = eta * rho * (x_i - c),    x_i <- x_i - d,    c <- c + d            tau = --period
    v_i <- mu * v_i - eta * g_i(x_i + mu * v_i)        mu = --momentum
    x_i <- x_i + v_i

        replica 0    d v  v  v  v  d v  v  v  v  d          v: a step; d: a visit to the center, which lasts until
        replica 1    d v v v v d v v v v d v v v v          the center's reply. There is nothing else to wait for

This is the EAMSGD of Zhang, Choromanska, LeCun (NeurIPS 2015). The momentum stays local. The gradient is computed where
the momentum alone would carry the weights. The optimizer is sgd, whose velocity m stands for -v / eta:

    m <- mu * m + g(x - eta * mu * m),     x <- x - eta * m

At a constant learning rate, both forms are the same. Weight decay is computed at x.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.methods.elastic import Batch, BufferSpec, Fabric, Replica, Served
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "rho": {"like": "elastic"},
    "period": {"like": "elastic", "default": 4},
    "center": {"like": "elastic"},
    "compress": {"like": "compression"},
    "adaptive": {"all_of": "adaptive"},
}


class EAMSGD(Served):
    synchronous = False
    servers = 1
    alone = True
    order = "eamsgd"

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.here = np.empty_like(replica.theta)  # x_i during the gradient

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        if config.optimizer != "sgd":
            raise ConfigError(f"--method eamsgd needs --optimizer sgd, which it gives Nesterov's momentum: "
                              f"got {config.optimizer}")  # fmt: skip
        return super().buffers(size, config)

    def local(self, batch: Batch) -> float:
        if self.due:
            self.visit()
            self.apply_pull()
        loss = self.gradient_ahead(batch)
        self.replica.update()
        return loss

    def gradient_ahead(self, batch: Batch) -> float:
        """Compute g_i(x_i + mu * v_i). The weights are x_i again afterwards."""
        replica, mu = self.replica, self.config.momentum
        if not mu:
            return replica.gradient(batch)
        replica.copy(replica.theta, self.here)
        replica.axpy(-replica.lr * mu, replica.state["velocity"], replica.theta)
        loss = replica.gradient(batch)
        replica.copy(self.here, replica.theta)
        return loss

    def exchange(self) -> None:
        """A step begins with the visit to the center, in `local`."""
