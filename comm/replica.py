"""A replica: one of several copies of a model that are trained together. Each has its own weights and gradient.

    loss = replica.gradient(batch)     grad is dL/dtheta of this batch
    replica.update()                   one step of the optimizer on theta, at the rate of the schedule
    replica.mix(message.vector, 0.5)   theta <- theta + 0.5 * (message.vector - theta)

Training methods (comm/methods) consist of these operations, of arithmetic on other vectors (vectors.py) and of
communication.

With --parts, groups of cores compute the gradient together (program/partitioned.py). A method does not see the parts.

An engine does the computation. It holds a model, the recorded step (a table of kernel calls) and an optimizer. Normally
a process has one replica, which uses the model's vectors. In a simulation thousands of replicas share one engine, and
each has separate vectors. A switch to another replica only replaces a few addresses in the recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from minidl import ops, optim
from minidl.comm.fabric.base import Column, Fabric
from minidl.comm.launch import cores
from minidl.comm.vectors import VectorArithmetic
from minidl.engine.arena import Arena
from minidl.engine.device import Device, aligned
from minidl.engine.jit import threads
from minidl.errors import ConfigError, DivergedError
from minidl.nn import Module, random_state, set_random_state
from minidl.program.partitioned import PartitionedGradient
from minidl.program.precompile import silent
from minidl.program.replay import Gradient, Loss, Prediction
from minidl.program.workspace import Workspace
from minidl.run.config import Config
from minidl.run.display import count
from minidl.run.evaluation import first_not_finite

Batch = tuple[np.ndarray, np.ndarray]  # x (B, H, W, C), y (B,)
SPEED_PERIOD = 32  # steps between two updates of a replica's speed in the status table


class Engine:
    """A model with its recorded step and its optimizer. loss: the default is the cross-entropy of `config`."""

    def __init__(self, model: Module, config: Config, loss: Loss | None = None) -> None:
        self.model, self.config = model, config
        own = {name: getattr(config, name) for name in optim.OPTIONS[config.optimizer]}
        self.optimizer = optim.build(
            config.optimizer, model, config.lr, config.weight_decay, config.clip or None, **own
        )  # fmt: skip
        if config.lookahead:
            self.optimizer.look_ahead(config.lookahead)
        workspace = Workspace()
        loss = loss or partial(ops.cross_entropy, label_smoothing=config.label_smoothing)
        options: dict[str, Any] = {"workspace": workspace, "also": self.optimizer.kernels()}
        if config.parts == 1:
            self.gradient = Gradient(model, loss, **options)
        else:
            self.gradient = PartitionedGradient(model, loss, *_cores_and_threads(config.parts), **options)
        self.prediction = Prediction(model, config.views, keep_packed=False, workspace=workspace)
        self.arena: Arena = model.flatten()
        self.statistics: Arena | None = model.statistics
        self.bound: Replica | None = None  # the replica whose vectors are in use; None: the model's vectors


def _cores_and_threads(parts: int) -> tuple[list[Sequence[int]], int]:
    """Return the cores of each part of this replica, and the threads of a part. Raises ConfigError if none fit."""
    if threads() % parts:
        raise ConfigError(f"parts {parts}: this replica has {count(threads(), 'thread')}; expected a number of parts "
                          "that divides it, or other --threads")  # fmt: skip
    own = cores.own()
    return [cores.share(own, part, parts) for part in range(parts)], threads() // parts


class Mark(NamedTuple):
    """What a gradient changes, besides `grad` and results: see `Replica.mark`."""

    images: int
    random: dict[str, int]
    statistics: np.ndarray | None


class Replica(VectorArithmetic):
    """A replica's vectors, and the operations on them. If it trains on a GPU, reading a vector copies it to the host.

    theta, grad: flat vectors in the arena's layout. state: the optimizer's vectors. statistics: batch norm's running
    statistics, which are not mixed. images: the number of images trained on so far.

    lr: the learning rate of the next update; a schedule assigns it before each step. own: whether the replica has its
    own vectors, because it shares the engine with other replicas.
    """

    def __init__(self, engine: Engine, fabric: Fabric, own: bool = False) -> None:
        self.engine, self.fabric, self.lr, self.own = engine, fabric, engine.config.lr, own
        if isinstance(engine.gradient, PartitionedGradient):
            engine.gradient.waiting = fabric.beat
        arena, optimizer, statistics = engine.arena, engine.optimizer, engine.statistics
        self.state = optimizer.state
        if own:
            self._theta, self._grad = _copy(arena.theta), arena.new_vector()
            self.state = {name: arena.new_vector() for name in self.state}
            self._statistics = None if statistics is None else _copy(statistics.theta)
        self.random = random_state()
        self.optimizer_steps = 0 if own else optimizer.steps
        self.images = 0
        self.steps = 0
        self.weight = 1.0  # by which gradients are multiplied (--weighting share)
        self.shares: tuple[float, ...] = ()  # of all replicas in the images of a step; (): equal
        self.loss = 0.0  # of the last batch
        self.seconds = 0.0  # that the last gradient took
        self.correct = 0  # correct predictions in the last batch
        self._timed = (0, 0.0)  # images, and seconds spent on their gradients, since the speed was last published
        self._publisher: Any = None  # if this replica is on a GPU, and has sent or mixed without waiting

    @property
    def theta(self) -> np.ndarray:
        return self._theta if self.own else self.engine.arena.theta

    @property
    def grad(self) -> np.ndarray:
        return self._grad if self.own else self.engine.arena.grad

    @property
    def statistics(self) -> np.ndarray | None:
        if self.own:
            return self._statistics
        return None if self.engine.statistics is None else self.engine.statistics.theta

    def gradient(self, batch: Batch) -> float:
        """Set grad = weight * dL/dtheta for the batch; return the loss. Raises DivergedError if it is not finite."""
        for _ in self.gradient_parts(batch, ()):
            pass
        return self.loss

    def gradient_parts(self, batch: Batch, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Compute the gradient in parts: yield (start, stop) as soon as grad[start:stop] is final.

        cuts: the boundaries of the parts. The backward pass goes from the last layer to the first, so parts are yielded
        in descending order. At the end, `self.loss` is the loss. Raises DivergedError if the loss is not finite.
        """
        fabric, images, before, seconds = self.fabric, len(batch[1]), 0.0, 0.0
        entered = fabric.now()
        fabric.load(batch[0].nbytes)
        began = fabric.now()
        loading = began - entered
        parts = self.bound_engine().gradient.parts(*batch, cuts) if images else self._no_images(cuts)
        if self.own:  # compute all parts now, because other replicas use the engine during the yields below
            parts = iter(list(parts))
            self._count(batch)
        for start, stop, done in chain(parts, [(0, 0, 1.0)]):
            fabric.elapse("gradient", images * (done - before))
            now = fabric.now()
            fabric.stats.worked("gradient", began, now)
            seconds += now - began
            if stop:
                self._weigh(start, stop)
                yield start, stop
            before, began = done, fabric.now()
        if not cuts:
            self._weigh(0, self.engine.arena.size)
        if not self.own:
            self._count(batch)
        self._publish_speed(images, seconds)
        self.seconds = loading + seconds

    def _weigh(self, start: int, stop: int) -> None:
        if self.weight != 1.0:
            self.scale(self.grad[start:stop], self.weight)

    def _no_images(self, cuts: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Do as `Gradient.parts` for a batch without images: its gradient is 0."""
        self.grad[:] = 0.0
        self.engine.gradient.result = 0.0, 0
        yield from ((start, stop, 1.0) for start, stop in list(pairwise(cuts))[::-1])

    def update(self, theta: np.ndarray | None = None) -> None:
        """Make one step of the optimizer at the learning rate `lr`. With --clip, clip the gradient first.

        theta: a vector that is updated instead of the replica's weights, for example one that replicas share.
        """
        with self.fabric.working("update", self.engine.arena.size):
            optimizer = self.bound_engine().optimizer
            optimizer.lr = self.lr
            with optimizer.on(theta):
                optimizer.step()
            self.optimizer_steps = optimizer.steps
        if self._publisher is not None and (publisher := self.publisher()) is not None:
            publisher.begin()
        self.steps += 1

    def apply(self, gradient: np.ndarray) -> None:
        """Make one more step of the optimizer, with a gradient (n,) of another replica. `steps` does not count it."""
        self.scale(gradient, 1.0, out=self.grad)
        self.update()
        self.steps -= 1

    def mark(self) -> Mark:
        """Return what `undo` needs to make a gradient undone."""
        random = self.random if self.own else random_state()
        return Mark(self.images, random, None if self.statistics is None else self.statistics.copy())

    def undo(self, mark: Mark) -> None:
        """Continue as before the gradient that was computed after this mark; the weights must not have changed."""
        self.images, self.random = mark.images, mark.random
        if not self.own or self.engine.bound is self:
            set_random_state(mark.random)
        if self.statistics is not None and mark.statistics is not None:
            self.statistics[:] = mark.statistics
            if self.engine.statistics is not None:
                self.engine.statistics.touch()

    def stepped_elsewhere(self) -> None:
        """Count a step of the optimizer that another replica made: its vectors have been copied to this replica."""
        self.steps, self.optimizer_steps = self.steps + 1, self.optimizer_steps + 1
        if not self.own or self.engine.bound is self:
            self.engine.optimizer.steps = self.optimizer_steps
        self.touch()

    def mix(self, other: np.ndarray, weight: float, start: int = 0) -> None:
        """theta[start:stop] <- theta + weight * (other - theta), where stop = start + the length of `other`."""
        if (publisher := self.publisher()) is not None:
            with self.fabric.working("mix", other.size):
                publisher.mix(other, weight, start)
            self.touch()
            return
        self.mix_into(self.theta[start : start + other.size], other, weight)

    def outgoing(self) -> np.ndarray:
        """Return theta to send. On a GPU, that of the step before: no step waits for its copy (cuda_publish.py)."""
        publisher = self.publisher()
        return self.theta if publisher is None else publisher.outgoing()

    def publisher(self) -> Any:
        """Return what exchanges the weights with a GPU, or None if this replica is on the CPU."""
        if self.own or self.engine.arena.gpu is None:
            return None
        if self._publisher is None or self._publisher.gpu is not self.engine.arena.gpu:
            from minidl.engine.cuda_publish import Publisher

            self._publisher = Publisher(self.engine.arena)
        return self._publisher

    def compile_arithmetic(self) -> None:
        """Compile the kernels of all operations, also of those on a GPU."""
        super().compile_arithmetic()
        if (publisher := self.publisher()) is not None:
            from minidl.program.cuda_launches import compile_all

            compile_all(self.engine.arena.gpu, publisher.kernels(), silent)

    def mix_movement(self, velocity: np.ndarray, before: np.ndarray, weight: float) -> None:
        """velocity <- velocity + weight * (m - velocity), where m = (before - theta) / lr. `before` is overwritten."""
        with self.fabric.working("mix"):  # in a simulation, the time of `mix_into` is that of the whole operation
            Device("cpu").elementwise.subtract(before, self.theta, before)
            before /= self.lr  # no kernel divides by a number, and a product with 1 / lr has other bits
        self.mix_into(velocity, before, weight)

    def touch(self) -> None:
        """Increase the arena's version. Call this after theta was written to, except by operations of the replica."""
        self.engine.arena.touch()

    def _changed(self, vector: np.ndarray) -> None:
        if np.may_share_memory(vector, self.theta):
            self.touch()

    def layers(self) -> list[tuple[int, int]]:
        """Return the range (start, stop) of each layer in theta, in order, without gaps."""
        slots = self.engine.arena.slots
        starts = [next(group).start for _, group in groupby(slots, lambda slot: slot.name.rpartition(".")[0])]
        return list(pairwise([*starts, self.theta.size]))

    def bound_engine(self) -> Engine:
        """Return the engine, bound to this replica's vectors: its gradient and its optimizer use them."""
        engine = self.engine
        if self.own and engine.bound is not self:
            engine.bound = self
            engine.optimizer.bind(theta=self.theta, grad=self.grad, **self.state)
            engine.optimizer.steps = self.optimizer_steps
            engine.gradient.bind(theta=self.theta, grad=self.grad, statistics=self.statistics)
            set_random_state(self.random)
        return engine

    def _count(self, batch: Batch) -> None:
        """Record the result of a gradient. Raises DivergedError if the loss is not finite."""
        self.loss, self.correct = self.engine.gradient.result
        if self.own:
            self.random = random_state()
        if not math.isfinite(self.loss):
            self.show()
            raise DivergedError(f"the loss is {self.loss}, {first_not_finite(self.engine.model, batch[0])}")
        self.images += len(batch[1])

    def _publish_speed(self, images: int, seconds: float) -> None:
        """Every SPEED_PERIOD steps, write the gradient's speed in images/s to the status table, for --peer speed."""
        self._timed = self._timed[0] + images, self._timed[1] + seconds
        if self.steps % SPEED_PERIOD == 1 and self._timed[1] > 0:
            self.fabric.set_status(Column.SPEED, self._timed[0] / self._timed[1])
            self._timed = (0, 0.0)

    def show(self) -> None:
        """Copy this replica's weights and statistics to the engine's model, for example for an evaluation.

        Without `own`, the model has them anyway.
        """
        if self.own:
            self.engine.arena.theta[:] = self.theta
            self.engine.arena.touch()
            if self.engine.statistics is not None and self.statistics is not None:
                self.engine.statistics.theta[:] = self.statistics
                self.engine.statistics.touch()

    def take_model(self) -> None:
        """Copy the weights and statistics of the engine's model to this replica: the opposite of `show`."""
        if self.own:
            self.theta[:] = self.engine.arena.theta
            if self.engine.statistics is not None and self.statistics is not None:
                self.statistics[:] = self.engine.statistics.theta


def _copy(vector: np.ndarray) -> np.ndarray:
    copy = aligned(vector.size, vector.dtype)
    copy[:] = vector
    return copy
