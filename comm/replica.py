"""A replica: one of several models that are trained as one. Its weights, its gradient, its data's share.

    loss = replica.gradient(batch)     grad is dL/dtheta of this batch
    replica.update()                   theta moves, as the optimizer and the schedule say
    replica.mix(letter.vector, 0.5)    theta <- theta + 0.5 (other - theta)

Methods of training (comm/methods) are written in these words.

An engine is what computes: a model, its recorded step, its optimizer. In a process of its own a replica's vectors are
the model's. In a simulation thousands of replicas, each with vectors of its own, take turns on one engine: a program is
given its memory at each run, so changing over is the writing of a few addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, pairwise

import numpy as np

from minidl import ops, optim
from minidl.comm.fabric.base import Column, Fabric
from minidl.engine.arena import Arena
from minidl.engine.device import Device, aligned
from minidl.engine.tensor import Tensor
from minidl.errors import DivergedError
from minidl.nn import Module, random_state, set_random_state
from minidl.program.replay import Gradient, Prediction, Workspace
from minidl.run.config import Config
from minidl.run.evaluation import first_not_finite

Batch = tuple[np.ndarray, np.ndarray]  # x (B, H, W, C), y (B,)
TELL = 32  # steps after which a replica says how fast it is


class Engine:
    """A model with its recorded step and its optimizer."""

    def __init__(self, model: Module, config: Config) -> None:
        self.model, self.config = model, config
        self.optimizer = optim.build(
            config.optimizer, model, config.lr, config.momentum, config.weight_decay, config.clip or None
        )
        workspace = Workspace()
        self.gradient = Gradient(model, self.loss, workspace=workspace, also=self.optimizer.kernels())
        self.prediction = Prediction(model, workspace=workspace)
        self.arena: Arena = model.flatten()
        self.statistics: Arena | None = model.statistics
        self.acting: Replica | None = None

    def loss(self, logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, y, self.config.label_smoothing)


class Replica:
    """theta, grad: flat vectors in the arena's layout. state: the optimizer's vectors. statistics: batch norm's, not
    mixed. images: trained on so far.

    lr: called before each update. own: with vectors of its own, for one of many replicas on one engine.
    """

    def __init__(self, engine: Engine, fabric: Fabric, lr: Callable[[], float], own: bool = False) -> None:
        self.engine, self.fabric, self.lr, self.own = engine, fabric, lr, own
        arena, optimizer, statistics = engine.arena, engine.optimizer, engine.statistics
        self.theta, self.grad, self.state = arena.theta, arena.grad, optimizer.state
        self.statistics = None if statistics is None else statistics.theta
        if own:
            self.theta, self.grad = _copy(self.theta), arena.new_vector()
            self.state = {name: arena.new_vector() for name in self.state}
            self.statistics = None if self.statistics is None else _copy(self.statistics)
        self.random = random_state()
        self.optimizer_steps = 0 if own else optimizer.steps
        self.images = 0
        self.steps = 0
        self.loss = 0.0  # of the last batch
        self.correct = 0  # answers that were right in it
        self.last_lr = 0.0
        self._timed = (0, 0.0)  # images, and seconds of computing their gradients, since speed was told last

    def gradient(self, batch: Batch) -> float:
        """grad = dL/dtheta for the batch; returns the loss. Raises DivergedError where that is not finite."""
        for _ in self.gradient_parts(batch, ()):
            pass
        return self.loss

    def gradient_parts(self, batch: Batch, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The same, yielding (start, stop) as soon as grad[start:stop] is final. cuts: where parts begin and end.

        The backward pass goes from the last layer to the first, so the last part comes first. `self.loss` is the loss
        once all have come.
        """
        fabric, images, before, seconds = self.fabric, len(batch[1]), 0.0, 0.0
        began = fabric.now()
        parts = self._act().gradient.parts(*batch, cuts)
        if self.own:  # others want the engine: all at once; only the clock takes it part by part
            parts = iter(list(parts))
            self._count(batch)
        for start, stop, done in chain(parts, [(0, 0, 1.0)]):
            fabric.elapse("gradient", images * (done - before))
            now = fabric.now()
            fabric.meter.worked("gradient", began, now)
            seconds += now - began
            if stop:
                yield start, stop
            before, began = done, fabric.now()
        if not self.own:
            self._count(batch)
        self._tell_speed(images, seconds)

    def update(self) -> None:
        """One step of the optimizer, at the rate of the schedule."""
        with self.fabric.working("update", self.theta.size):
            optimizer = self._act().optimizer
            self.last_lr = optimizer.lr = self.lr()
            optimizer.step()  # clips, too
            self.optimizer_steps = optimizer.steps
        self.steps += 1

    def mix(self, other: np.ndarray, weight: float, start: int = 0) -> None:
        """theta[start:] <- theta + weight (other - theta), as far as `other` goes."""
        mix(self.fabric, self.theta[start : start + other.size], other, weight)
        self.touch()

    def touch(self) -> None:
        """Say that theta was written to."""
        self.engine.arena.touch()

    def layers(self) -> list[tuple[int, int]]:
        """Where the layers lie in theta: (start, stop), one behind the other, without gaps between them."""
        slots = self.engine.arena.slots
        starts = [next(group).start for _, group in groupby(slots, lambda slot: slot.name.rpartition(".")[0])]
        return list(pairwise([*starts, self.theta.size]))

    def _act(self) -> Engine:
        """The engine, with this replica's memory."""
        engine = self.engine
        if self.own and engine.acting is not self:
            engine.acting = self
            engine.optimizer.lie_in(self.theta, self.grad, self.state)
            engine.optimizer.steps = self.optimizer_steps
            engine.gradient.lie_in(theta=self.theta, grad=self.grad, statistics=self.statistics)
            set_random_state(self.random)
        return engine

    def _count(self, batch: Batch) -> None:
        """Take down what a gradient brought."""
        self.loss, self.correct = self.engine.gradient.result
        if self.own:
            self.random = random_state()
        if not math.isfinite(self.loss):
            self.show()
            raise DivergedError(f"the loss is {self.loss}, {first_not_finite(self.engine.model, batch[0])}")
        self.images += len(batch[1])

    def _tell_speed(self, images: int, seconds: float) -> None:
        """images/s on the board, now and then: gossip may prefer the fast, a balance gives them more."""
        self._timed = self._timed[0] + images, self._timed[1] + seconds
        if self.steps % TELL == 1 and self._timed[1] > 0:
            self.fabric.announce(Column.SPEED, self._timed[0] / self._timed[1])
            self._timed = (0, 0.0)

    def show(self) -> None:
        """Let the engine's model be this replica: to evaluate it, say."""
        if self.own:
            self.engine.arena.theta[:] = self.theta
            if self.engine.statistics is not None and self.statistics is not None:
                self.engine.statistics.theta[:] = self.statistics
                self.engine.statistics.touch()
        self.engine.arena.touch()


def mix(fabric: Fabric, theta: np.ndarray, other: np.ndarray, weight: float) -> None:
    """theta <- theta + weight (other - theta)"""
    with fabric.working("mix", theta.size):
        Device("cpu").mix.mix(theta, other, float(weight))


def _copy(vector: np.ndarray) -> np.ndarray:
    copy = aligned(vector.size, vector.dtype)
    copy[:] = vector
    return copy
