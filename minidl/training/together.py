"""`fit` in a script of several ranks: each has a replica, and the result is the average of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from minidl.comm.fabric.base import Column, PeerLost, State
from minidl.data import Dataset
from minidl.engine.arena import Arena
from minidl.nn import Module
from minidl.run.checkpoint import Arrays
from minidl.run.config import Config
from minidl.run.display import Display
from minidl.run.evaluation import Score, evaluate
from minidl.run.signals import Stopped
from minidl.training import regroup
from minidl.training.agreement import facts_of_data
from minidl.training.joined import gathered_mean
from minidl.training.output import epoch_means
from minidl.training.replica_state import averaged
from minidl.training.startup import begin_together
from minidl.training.trainer import Entry, Trainer
from minidl.training.vectors import hand_out, hand_out_text, led
from minidl.training.world import World


class Together:
    """The part of one rank in the training of `fit`. progress: called in the leader after each epoch, or None."""

    def __init__(
        self, here: World, model: Module, data: Dataset, config: Config, progress: Callable[[Entry], None] | None
    ) -> None:
        self.fabric, self.world, self.progress = here.fabric, here, progress
        here.enter("fit", model, config, facts_of_data(data))
        self.trainer = Trainer(model, data, config, fabric=here.fabric)
        compiling = Display(quiet=progress is None or here.rank != 0).compiling
        self.trainer.engine.gradient.progress = self.trainer.engine.prediction.progress = compiling
        self.epochs: list[Entry] = []
        self.best = Arrays()  # the average with the best validation score so far, at the leader
        self.taken: list[tuple[int, np.ndarray]] = []  # asynchronous methods: step and weights after each epoch

    @property
    def leads(self) -> bool:
        return self.fabric.rank == self.fabric.leader

    @property
    def validates(self) -> bool:
        return self.trainer.data.x_validation is not None

    def train(self) -> tuple[list[Entry], Score | None]:
        """Train. Return the entries of all epochs and the score of the averaged model, the same on all ranks.

        Raises KeyboardInterrupt after a signal.
        """
        with self.world.waiting_in("fit"):
            return self._train()

    def _train(self) -> tuple[list[Entry], Score | None]:
        fabric, trainer = self.fabric, self.trainer
        begin_together(fabric, trainer.prepare)
        if fabric.rank not in fabric.replicas:
            fabric.fail_fast = False  # a server goes on until all replicas have stopped
            trainer.method.serve()
        else:
            try:
                regroup.train(trainer, self._handle)
            except Stopped as stopped:
                fabric.set_status(Column.STALL, 0)  # the rank is not suspected while the script runs on
                raise KeyboardInterrupt(f"stopped after step {trainer.progress.step}") from stopped
            trainer.work.give_back()
            fabric.fail_fast = False
            fabric.stats.stop()
            fabric.set_status(Column.STATE, State.PAUSED)
            with suppress(PeerLost):
                trainer.method.pause()
        result = self._finish()
        self.world.leave()
        return result

    def _handle(self, entry: Entry) -> None:
        if entry["event"] == "epoch":
            self._epoch_done(entry)

    def _epoch_done(self, entry: Entry) -> None:
        """Complete an epoch's entry with the means over all replicas. With an asynchronous method, do not wait."""
        fabric, trainer, at = self.fabric, self.trainer, self.trainer.progress
        fabric.set_status(Column.IMAGES, entry.pop("images"))
        fabric.set_status(Column.ACCURACY, entry["accuracy"])
        fabric.set_status(Column.LOSS, entry["loss"])
        if trainer.method.synchronous:
            means = np.array([entry["loss"], entry["accuracy"]])
            fabric.allreduce(means)
            entry["loss"], entry["accuracy"] = (means / len(fabric.replicas)).tolist()
            if self.validates:
                mean = gathered_mean(fabric, trainer.replica.theta)
                if self.leads:
                    entry |= self._validate(mean, at.step)
        else:
            entry |= epoch_means(fabric)
            if self.validates and not trainer.finished:  # the weights of the last epoch are the final ones
                self.taken.append((at.step, trainer.replica.theta.copy()))
        self.epochs[at.epoch - 1 :] = [entry]  # a death may have interrupted this function before its end
        if trainer.method.synchronous and self.validates and not trainer.regroups:  # else regroup.py does it
            fabric.barrier()
        if self.leads and self.progress:
            self.progress(entry)

    def _validate(self, mean: np.ndarray, step: int) -> dict[str, float]:
        """Validate an average of all weights. Keep it if its score is the best so far."""
        with averaged(self.trainer, mean) as model:
            scores = self.trainer.validate(step)
            if self.trainer.progress.best_step == step:
                self.best = model.state_dict()
        return scores

    def _finish(self) -> tuple[list[Entry], Score | None]:
        """Let the leader choose and test the result, and send it to all. If it dies, the next leader does it."""
        told, vectors = led(self.fabric, self._result)
        for arena, vector in zip(self._arenas, vectors, strict=True):
            arena.theta[:] = vector
            arena.touch()
        return told["epochs"], Score(*told["test"]) if told["test"] else None

    @property
    def _arenas(self) -> list[Arena]:
        """The arenas of the weights and of the statistics, if the model has any."""
        engine = self.trainer.engine
        return [arena for arena in (engine.arena, engine.statistics) if arena is not None]

    def _result(self, leader: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the leader's entries and test score, and the vectors of its arenas. In the leader, load the weights.

        The other ranks keep their weights: if the leader dies, the average is computed again.
        """
        fabric, trainer, model = self.fabric, self.trainer, self.trainer.model
        told: dict[str, Any] = {}
        if fabric.rank in fabric.replicas:
            for step, theta in self.taken:
                mean = gathered_mean(fabric, theta)
                if fabric.rank == leader:
                    self._validate(mean, step)
            mean = gathered_mean(fabric, trainer.replica.theta)
        if fabric.rank == leader:
            if self.validates and not trainer.method.synchronous:
                self._validate(mean, trainer.progress.step)
            with averaged(trainer, mean):
                weights = self.best or model.state_dict()
            model.load_state_dict(weights)
            told = {"epochs": self.epochs, "test": None}
            if len(trainer.data.y_test):
                test = evaluate(model, trainer.data.x_test, trainer.data.y_test, prediction=trainer.engine.prediction)
                told["test"] = list(test)
        vectors = [arena.theta if fabric.rank == leader else np.zeros_like(arena.theta) for arena in self._arenas]
        for vector in vectors:
            hand_out(fabric, vector, leader)
        return json.loads(hand_out_text(fabric, json.dumps(told), leader)), vectors
