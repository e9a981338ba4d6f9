"""Momentum when models are mixed (--velocity). m_i: the velocity of replica i; mu: the option --momentum.

    local          m is neither sent nor mixed
    mixed          m is mixed like the weights: x and m are sent, which doubles the bytes
    quasi-global   m follows the mixed models: only x is sent

Momentum accumulates the recent gradients. If the replicas have different data, local momentum moves each replica
towards the optimum for its own data, even after mixing. Quasi-global momentum (QG-DSGDm; Lin, Karimireddy, Stich,
Jaggi: ICML 2021) accumulates the movement of the mixed model instead. With D-PSGD, step t computes:

    x'           <- x_i^(t) - eta * (mu * m_i^(t-1) + g_i)
    x_i^(t+1)    <- sum_j W_ij * x'_j
    m_i^(t)      <- mu * m_i^(t-1) + (1 - mu) * (x_i^(t) - x_i^(t+1)) / eta
"""

from __future__ import annotations

import numpy as np

from minidl.comm.fabric.base import Message
from minidl.comm.replica import Replica
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "velocity": {
        "default": "local",
        "choices": {
            "local": "it stays local",
            "mixed": "it is sent and mixed like the weights: twice the bytes",
            "quasi-global": "it follows the mixed models (Lin et al., ICML 2021)",
        },
        "help": "the optimizer's momentum when models are mixed",
    },
}


class Momentum:
    """Local momentum, and the base class of the other kinds."""

    vectors = 1  # number of vectors of theta's length in a message

    def __init__(self, replica: Replica, config: Config) -> None:
        self.replica, self.mu = replica, config.momentum

    def parts(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
        """Return the vectors to send for theta[start:stop]."""
        return (self.replica.theta[start:stop],)

    def outgoing(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
        """As `parts`, but a replica on a GPU does not wait: it sends the vectors of the step before."""
        return (self.replica.outgoing()[start:stop],)

    def mix(self, message: Message, weight: float) -> None:
        """x <- x + weight * (x_sender - x), for the range of theta that the message holds."""
        self.replica.mix(message.vector, weight, message.header.start)

    def move(self, received: np.ndarray, sent: np.ndarray, weight: float) -> None:
        """x <- x + weight * (received - sent), for two vectors that hold all `parts`. `sent` is overwritten."""
        self.replica.pull(received, sent, weight, out=sent)
        start = 0
        for part in self.parts():
            self.replica.axpy(1.0, sent[start : start + part.size], part)
            start += part.size

    def begin(self) -> None:
        """Prepare for a step. Called before x changes."""

    def end(self) -> None:
        """Finish a step. Called when x has been updated and mixed."""


class Mixed(Momentum):
    """Momentum that is sent and mixed like the weights."""

    vectors = 2

    def parts(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
        return self.replica.theta[start:stop], self.replica.state["velocity"][start:stop]

    outgoing = parts

    def mix(self, message: Message, weight: float) -> None:
        start, length = message.header.start, message.vector.size // 2
        self.replica.mix(message.vector[:length], weight, start)
        velocity = self.replica.state["velocity"][start : start + length]
        self.replica.mix_into(velocity, message.vector[length:], weight)


class QuasiGlobal(Momentum):
    """Momentum that follows the mixed models. The velocity that the optimizer computes in a step is discarded.

    It needs the exchange of every step.
    """

    def begin(self) -> None:
        replica = self.replica
        self.x, self.m = np.empty_like(replica.theta), np.empty_like(replica.theta)
        replica.copy(replica.theta, self.x)
        replica.copy(replica.state["velocity"], self.m)

    def end(self) -> None:
        replica = self.replica
        if replica.lr:
            replica.mix_movement(self.m, self.x, 1 - self.mu)
        replica.copy(self.m, replica.state["velocity"])


KINDS = {"local": Momentum, "mixed": Mixed, "quasi-global": QuasiGlobal}
SUITABLE = {"mixed": ("sgd", "nesterov", "sgdw", "lars", "muon"), "quasi-global": ("sgd", "nesterov", "sgdw")}


def kind(config: Config) -> type[Momentum]:
    """Return the class for --velocity. Raises ConfigError if the optimizer has no momentum of this kind."""
    if config.velocity == "quasi-global" and config.lookahead:
        raise ConfigError(f"--velocity quasi-global and --lookahead {config.lookahead} exclude each other: a return to "
                          "the slow average would count as movement; give only one of them")  # fmt: skip
    suitable = SUITABLE.get(config.velocity, (config.optimizer,))
    if config.optimizer not in suitable:
        raise ConfigError(f"--velocity {config.velocity} is for {', '.join(suitable)}: "
                          f"{config.optimizer} has no such momentum; expected --velocity local")  # fmt: skip
    return KINDS[config.velocity]
