"""What becomes of momentum where models are mixed (--velocity). m_i: replica i's velocity, mu: the option --momentum.

    local          stays where it is: only x travels
    mixed          is mixed as the weights are: x and m travel, twice the bytes
    quasi-global   follows the mixed models: only x travels

Momentum remembers the last gradients. Where replicas see different data, local momentum pushes each the way that its
own data wants, long after the mixing. Quasi-global momentum (Lin, Karimireddy, Stich, Jaggi: ICML 2021, QG-DSGDm)
remembers where the mixed model went instead. A step takes m as it was, and what the optimizer makes of it is dropped:

    x'           <- x_i^(t) - eta (mu m_i^(t-1) + g_i)
    x_i^(t+1)    <- sum_j W_ij x'_j
    m_i^(t)      <- mu m_i^(t-1) + (1 - mu) (x_i^(t) - x_i^(t+1)) / eta
"""

from __future__ import annotations

import numpy as np

from minidl.comm.fabric.base import Letter
from minidl.comm.replica import Replica, mix
from minidl.errors import ConfigError
from minidl.run.config import Config


class Momentum:
    """Stays local."""

    vectors = 1  # of theta's length, in a message

    def __init__(self, replica: Replica, config: Config) -> None:
        self.replica, self.mu = replica, config.momentum

    def parts(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
        """What a message about theta[start:stop] holds."""
        return (self.replica.theta[start:stop],)

    def mix(self, letter: Letter, weight: float) -> None:
        """x <- x + weight (x_sender - x), as far as the letter goes."""
        self.replica.mix(letter.vector, weight, letter.note.start)

    def begin(self) -> None:
        """A step begins: nothing has changed x yet."""

    def end(self) -> None:
        """It ends: x has been updated and mixed."""


class Mixed(Momentum):
    """Travels with the weights."""

    vectors = 2

    def parts(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
        return self.replica.theta[start:stop], self.replica.state["velocity"][start:stop]

    def mix(self, letter: Letter, weight: float) -> None:
        start, length = letter.note.start, letter.vector.size // 2
        self.replica.mix(letter.vector[:length], weight, start)
        velocity = self.replica.state["velocity"][start : start + length]
        mix(self.replica.fabric, velocity, letter.vector[length:], weight)


class QuasiGlobal(Momentum):
    """Follows the mixed models."""

    def begin(self) -> None:
        self.x, self.m = self.replica.theta.copy(), self.replica.state["velocity"].copy()

    def end(self) -> None:
        replica, moved = self.replica, self.x
        if replica.last_lr:
            moved -= replica.theta
            moved /= replica.last_lr
            mix(replica.fabric, self.m, moved, 1 - self.mu)
        replica.state["velocity"][:] = self.m


KINDS = {"local": Momentum, "mixed": Mixed, "quasi-global": QuasiGlobal}
SUITABLE = {"mixed": ("sgd", "nesterov", "sgdw", "lars"), "quasi-global": ("sgd", "nesterov", "sgdw")}


def kind(config: Config) -> type[Momentum]:
    """The class for --velocity. Raises ConfigError where the optimizer has no such momentum."""
    suitable = SUITABLE.get(config.velocity, (config.optimizer,))
    if config.optimizer not in suitable:
        raise ConfigError(f"--velocity {config.velocity} is for {', '.join(suitable)}: "
                          f"{config.optimizer} has no such momentum; expected --velocity local")  # fmt: skip
    return KINDS[config.velocity]
