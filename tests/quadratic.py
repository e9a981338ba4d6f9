"""Quadratics in float64, trained by elastic averaging in a simulation, for comparisons with equations step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy_replicas import LINK, config_of

from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import Column, Fabric, Message, State
from minidl.comm.methods import method
from minidl.comm.transport.sim import Simulation
from minidl.comm.vectors import VectorArithmetic

SIZE, STEPS = 7, 8
CURVATURE = np.linspace(0.2, 1.5, SIZE)
START = np.linspace(-1.0, 2.0, SIZE)  # the initial weights of all replicas


def gradient(x: np.ndarray, step: int, replica: int) -> np.ndarray:
    """Return the gradient at x (n,) of 1/2 sum h (x - a)^2. Each replica has another minimum a in each step."""
    return CURVATURE * (x - np.sin(np.arange(SIZE) + 2.0 * replica + step))


class Quadratic(VectorArithmetic):
    """What a method uses of a replica, with float64 vectors and SGD with momentum, as in optim/rules.py.

    seconds: virtual time of the last gradient.
    """

    def __init__(self, fabric: Fabric, lr: float, momentum: float) -> None:
        self.fabric, self.lr, self.momentum = fabric, lr, momentum
        self.theta, self.grad, self.state = START.copy(), np.zeros(SIZE), {"velocity": np.zeros(SIZE)}
        self.steps = self.optimizer_steps = 0

    def gradient(self, batch: object) -> float:
        began = self.fabric.now()
        self.grad[:] = gradient(self.theta, self.steps, self.fabric.rank)
        self.fabric.elapse("gradient", 8)
        self.seconds = self.fabric.now() - began
        return 0.0

    def update(self, theta: np.ndarray | None = None) -> None:
        velocity, theta = self.state["velocity"], self.theta if theta is None else theta
        velocity[:] = self.momentum * velocity + self.grad
        theta -= self.lr * velocity
        self.fabric.elapse("update", SIZE)
        self.steps += 1
        self.optimizer_steps += 1

    def layers(self) -> list[tuple[int, int]]:
        return [(0, 3), (3, 5), (5, SIZE)]

    def apply(self, gradient: np.ndarray) -> None:
        self.grad[:] = gradient
        self.update()
        self.steps -= 1

    def outgoing(self) -> np.ndarray:
        return self.theta

    def touch(self) -> None:
        """There are no other forms of the weights."""


class Run:
    """A run of a method for STEPS steps.

    x: the weights after each step, (STEPS, P, n). c: the center after each of its changes, (changes, n).
    visits: the replicas that visited the center, in order. seconds: virtual time. methods: of all ranks.
    """

    def __init__(self, name: str, ranks: int, **options: Any) -> None:
        self.config = config_of(name, **{"weight_decay": 0.0, **options})
        self.kind: Any = method(name)
        self.replicas = self.kind.roles(ranks, self.config).replicas
        self.x = np.zeros((STEPS, len(self.replicas), SIZE))
        self.centers: list[np.ndarray] = []
        self.visits: list[int] = []
        self.methods: dict[int, Any] = {}
        on_one_node = bool(self.kind.buffers(1, self.config).shared)
        self.simulation = Simulation(uniform(ranks, ranks if on_one_node else 1, **LINK), ranks, 0, flops=1e4)
        self.simulation.run({rank: lambda rank=rank: self.work(rank) for rank in range(ranks)})
        self.seconds, self.c = self.simulation.time, np.array(self.centers)

    def work(self, rank: int) -> None:
        fabric = Fabric(self.simulation.transport(rank), self.replicas)
        fabric.join(self.kind.buffers(2 * SIZE, self.config), "quadratic")  # the sizes are for float32
        replica: Any = Quadratic(fabric, self.config.lr, self.config.momentum)
        acting = self.methods[rank] = self.watched()(replica, fabric, self.config)
        if rank not in self.replicas:
            acting.serve()
            return
        fabric.set_status(Column.STATE, State.TRAINING)
        for step in range(STEPS):
            fabric.begin_step(step, self.kind.synchronous)
            acting.step(None)
            self.x[step, rank] = replica.theta
        fabric.set_status(Column.STATE, State.PAUSED)
        acting.pause()

    def watched(self) -> Any:
        """Return the method's class, which notes visits and changes of the center."""
        run = self

        class Watched(self.kind):  # type: ignore[misc, name-defined]
            def start_visit(self) -> Any:
                if self.is_center:
                    run.visits.append(self.fabric.rank)
                return super().start_visit()

            def answer(self, message: Message) -> Any:
                run.visits.append(message.sender)
                return super().answer(message)

            def update_center(self, *change: Any) -> None:
                super().update_center(*change)
                if change or self.fabric.rank == 0:  # in sync-easgd, all ranks update a copy
                    run.centers.append(self.center.copy())

        return Watched
