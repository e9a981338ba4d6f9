"""The base class of training methods. A method defines what replicas exchange, and when.

Each file in this folder holds one family of methods, in the order of its paper. A method makes one training step of one
replica. It uses only `self.replica` (gradient, update, theta, mix) and `self.fabric`, and does not depend on the kind
of fabric, or on whether time is real.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from minidl.comm.fabric.base import Column, Fabric, Letter, Needs
from minidl.comm.replica import Batch, Replica
from minidl.run.config import Config

if TYPE_CHECKING:
    from minidl.comm.topology import Topology


class Roles(NamedTuple):
    """The ranks that train, and the ranks that serve them."""

    replicas: tuple[int, ...]
    servers: tuple[int, ...] = ()


class Method(ABC):
    """A training method.

    synchronous: all replicas make the same number of steps and wait for each other; if one dies, the run stops.
    servers: number of ranks that serve instead of training.
    """

    synchronous: ClassVar[bool] = True
    servers: ClassVar[int] = 0

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        self.replica, self.fabric, self.config = replica, fabric, config

    @classmethod
    def roles(cls, ranks: int) -> Roles:
        """Divide the ranks of a job: the last ones serve. Raises ConfigError if there are too few."""
        return Roles(tuple(range(ranks - cls.servers)), tuple(range(ranks - cls.servers, ranks)))

    @classmethod
    def needs(cls, size: int, config: Config) -> Needs:
        """Return the memory for messages that models of `size` parameters need.

        Raises ConfigError for options that contradict each other.
        """
        return Needs()

    @abstractmethod
    def step(self, batch: Batch) -> float:
        """Make one training step; return the loss of the batch."""

    def serve(self) -> None:
        """Run a server until the replicas have finished."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called when all replicas stop, for a checkpoint or at the end: leave no message in flight."""

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return (vectors, numbers) that the next step depends on, in addition to the replica's own."""
        return {}, {}

    def restore(self, vectors: dict[str, np.ndarray], numbers: dict[str, Any]) -> None:
        """Continue from what `state` returned."""

    def stale(self, letter: Letter) -> None:
        """Count a message in the statistics by its age: the steps that the sender has made since it sent it."""
        made = self.fabric.board[letter.sender, Column.STEP] - 1  # the table holds the sender's current step
        self.fabric.meter.stale(max(0.0, made - letter.note.round))

    def topology(self) -> Topology:
        """Return the topology that --topology selects, over the replicas."""
        replicas = self.fabric.replicas
        return _topology(self.config.topology, len(replicas), self.config.seed,
                         tuple([self.fabric.nodes[rank] for rank in replicas]))  # fmt: skip


@cache
def _topology(name: str, replicas: int, seed: int, nodes: tuple[int, ...]) -> Topology:
    """Cached, because `build` checks every round, and in a simulation thousands of replicas need the same topology."""
    from minidl.comm.topology import build

    return build(name, replicas, seed, nodes)


__all__ = ["Batch", "Callable", "Fabric", "Letter", "Method", "Needs", "Replica", "Roles", "Sequence"]
