"""Local SGD (McDonald, Hall, Mann: NAACL 2010; Stich: ICLR 2019): independent steps, and an average every tau steps.

    x_i <- x_i - eta * g_i(x_i)              every step
    x_i <- 1/P * sum_j x_j                   every tau steps, tau = --period

        x_0  ─o──o──o──┐          ┌──o──o──o──┐
        x_1  ─o──o──o──┼─ mean ───┼──o──o──o──┼─ mean ─ ...        tau = 3
        x_2  ─o──o──o──┘          └──o──o──o──┘

Momentum stays local, or is averaged like the weights (--velocity mixed).

With --adaptive (adaptive.py), all replicas decide together, every tau steps, whether to average: by the mean of their
changes, a sum of one number. Kamp et al. (ECML PKDD 2018) call such averages dynamic.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.methods import adaptive, momentum
from minidl.comm.methods.base import BufferSpec, Fabric, Replica, View
from minidl.run.config import Config

OPTIONS = {
    "period": {"default": 8, "min": 1, "help": "steps between two averages"},
    "velocity": {
        "like": "momentum",
        "choices": {"local": "it stays local", "mixed": "it is averaged like the weights"},
    },
    "reduce": {"like": "allreduce"},
    "adaptive": {"all_of": "adaptive"},
    "balance": {"like": "base"},
    "shares": {"like": "base"},
    "weighting": {"like": "base"},
    "on_death": {"like": "base", "needs": {"reduce": ["tree", "ring"]}},
}


class LocalSGD(adaptive.Adaptive):
    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.momentum = momentum.kind(config)(replica, config)
        self.sum = np.empty_like(replica.theta)
        self.averaging = False  # whether an average was begun and is not complete
        self.trigger = adaptive.build(replica, config, together=True)

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        momentum.kind(config)
        adaptive.checked(config)
        return BufferSpec()

    def exchange(self) -> None:
        """Every tau steps: x_i <- 1/P * sum_j x_j. With --adaptive, only if the replicas have changed enough."""
        if self.replica.steps % self.config.period == 0 and (
            self.trigger is None or self.trigger.due(self.momentum.vectors)
        ):
            self.average_all()

    def average_all(self) -> None:
        self.averaging = True
        for vector in self.momentum.parts():
            self.average(vector)
        self.averaging = False
        if self.trigger:
            self.trigger.exchanged()

    def average(self, vector: np.ndarray) -> None:
        """vector = its mean over all replicas. If a replica dies during the sum, the vector does not change."""
        self.replica.copy(vector, self.sum)
        self.fabric.allreduce(self.sum, ring=self.config.reduce == "ring")
        self.replica.scale(self.sum, 1 / len(self.fabric.replicas), out=vector)

    def on_membership(self, view: View) -> None:
        """Make the average that a death may have interrupted, among the new members."""
        if self.trigger:
            self.trigger.agree()
        self.average_all()

    def known_steps(self) -> int:
        """Return the step of the last average: what a dead replica has trained since then is lost."""
        made, period = self.replica.steps, self.config.period
        if self.trigger:
            return int(self.trigger.last[0])
        return made - made % period - period * (self.averaging and made % period == 0)
