"""`join`: a training loop of one's own, in which several replicas train one model together.

    with minidl.join(model, method="gossip", lr=0.05) as replica:
        for epoch in range(10):
            mine = replica.shard(len(x), epoch)
            for batch in np.array_split(mine, 30):
                loss = replica.step(x[batch], y[batch])
    # here every rank's model has the average of all
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from minidl import models
from minidl.checked import shown, whole
from minidl.comm.fabric.base import Column, Fabric, PeerLost, State
from minidl.comm.methods.base import Method
from minidl.comm.replica import Batch, Engine, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.data.sampler import replica_seed
from minidl.data.shard import shard
from minidl.errors import ConfigError, DivergedError
from minidl.nn import Module, set_random_state
from minidl.program.replay import Loss
from minidl.run.config import resolve
from minidl.run.display import Display
from minidl.training.keywords import checked, of_training, with_options
from minidl.training.session import chosen
from minidl.training.startup import begin_together
from minidl.training.vectors import hand_out
from minidl.training.world import World, world

OTHERS = ("model", "model_hash", "init", "data", "data_dir", "layout", "validation", "augment", "epochs", "steps",
          "batch_size", "schedule", "warmup", "workers", "devices", "shards", "keep", "threads", "parts", "conv",
          "balance", "shares", "weighting")  # fmt: skip
OPTIONS = of_training(*OTHERS)


@with_options(OPTIONS)
def join(model: Module, *, loss: Loss | None = None, **given: Any) -> JoinedReplica:
    """Make the model a replica of this rank, which trains together with the replicas of all other ranks.

    All ranks of a script (see `minidl.launch`) call this, with the same model and options. The replicas begin with the
    weights of rank 0. A script that is started without a launcher has a single replica.

    loss: a function of (logits, y) that returns a tensor with one element. The default is the cross-entropy.

    Use the result in a `with` block, or call its `finish` at the end. Raises ConfigError for invalid options, or if the
    ranks differ in the model, the options or the version of minidl, or if the replica of an earlier `join` has not
    finished.
    """
    here = world()
    models.check("join", model)
    values = checked("join", given, OPTIONS)
    if loss is not None and not callable(loss):
        raise ConfigError(f"join: loss is {shown(loss)}; expected a function of (logits, y), or None")
    if loss is not None and "label_smoothing" in given:
        raise ConfigError("join: label_smoothing has no effect on a loss of your own: leave it out")
    config = resolve({}, values | ({"workers": here.size} if here.size > 1 else {}))
    kind, replicas = chosen(config, here.size)
    if here.size > 1 and len(replicas) < here.size:
        raise ConfigError(f"join: the method {config.method} needs a server, which makes no steps: use minidl.fit, or "
                          "another method")  # fmt: skip
    if here.job is None:
        return JoinedReplica(here, Fabric(LoopbackTransport()), kind, Engine(model, config, loss))
    here.require_finished("join")
    with here.abandoning():
        here.enter("join", model, config, {"loss": getattr(loss, "__name__", loss)})
        replica = JoinedReplica(here, here.fabric, kind, Engine(model, config, loss))
    here.joined = replica
    return replica


class JoinedReplica:
    """The replica of this rank in a loop of one's own, made by `join`.

    rank: the number of this replica, from 0. size: the number of replicas when they joined. steps: of this replica.
    lr: the learning rate of the next step; a loop may assign it before each step. images: trained on by this replica.
    """

    def __init__(self, here: World, fabric: Fabric, kind: type[Method], engine: Engine) -> None:
        self.model, self.config, self.rank, self.size = engine.model, engine.config, fabric.rank, fabric.size
        config = self.config
        self.steps, self.lr = 0, config.lr
        self._world, self._fabric = here, fabric
        self.model.train()
        if self.rank:  # replicas have different dropout masks
            set_random_state({"seed": replica_seed(config.seed, self.rank), "offset": 0})
        engine.gradient.progress = Display(quiet=bool(self.rank)).compiling
        self._replica = Replica(engine, fabric)
        self._method = kind(self._replica, fabric, config)
        self._stopped = self._finished = False

    @property
    def images(self) -> int:
        return self._replica.images

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Make one training step on a batch x (B, H, W, C), y (B,), as the method prescribes; return its mean loss.

        With a synchronous method, such as dpsgd and allreduce, all replicas must make the same number of steps.
        Raises DivergedError if the loss is not finite, PeerLost or ReplicaLeftError if a replica that this one needs
        has died or has left the training by an exception, and KeyboardInterrupt after Ctrl-C: with a synchronous
        method, in all replicas after the same step.
        """
        self._require_training("step")
        if self._finished:
            raise ConfigError("step: this replica has finished; call minidl.join to train again")
        with self._world.waiting_in("step"):
            return self._step((np.asarray(x), np.asarray(y)))

    def _step(self, batch: Batch) -> float:
        fabric = self._fabric
        if not self.steps:
            begin_together(fabric, lambda: self._prepare(*batch)) if self.size > 1 else self._prepare(*batch)
            fabric.stats.start()
        if not fabric.begin_step(self.steps, self._method.synchronous):
            self._stopped = True
            raise KeyboardInterrupt(f"stopped after step {self.steps}")
        self._replica.lr = self.lr
        try:
            loss = self._method.step(batch)
        except DivergedError as error:
            advice = f"try a lower lr (it is {self.lr:g})"
            raise DivergedError(f"diverged in step {self.steps + 1}: {error}; {advice}") from None
        self.steps += 1
        return loss

    def _prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        self._replica.engine.gradient.prepare(x, y)
        if self.size > 1:
            self._replica.compile_arithmetic()

    def shard(self, n: int, epoch: int = 0) -> np.ndarray:
        """Return this replica's part of n samples in an epoch: int64 indices (n // size,), in random order.

        Each epoch divides the samples again. The parts of all replicas have the same length and no common sample; up
        to size - 1 samples are left out.
        """
        if whole("shard", "n", n) < self.size:
            raise ConfigError(f"shard: {n} samples cannot be divided among {self.size} replicas")
        return shard(n, [n // self.size] * self.size, self.rank, self.config.seed, whole("shard", "epoch", epoch))

    def finish(self) -> None:
        """Wait for all live replicas; then every rank's model has the average of their weights. End the replica.

        Batch norm's running statistics are averaged, too. A `with` block calls this at its end; a second call does
        nothing. Raises ConfigError if a synchronous method's replicas have made different numbers of steps, and
        ReplicaLeftError if a replica has left the training by an exception.
        """
        if self._finished:
            return
        self._require_training("finish")
        self._finished = True
        self._fabric.stats.stop()
        if self._world.job is not None:
            with self._world.abandoning(), self._world.waiting_in("finish"):
                self._finish()

    def _require_training(self, call: str) -> None:
        """Raise ConfigError if an exception has ended this training (World.abandon)."""
        if self._world.job is not None and not self._finished and self._world.joined is not self:
            raise ConfigError(f"{call}: an exception has ended this training; call minidl.join to train again")

    def _finish(self) -> None:
        fabric, replica = self._fabric, self._replica
        fabric.set_status(Column.STATE, State.PAUSED)
        if self._method.synchronous:
            fabric.wait(self._all_have_finished, (), "the others to finish")
        fabric.fail_fast = False
        with suppress(PeerLost):
            self._method.pause()
        statistics = replica.engine.statistics
        average(fabric, [replica.theta] if statistics is None else [replica.theta, statistics.theta])
        replica.touch()
        if statistics is not None:
            statistics.touch()
        self._world.leave()

    def _all_have_finished(self) -> bool | None:
        """Raise ConfigError if another replica has begun a step that this one does not make: it would wait forever."""
        fabric = self._fabric
        steps = fabric.status[:, Column.STEP]
        first = next(rank for rank in range(fabric.size) if fabric.state(rank) == State.PAUSED)  # it reports for all
        if steps.max() > self.steps and first == self.rank:
            raise ConfigError(f"finish: replica {self.rank} has made {self.steps} steps, and replica {steps.argmax()} "
                              f"has begun step {int(steps.max())}: with {self.config.method}, all make the same "
                              "number of steps")  # fmt: skip
        return all(fabric.state(rank) >= State.PAUSED for rank in fabric.replicas) or None

    def __enter__(self) -> JoinedReplica:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopped = self._stopped or (isinstance(error, KeyboardInterrupt) and self._fabric.stopping())
        if error is None or stopped:
            self.finish()
        elif not self._finished:
            self._finished = True
            self._world.abandon(error)


def average(fabric: Fabric, vectors: Sequence[np.ndarray]) -> None:
    """vectors = their means over all live replicas, summed in float64 in the order of the ranks.

    If the leader dies meanwhile, the next one repeats the work. All live replicas call this.
    """
    while True:
        fabric.led_by = leader = fabric.leader
        try:
            means = []
            for vector in vectors:
                mean = gathered_mean(fabric, vector)
                hand_out(fabric, mean, leader)
                means.append(mean)
            break
        except PeerLost:
            if fabric.alive(leader):
                raise
    for vector, mean in zip(vectors, means, strict=True):
        vector[:] = mean


def gathered_mean(fabric: Fabric, vector: np.ndarray) -> np.ndarray:
    """Return the mean of a vector over all live replicas at the leader; elsewhere a vector of zeros."""
    total, replicas = np.zeros(0), 0
    for _, other in fabric.gather(vector):
        total = other.astype(np.float64) if not replicas else np.add(total, other, out=total)
        replicas += 1
    return (total / replicas).astype(vector.dtype) if replicas else np.zeros_like(vector)
