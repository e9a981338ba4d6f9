"""Replicas of a small network on a simulated cluster, for tests of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from minidl import models, nn
from minidl.comm.cluster import Cluster, uniform
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods import method
from minidl.comm.methods.base import Method
from minidl.comm.replica import Batch, Engine, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.sim import Simulation
from minidl.run.config import Config, complete, no_effect, resolve

SHAPE, CLASSES = (4, 4, 1), 3
LINK = {"alpha": 1e-5, "beta": 1e-9}
Hook = Callable[[Method, int], None]
PLAIN: dict[str, Any] = dict(momentum=0.0, weight_decay=0.0, lr=0.1)


def config_of(name: str, **options: Any) -> Config:
    """Return the config of a method, without those `options` that have no effect."""
    given = {"method": name, "batch_size": 8, "schedule": "constant", **options}
    idle = {option for option in given if no_effect(option, complete(given))}
    return resolve({option: value for option, value in given.items() if option not in idle})


@cache
def engine_of(optimizer: str, momentum: float, weight_decay: float, lr: float) -> Engine:
    """Return the engine that all replicas of a test share: an MLP with three layers."""
    nn.seed(3)
    model = models.mlp(SHAPE, CLASSES, hidden=(9, 7))
    return Engine(model, config_of("local", optimizer=optimizer, momentum=momentum, weight_decay=weight_decay, lr=lr))


def batch_of(rank: int, step: int, size: int = 8) -> Batch:
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((size, *SHAPE)).astype(np.float32), rng.integers(CLASSES, size=size)


def easy_batch(rank: int, step: int, size: int = 8) -> Batch:
    """Return a batch that can be learned: an image is the prototype of its class plus noise."""
    x, y = batch_of(rank, step, size)
    prototypes = np.random.default_rng(0).standard_normal((CLASSES, *SHAPE))
    return (prototypes[y] + 0.5 * x).astype(np.float32), y


@dataclass
class Group:
    """The methods and fabrics of all ranks at the end of a run, dead ranks included."""

    methods: dict[int, Method] = field(default_factory=dict)
    fabrics: dict[int, Fabric] = field(default_factory=dict)
    seconds: float = 0.0

    def theta(self, ranks: Sequence[int] | None = None) -> np.ndarray:
        """Return the n parameters of each of P ranks (default: all ranks), (P, n) float64."""
        return np.array([self.methods[r].replica.theta for r in ranks or sorted(self.methods)], np.float64)


def spread(theta: np.ndarray) -> float:
    """Return the root mean square difference between theta (P, n) and the mean of its rows, over all elements."""
    return float(np.sqrt(((theta - theta.mean(axis=0)) ** 2).mean()))


def run(
    name: str,
    ranks: int,
    steps: int | Sequence[int],
    *,
    lr: float | None = None,
    cluster: Cluster | int = 1,
    start: Group | str = "equal",
    batch: Callable[[int, int], Batch] = batch_of,
    around: tuple[Hook, Hook] = (lambda method, step: None, lambda method, step: None),
    **options: Any,
) -> Group:
    """Train a group of replicas on a simulated cluster.

    steps: one number for all replicas, or one number per replica. lr: replaces the config's learning rate.
    cluster: a cluster, or the replicas per node. start: "equal" or "scattered" weights, or a group to resume from.
    batch(rank, step) returns a batch. around: two functions that each replica calls before and after each step.
    """
    config = config_of(name, **{**PLAIN, **options})
    engine = engine_of(config.optimizer, config.momentum, config.weight_decay, config.lr)
    kind, group = method(name), Group()
    replicas = kind.roles(ranks, config).replicas
    saved = start if isinstance(start, Group) else None
    per_node = ranks if kind.buffers(1, config).shared else cluster
    place = uniform(ranks, per_node, **LINK) if isinstance(per_node, int) else cluster
    simulation = Simulation(place, ranks, config.seed, flops=1e4)
    counts = [steps] * ranks if isinstance(steps, int) else steps

    def work(rank: int) -> None:
        fabric = Fabric(simulation.transport(rank), replicas)
        replica = Replica(engine, fabric, own=True)
        replica.lr = config.lr if lr is None else lr
        if start == "scattered":
            replica.theta[:] = np.random.default_rng(rank).standard_normal(replica.theta.size)
        if saved:
            _restore(replica, saved.methods[rank if rank in replicas else 0].replica)
        fabric.join(kind.buffers(replica.theta.size, config), engine.arena.layout_hash)
        acting = kind(replica, fabric, config)
        group.methods[rank], group.fabrics[rank] = acting, fabric
        if rank not in replicas:
            acting.serve()
            return
        if saved:
            before = saved.methods[rank]
            acting.restore(before.vectors(), before.numbers())
        fabric.set_status(Column.STATE, State.TRAINING)
        for step in range(replica.steps, counts[rank]):
            fabric.begin_step(step, kind.synchronous)
            around[0](acting, step)
            acting.step(batch(rank, step))
            around[1](acting, step)
        fabric.set_status(Column.STATE, State.PAUSED)
        acting.pause()

    simulation.run({rank: lambda rank=rank: work(rank) for rank in range(ranks)})
    group.seconds = simulation.time
    return group


def _restore(replica: Replica, saved: Replica) -> None:
    replica.theta[:] = saved.theta
    for name, vector in saved.state.items():
        replica.state[name][:] = vector
    replica.steps, replica.images, replica.optimizer_steps = saved.steps, saved.images, saved.optimizer_steps


def alone(steps: int, batch: Callable[[int], Batch] = lambda step: batch_of(0, step), **options: Any) -> Replica:
    """Train one replica without communication and return it."""
    config = config_of("local", **{**PLAIN, **options})
    engine = engine_of(config.optimizer, config.momentum, config.weight_decay, config.lr)
    replica = Replica(engine, Fabric(LoopbackTransport()), own=True)
    for step in range(steps):
        replica.gradient(batch(step))
        replica.update()
    return replica
