"""Helpers to run one function per rank in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from minidl.comm.cluster import Cluster, uniform
from minidl.comm.fabric.base import BufferSpec, Channel, Fabric, Header
from minidl.comm.transport.sim import Simulation

NEEDS = BufferSpec(nbytes=4000, mail=2, publish=True, call=True)
LINKS = dict(alpha=1e-3, beta=1e-6)
Work = Callable[[Fabric], Any]
CORES = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", count = 8, devices = ["core"]}]
between = {alpha = 0.3, beta = 1e-3}
"""


def simulate(
    work: Work | dict[int, Work], ranks: int = 2, cluster: Cluster | None = None, **options: Any
) -> Simulation:
    """Join every rank, then run its `work`; return the finished simulation, with `results` {rank: value}.

    A rank that joins late has not entered when its work begins.
    """
    simulation = Simulation(cluster or uniform(ranks, **LINKS), ranks, **options)

    def main(rank: int) -> Any:
        fabric = Fabric(simulation.transport(rank))
        if not fabric.newcomer:
            fabric.join(NEEDS, "layout")
        return (work if callable(work) else work[rank])(fabric)

    simulation.results = simulation.run({rank: partial(main, rank) for rank in range(ranks)})
    return simulation


def message(fabric: Fabric, peer: int) -> np.ndarray:
    with fabric.wait(lambda: fabric.take(Channel.MAIL, peer), (peer,), "a message") as message:
        return message.vector.copy()


def ones(size: int = 250) -> np.ndarray:
    return np.ones(size, np.float32)  # 1000 bytes


def after(fabric: Fabric, seconds: float) -> None:
    fabric.transport._sleep(seconds)


def push_sum(fabric: Fabric, steps: int = 30, ranks: int = 8) -> float:
    """In each step, send half of this rank's mass to a random rank. Return the mass of this rank at the end."""
    mass, chance = 1.0, np.random.default_rng(fabric.rank)
    for step in range(steps):
        fabric.begin_step(step, synchronous=False)
        fabric.elapse("gradient", 1)
        mass += sum(message.header.weight for message in fabric.poll())
        if fabric.send(int(chance.integers(ranks)), ones(4), header=Header(weight=mass / 2)):
            mass /= 2
    taken: list[float] = []
    fabric.drain(lambda message: taken.append(message.header.weight))
    return mass + sum(taken)
