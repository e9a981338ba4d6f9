"""Adaptive communication: a replica exchanges models when its own has changed enough (--adaptive).

    t: steps of the replica; r: the model of its last exchange, at step t_r; at first r is the model at the start

    change = |x - r| / |r|               drift      sees every movement
             abs(|x| - |r|) / |r|        norm       does not see a rotation

    if t <= --adaptive-after or t - t_r >= tau_min and (change > delta or t - t_r >= tau_max):
        exchange,    r <- x,    t_r <- t

tau_min is --shortest-silence, tau_max is --longest-silence. All replicas begin with the same model, so the first
exchange follows the same rule. The threshold delta of --threshold

    fixed               is constant
    --exchange-rate q   is steered, so that of all possible exchanges the share q takes place:
                        delta <- delta * exp(-G q)          after an exchange that was left out
                        delta <- delta * exp(G (1 - q))     after an exchange that took place
    --horizon h         follows the recent changes:
                        delta <- delta * h                  after an exchange that was left out
                        delta <- mean change per step before the last two exchanges,  after one that took place

An exchange is possible where --period or --probability selects the step. Of N possible exchanges, the steering makes
q N + (log delta_N - log delta_0) / G: as long as delta stays between bounds, the share approaches q. With --block
layers, each layer has its own r, t_r and delta.

Ho, Wu, Liu (CCGRID 2018) propose to exchange according to the change of the local model; the rule above is our
reconstruction. norm with --horizon is the rule of EventGraD (Ghosh, Aquino, Gupta: arXiv 2103.07454), which exchanges
in each of the first 30 steps. The steering is that of adaptive clipping (Andrew, Thakkar, McMahan, Ramaswamy: NeurIPS
2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minidl.comm import codecs
from minidl.comm.methods.base import Method
from minidl.comm.replica import Replica
from minidl.engine.device import aligned
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "adaptive": {
        "default": "none",
        "choices": {
            "none": "every exchange takes place",
            "drift": "only if its model has moved far enough from that of the last exchange",
            "norm": "only if the norm of its model has changed enough (EventGraD)",
        },
        "help": "whether a replica leaves out exchanges while its model has changed little",
    },
    "threshold": {
        "default": 0.02,
        "above": 0,
        "needs": {"adaptive": ["drift", "norm"]},
        "help": "relative change after which a replica exchanges; with --exchange-rate or --horizon, the first one",
    },
    "exchange_rate": {
        "default": 0.0,
        "min": 0,
        "max": 1,
        "needs": {"adaptive": ["drift", "norm"]},
        "instead_of": "horizon",
        "help": "share of the possible exchanges that take place: the threshold is steered to it; 0: it is not",
    },
    "horizon": {
        "default": 0.0,
        "min": 0,
        "max": 2,
        "needs": {"adaptive": ["drift", "norm"]},
        "help": "the threshold is the recent change per step, times this factor for each step since (EventGraD); 0: "
                "it is not",
    },
    "adaptive_after": {
        "default": 0,
        "min": 0,
        "needs": {"adaptive": ["drift", "norm"]},
        "help": "steps at the start in which no exchange is left out",
    },
    "shortest_silence": {
        "default": 1,
        "min": 1,
        "needs": {"adaptive": ["drift", "norm"]},
        "help": "steps after an exchange before which there is no other one",
    },
    "longest_silence": {
        "default": 100,
        "min": 1,
        "needs": {"adaptive": ["drift", "norm"]},
        "help": "steps after an exchange after which there is another one, however little has changed",
    },
}
GAIN = 0.2  # G of the steering
LOWEST, HIGHEST = 1e-12, 1e12  # thresholds


def checked(config: Config) -> bool:
    """Return whether --adaptive is in use. Raises ConfigError for options that contradict each other."""
    if config.adaptive in (None, "none"):
        return False
    if config.velocity == "quasi-global":
        raise ConfigError(f"adaptive {config.adaptive} leaves out exchanges, and velocity quasi-global needs each of "
                          "them: expected velocity local or mixed")  # fmt: skip
    shortest, longest, rate = config.shortest_silence, config.longest_silence, config.exchange_rate or 0.0
    if shortest > longest:
        raise ConfigError(f"shortest-silence {shortest} and longest-silence {longest}: expected a shortest silence "
                          "that is no longer than the longest")  # fmt: skip
    period = 1 / config.probability if config.probability else config.period or 1  # steps between possible exchanges
    low, high = min(1.0, period / longest), min(1.0, period / shortest)
    if rate and not low <= rate <= high:
        raise ConfigError(f"exchange-rate {rate:g}: expected {low:.3g} to {high:.3g}, which shortest-silence "
                          f"{shortest} and longest-silence {longest} allow: change one of them")  # fmt: skip
    return True


def build(
    replica: Replica, config: Config, blocks: Sequence[tuple[int, int]] = (), together: bool = False
) -> Trigger | None:
    """Return the trigger of --adaptive; None for `none`, which leaves no exchange out."""
    return Trigger(replica, config, blocks or [(0, replica.theta.size)], together) if checked(config) else None


class Trigger:
    """Decides in which steps a replica exchanges which blocks of theta.

    blocks: the range (start, stop) of each of the B blocks. together: whether all replicas decide together, by the mean
    of their changes; then all of them exchange in the same steps.

    nbytes: of each block in a message. reference: r, (n,). threshold: delta, (B,). last: t_r, (B,). slopes (B, 2):
    change per step before the last two exchanges.
    """

    def __init__(self, replica: Replica, config: Config, blocks: Sequence[tuple[int, int]], together: bool) -> None:
        self.replica, self.config, self.blocks, self.together = replica, config, blocks, together
        codec = codecs.build(config.compress or "none")
        self.nbytes = [codec.nbytes(stop - start) if codec else replica.theta.itemsize * (stop - start)
                       for start, stop in blocks]  # fmt: skip
        self.reference = aligned(replica.theta.size, replica.theta.dtype)
        self.reference[:] = replica.theta
        self.threshold, self.last = np.full(len(blocks), config.threshold), np.zeros(len(blocks))
        self.slopes = np.full((len(blocks), 2), config.threshold)
        self.change = np.zeros(len(blocks))  # in the present step

    @property
    def silent(self) -> np.ndarray:
        """The steps since the last exchange of each block, (B,)."""
        return self.replica.steps - self.last

    @property
    def always(self) -> bool:
        """Whether no exchange is left out in this step."""
        return 0 < self.config.adaptive_after >= self.replica.steps

    def due(self, vectors: int = 1) -> list[int]:
        """Return the blocks to exchange in this step, those first that have been silent longest.

        Call this once in each step with a possible exchange, and `exchanged` for each block that was exchanged.
        vectors: how many vectors of theta's length the replica would send; the statistics count what it does not.
        """
        config, silent = self.config, self.silent
        self.change = self.measured()
        changed = ~(self.change <= self.threshold)  # also if the change is not a number
        due = (silent >= config.shortest_silence) & (changed | (silent >= config.longest_silence))
        due |= self.always
        for block in np.flatnonzero(~due).tolist():
            self.replica.fabric.stats.suppressed(1, vectors * self.nbytes[block])
            self.scale_threshold(block, np.exp(-GAIN * (config.exchange_rate or 0)) * (config.horizon or 1))
        return sorted(np.flatnonzero(due).tolist(), key=lambda block: (-silent[block], block))

    def measured(self) -> np.ndarray:
        """Return the change of each block, (B,)."""
        moved, before, now = self.replica.norms_of_change(self.replica.theta, self.reference, self.blocks).T
        change = moved if self.config.adaptive == "drift" else abs(now - before)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(change == 0, 0.0, change / before)
        if self.together:
            fabric = self.replica.fabric
            fabric.group(fabric.replicas).allreduce(relative)
            relative /= len(fabric.replicas)
        return relative

    def exchanged(self, block: int = 0) -> None:
        """Note that a block of x has been exchanged in this step."""
        start, stop = self.blocks[block]
        self.replica.copy(self.replica.theta[start:stop], self.reference[start:stop])
        self.replica.fabric.stats.exchanged()
        slope = self.change[block] / max(1.0, self.silent[block])
        self.slopes[block] = self.slopes[block, 1], min(slope, HIGHEST)
        self.last[block] = self.replica.steps
        if self.config.horizon:
            self.threshold[block] = np.clip(self.slopes[block].mean(), LOWEST, HIGHEST)
        elif self.config.exchange_rate and not self.always:
            self.scale_threshold(block, np.exp(GAIN * (1 - self.config.exchange_rate)))

    def scale_threshold(self, block: int, factor: float) -> None:
        self.threshold[block] = np.clip(self.threshold[block] * factor, LOWEST, HIGHEST)

    def restart(self) -> None:
        """The replica begins with other weights, which are equal on all replicas."""
        self.reference[:], self.last[:] = self.replica.theta, self.replica.steps

    def agree(self) -> None:
        """Take the state of the first replica, except r: a death may have interrupted an exchange on some of them.

        All members that decide together call this.
        """
        fabric = self.replica.fabric
        for vector in (self.threshold, self.last, self.slopes.reshape(-1)):
            fabric.group(fabric.replicas).broadcast(vector, fabric.replicas[0])

    def known_steps(self) -> int:
        """Return how many steps of another replica this one contains at least, if all make the same number of steps."""
        return max(0, self.replica.steps - self.config.longest_silence)

    def vectors(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint must contain."""
        return {"reference": self.reference, "threshold": self.threshold, "last": self.last, "slopes": self.slopes}


class Adaptive(Method):
    """A method with --adaptive. trigger: decides which exchanges take place; None: all of them."""

    trigger: Trigger | None = None

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        if self.trigger:
            self.trigger.restart()

    def vectors(self) -> dict[str, np.ndarray]:
        return self.trigger.vectors() if self.trigger else {}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        if self.trigger and not (vectors["threshold"] > 0).all():
            raise ValueError(f"a threshold of --adaptive is {vectors['threshold'].min():g}; expected a number above 0")
        super().restore(vectors, numbers)
