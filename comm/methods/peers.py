"""The choice of a peer in gossip (--peer), among the replicas that still train.

    uniform         any replica
    topology        a neighbour in any round of --topology, because replicas that gossip have no common rounds
    hierarchical    with probability --inside a replica on the same node, else a replica on another node. If there is
                    no such replica, any replica
    speed           any replica, with probability proportional to its images/s

The choice is random. The state of the random generator depends only on (seed, rank, step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minidl.comm.fabric.base import Column, Fabric, State, Trust
from minidl.run.config import Config

if TYPE_CHECKING:
    from minidl.comm.topology import Topology

OPTIONS = {
    "peer": {
        "default": "uniform",
        "choices": {
            "uniform": "any replica",
            "topology": "a neighbour in --topology",
            "hierarchical": "mostly a replica on the same node",
            "speed": "any replica, a fast one more often",
        },
        "help": "with which replica to exchange",
    },
    "inside": {
        "default": 0.9,
        "min": 0,
        "max": 1,
        "needs": {"peer": "hierarchical"},
        "help": "probability of an exchange within the node",
    },
}
Choose = Callable[[np.random.Generator], int | None]  # returns a peer, or None if there is none to choose from


def present(fabric: Fabric) -> np.ndarray:
    """Return the ranks of the other replicas that have not stopped or died, and are not suspected."""
    ranks = np.array(fabric.replicas)
    training = (fabric.status[ranks, Column.STATE] < State.PAUSED) & (fabric.trust[ranks] == Trust.TRUSTED)
    return ranks[training & (ranks != fabric.rank)]


def uniform(ranks: np.ndarray, chance: np.random.Generator) -> int | None:
    return int(ranks[chance.integers(len(ranks))]) if len(ranks) else None


def chooser(fabric: Fabric, config: Config, topology: Callable[[], Topology]) -> Choose:
    """Return the function that chooses a peer, as --peer selects."""
    if config.peer == "topology":
        neighbours = [fabric.replicas[j] for j in topology().neighbours(fabric.replicas.index(fabric.rank))]

        def neighbour(chance: np.random.Generator) -> int | None:
            return uniform(np.intersect1d(neighbours, present(fabric)).astype(int), chance)

        return neighbour

    if config.peer == "hierarchical":
        inside = np.array(fabric.nodes) == fabric.nodes[fabric.rank]

        def near(chance: np.random.Generator) -> int | None:
            ranks, stay = present(fabric), chance.random() < config.inside
            wanted = ranks[inside[ranks] == stay]
            return uniform(wanted if len(wanted) else ranks, chance)

        return near

    if config.peer == "speed":

        def fast(chance: np.random.Generator) -> int | None:
            ranks = present(fabric)
            total = np.cumsum(fabric.status[ranks, Column.SPEED])
            if not len(ranks) or not total[-1] > 0:  # no replica has measured its speed yet
                return uniform(ranks, chance)
            return int(ranks[np.searchsorted(total, chance.random() * total[-1], side="right")])

        return fast

    return lambda chance: uniform(present(fabric), chance)
