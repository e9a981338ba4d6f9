"""GASLoC (our reconstruction from a summary of arXiv 2606.11081): DiLoCo's outer steps on any graph.

    x_i   <- x_i - eta * g_i(x_i)                             every step: a step of --optimizer
    y_i   <- phi_i + lr * (x_i - phi_i)                       in every H-th step; lr = --outer-lr
    z_i   <- y_i + alpha * sum_j (y_j - y_i)                  over the neighbours j in --topology
    phi_i <- z_i + mu * (z_i - z_i of the round before)       mu = --outer-momentum; at the start z_i = phi_i
    x_i   <- phi_i

With the vectors as rows of matrices, z = (I - alpha * Lap) y, where Lap is the Laplacian of the graph. So a replica
exchanges models with its neighbours only. On a complete graph with alpha = 1 / P, z_i is the mean of all y_j, and this
is DiLoCo: there, phi + lr * (d + mu * m) is the same in other variables, with lr * m = z - z of the round before.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.methods.base import Fabric, Mapping, Replica, Sequence, View
from minidl.comm.methods.outer_step import Exchange, Rounds
from minidl.comm.topology import Topology
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "period": {"like": "outer_step"},
    "outer_lr": {"like": "outer_step"},
    "outer_momentum": {"like": "outer_step"},
    "topology": {
        "like": "base",
        "default": "ring",
        "choices": ["ring", "torus", "torus:RxC", "complete", "star", "exponential", "file:PATH"],
    },
    "alpha": {
        "default": None,
        "above": 0,
        "max": 1,
        "help": "part of the difference to each neighbour by which models are mixed "
                "(default: 1 / (1 + the largest number of neighbours))",
    },
    "on_death": {"like": "base"},
}


class GASLoC(Rounds):
    """phi (n,): phi_i, during a round y_i and then z_i. before (n,): z_i of the round before."""

    alone = True

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.phi, self.before = replica.theta.copy(), replica.theta.copy()
        self.plan = self.planned_among(fabric.replicas)

    def planned(self, round: int) -> Exchange:
        return self.plan

    def planned_among(self, members: Sequence[int]) -> Exchange:
        """Return the exchange of every round. Raises ConfigError if these members cannot have this graph or alpha."""
        graph, place = self.topology(members), members.index(self.fabric.rank)
        alpha, sources = self.weight(graph), graph.sources(place, 0)
        weights = {members[j]: alpha for j in sources} | {self.fabric.rank: 1 - alpha * len(sources)}
        return Exchange(weights, [members[j] for j in graph.targets(place, 0)])

    def weight(self, graph: Topology) -> float:
        """Return alpha. Raises ConfigError if the mean of all models would change, or a weight would be negative."""
        reads, alpha, name = graph.live(0).reads(), self.config.alpha, self.config.topology
        if (reads != graph.live(0).readers()).any():
            raise ConfigError(f"topology {name}: a replica reads from more replicas than read from it, so the mean of "
                              "all models would change: expected a graph with edges in both directions")  # fmt: skip
        most = int(reads.max())
        if alpha is not None and alpha * most > 1:
            raise ConfigError(f"alpha {alpha:g}: a replica has {most} neighbours in topology {name}; expected at most "
                              f"1 / {most}")  # fmt: skip
        return 1 / (1 + most) if alpha is None else float(alpha)

    def sent(self) -> np.ndarray:
        """y_i <- phi_i + lr * (x_i - phi_i)"""
        self.replica.mix_into(self.phi, self.replica.theta, self.config.outer_lr)
        return self.phi

    def outer_step(self) -> None:
        """phi_i <- z_i + mu * (z_i - before),  x_i <- phi_i"""
        self.replica.mix_into(self.before, self.phi, 1 + self.config.outer_momentum)
        self.phi, self.before = self.before, self.phi
        self.replica.scale(self.phi, 1.0, out=self.replica.theta)

    def on_membership(self, view: View) -> None:
        super().on_membership(view)
        self.plan = self.planned_among(self.fabric.replicas)

    def require(self, members: Sequence[int]) -> None:
        self.weight(self.topology(members))

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Begin with phi_i = x_i and without momentum: that of one replica would not fit the others."""
        self.phi[:] = self.before[:] = self.replica.theta

    def vectors(self) -> dict[str, np.ndarray]:
        return {"phi": self.phi, "before": self.before}
