"""A method: what replicas say to each other, and when. One file holds one family, in the order of its paper.

A method makes one training step of one replica. It touches `self.replica` (gradient, update, theta, mix) and
`self.fabric`, and never asks on what kind of fabric, or whether time is real.
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
    """Which ranks train, and which serve them."""

    replicas: tuple[int, ...]
    servers: tuple[int, ...] = ()


class Method(ABC):
    """synchronous: all replicas make equally many steps, and wait for each other; if one dies, the run stops."""

    synchronous: ClassVar[bool] = True
    servers: ClassVar[int] = 0

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        self.replica, self.fabric, self.config = replica, fabric, config

    @classmethod
    def roles(cls, ranks: int) -> Roles:
        """Of the ranks of a job: the last ones serve."""
        return Roles(tuple(range(ranks - cls.servers)), tuple(range(ranks - cls.servers, ranks)))

    @classmethod
    def needs(cls, size: int, config: Config) -> Needs:
        """The memory for messages, for models of `size` parameters. Raises ConfigError for options that do not fit."""
        return Needs()

    @abstractmethod
    def step(self, batch: Batch) -> float:
        """One training step; returns the batch's loss."""

    def serve(self) -> None:
        """What a server does until the replicas have finished."""
        raise NotImplementedError

    def pause(self) -> None:
        """All replicas stop here, for a checkpoint or at the end: see to it that nothing is on its way."""

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """(vectors, numbers) that the next step depends on, besides the replica's."""
        return {}, {}

    def restore(self, vectors: dict[str, np.ndarray], numbers: dict[str, Any]) -> None:
        """Go on from what `state` said."""

    def stale(self, letter: Letter) -> None:
        """Note in the books how many steps the sender has made since it sent what is mixed in now."""
        made = self.fabric.board[letter.sender, Column.STEP] - 1  # the board has the step that it is in
        self.fabric.meter.stale(max(0.0, made - letter.note.round))

    def topology(self) -> Topology:
        """The one of --topology, over the replicas."""
        replicas = self.fabric.replicas
        return _topology(self.config.topology, len(replicas), self.config.seed,
                         tuple([self.fabric.nodes[rank] for rank in replicas]))  # fmt: skip


@cache
def _topology(name: str, replicas: int, seed: int, nodes: tuple[int, ...]) -> Topology:
    """One for all: building checks every round, and in a simulation thousands ask for the same."""
    from minidl.comm.topology import build

    return build(name, replicas, seed, nodes)


__all__ = ["Batch", "Callable", "Fabric", "Letter", "Method", "Needs", "Replica", "Roles", "Sequence"]
