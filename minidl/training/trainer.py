"""The training loop: one, used by the command line and by `fit`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from signal import SIGTERM
from time import perf_counter
from typing import Any

import numpy as np

from minidl import schedules
from minidl.comm.fabric.alone import Alone
from minidl.comm.fabric.base import Fabric
from minidl.comm.methods import method
from minidl.comm.methods.local import Local
from minidl.comm.replica import Engine, Replica, mix
from minidl.data import Dataset
from minidl.data.sampler import Share
from minidl.errors import CheckpointError, DivergedError
from minidl.nn import Module, random_state, set_random_state
from minidl.run.checkpoint import Checkpoint
from minidl.run.config import FREE, Config, resolve
from minidl.run.evaluation import evaluate
from minidl.run.options import from_toml, options, to_toml
from minidl.run.progress import BEST, Progress
from minidl.run.signals import Stopped
from minidl.training.replica_state import BOOKS, Member, mean, restore

Entry = dict[str, Any]  # a line of metrics.jsonl


class Trainer:
    """Trains one replica on a data set as a config says, from wherever `progress` stands. There may be no others.

    check: called between steps and between batches of evaluation, where the state is whole; what it raises ends `run`.
    fabric: where the others are. engine: one that many replicas share, each with vectors of its own (a simulation).
    """

    def __init__(
        self,
        model: Module,
        data: Dataset,
        config: Config,
        check: Callable[[], None] = lambda: None,
        fabric: Fabric | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.model, self.data, self.config, self.check = model, data, config, check
        self.fabric = fabric or Alone()
        self.engine = engine or Engine(model, config)
        self.progress = Progress()
        self.share = Share(data, config, self.fabric, prefetch=0 if engine else 2)
        self.planned = config.steps or config.epochs * len(self.share)  # steps of a run with as many replicas as now
        self.schedule = schedules.build(config.schedule, self.planned, config.warmup)
        if self.share.place:  # its dropout is its own
            set_random_state({"seed": self.share.seed, "offset": 0})
        self.replica = Replica(self.engine, self.fabric, self._lr, own=engine is not None)
        kind = method(config.method) if self.fabric.size > 1 else Local
        self.method = kind(self.replica, self.fabric, config)
        self.furthest = 0  # epochs that any of the replicas had finished when they were resumed
        self._warm = False  # the first step compiles; images/s are of the others

    @property
    def total_steps(self) -> int:
        return self.planned + self.progress.shift

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.total_steps and self.progress.batch == 0

    def run(self) -> Iterator[Entry]:
        """Train to the end. Yields an entry with "event": "step" after each step and "epoch" after each epoch.

        The clock stands still while an epoch's entry is looked at. Raises DivergedError as soon as a loss is not
        finite, Stopped where the replicas were asked to stop.
        """
        began, meter = perf_counter() - self.progress.seconds, self.fabric.meter
        while not self.finished:
            meter.start()
            for entry in self._steps():
                self.progress.seconds = perf_counter() - began
                yield entry
            meter.stop()
            entry = self._finish_epoch()
            self.progress.seconds = perf_counter() - began
            yield entry
            began = perf_counter() - self.progress.seconds

    def prepare(self) -> None:
        """Record the step for a whole batch, and have its kernels compiled, with that which mixes."""
        self.model.train()
        for x, y in self.share.epoch(0):
            self.engine.gradient.prepare(x, y)
            break
        letter = np.zeros(1, np.float32)
        letter.flags.writeable = False  # as those that come: for Numba a type of its own
        mix(self.fabric, np.zeros(1, np.float32), letter, 0.5)

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """One step on a batch x (B, H, W, C), y (B,): its mean loss, and how many answers were right."""
        try:
            loss = self.method.step((x, y))
        except DivergedError as error:
            raise self._diverged(str(error), making=1) from None
        self.progress.lr = self.replica.last_lr
        return loss, self.replica.correct

    def _lr(self) -> float:
        return self.config.lr * self.schedule(self.progress.step - self.progress.shift)

    def _steps(self) -> Iterator[Entry]:
        """The rest of the epoch that `progress` is in."""
        at = self.progress
        self.model.train()
        began = perf_counter()
        for x, y in self.share.epoch(at.epoch, start=at.batch):
            if at.step == self.total_steps:
                break
            self.check()
            if not self.fabric.begin_step(at.step, self.method.synchronous):
                raise Stopped(SIGTERM)
            loss, correct = self.step(x, y)
            at.step, at.batch, at.images = at.step + 1, at.batch + 1, at.images + len(y)
            at.loss_sum, at.correct = at.loss_sum + loss * len(y), at.correct + correct
            if self._warm:
                at.timed_images, at.timed_seconds = at.timed_images + len(y), at.timed_seconds + perf_counter() - began
            yield self._entry("step", loss=loss, accuracy=correct / len(y))
            self._warm, began = True, perf_counter()

    def _finish_epoch(self) -> Entry:
        """Count the epoch as done; the only replica validates, too."""
        at = self.progress
        scores = {"loss": at.loss_sum / at.images, "accuracy": at.correct / at.images}
        if self.fabric.size == 1:
            scores |= self.validate(at.step)
        at.train_loss = scores["loss"]
        at.epoch, at.batch = at.epoch + 1, 0
        at.loss_sum, at.correct, at.images = 0.0, 0, 0
        return self._entry("epoch", **scores)

    def validate(self, step: int) -> dict[str, float]:
        """The score of the model, as it is, on the validation images, if there are any: is it the best so far?"""
        at = self.progress
        if self.data.x_validation is None or self.data.y_validation is None:
            return {}
        try:
            score = evaluate(self.model, self.data.x_validation, self.data.y_validation, check=self.check,
                             prediction=self.engine.prediction)  # fmt: skip
        except DivergedError as error:
            raise self._diverged(str(error)) from None
        if at.best_step < 0 or (score.accuracy, -score.loss) > (at.best_accuracy, -at.best_loss):
            at.best_step, at.best_accuracy, at.best_loss = step, score.accuracy, score.loss
        return {"validation_loss": score.loss, "validation_accuracy": score.accuracy}

    def _entry(self, event: str, **values: float) -> Entry:
        at = self.progress
        epoch = at.epoch + (event == "step")  # counted from 1
        speed = round(at.images_per_second, 1)
        return {"event": event, "step": at.step, "epoch": epoch, **values, "lr": at.lr,
                "images_per_second": speed}  # fmt: skip

    # -- stopping and going on ---------------------------------------------------------------------------

    def checkpoint(self, members: Sequence[Member] = ()) -> Checkpoint:
        """Everything that `restore` goes on from. Raises DivergedError rather than keep weights that are not finite.

        members: of several replicas, all (see replica_state.py), while the model is their average.
        """
        weights = self.model.state_dict()
        for name, values in weights.items():
            if not np.isfinite(values).all():
                raise self._diverged(f"{name} holds values that are not finite")
        vectors, numbers = self.engine.optimizer.state_dict()
        state = {
            "progress": asdict(self.progress),
            "optimizer": numbers,
            "random": random_state(),
            "layout": self.engine.arena.layout_hash,
            "batches": len(self.share),
            "config": to_toml(self.config),
        }
        if members:
            vectors = {f"{m.rank}/{name}": vector for m in members for name, vector in m.vectors.items()}
            vectors |= {f"{m.rank}/{BOOKS}": m.books for m in members if m.books is not None}
            state["members"] = {str(m.rank): m.numbers for m in members}
        return Checkpoint(weights, vectors, state, self._about())

    def _about(self) -> dict[str, str]:
        """What `load_model` needs besides the weights."""
        about = {
            "classes": self.data.classes,
            "input_shape": self.data.input_shape,  # (H, W, C)
            "mean": self.data.mean.tolist(),
            "std": self.data.std.tolist(),
        }
        return {"model": self.config.model, "data": self.data.name} | {n: json.dumps(v) for n, v in about.items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on as if never stopped. Raises CheckpointError where the checkpoint is of another run, model or layout.

        With other replicas than before all begin with the average, and go on from where those were on the average.
        """
        state = checkpoint.state
        try:
            before, layout, progress = state["config"], state["layout"], state["progress"]
            numbers, random, batches = state["optimizer"], state["random"], int(state["batches"])
            members = {int(rank): words for rank, words in state.get("members", {}).items()}
            known = {field.name for field in fields(Progress)}
            if any(set(found) != known for found in (progress, *(words["progress"] for words in members.values()))):
                raise KeyError("progress")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint of another version of minidl: {error} is not as expected") from None
        then = resolve(from_toml(Config, before))
        now = asdict(self.config)
        for name, value in asdict(then).items():
            if name not in FREE and options(Config)[name].saved and value != now[name]:
                raise CheckpointError(f"checkpoint was made with {name} = {value!r}, not {now[name]!r}")
        if layout != self.engine.arena.layout_hash:
            raise CheckpointError("checkpoint is of a model with another layout of parameters")
        self.progress = Progress(**progress)
        self.model.load_state_dict(checkpoint.weights)
        if self.fabric.size == 1 and not members:
            self.engine.optimizer.load_state_dict(checkpoint.vectors, numbers)
            set_random_state(random)
            self.replica.steps = self.progress.step
        elif list(members) == list(self.fabric.replicas) and then.workers == self.config.workers:
            rank = self.fabric.rank if self.fabric.rank in members else 0  # a server begins with the first one's
            prefix = f"{rank}/"
            vectors = {n.removeprefix(prefix): v for n, v in checkpoint.vectors.items() if n.startswith(prefix)}
            mine, own = members[rank], vectors.pop(BOOKS)
            if rank == self.fabric.rank:
                self.fabric.meter.go_on(own)
            restore(self, Member(rank, vectors, mine))
            shared = {name: progress[name] for name in BEST}
            self.progress = Progress(**mine["progress"] | shared)
            self.furthest = max(words["progress"]["epoch"] for words in members.values())
        else:
            before = [Progress(**words["progress"]) for words in members.values()] or [self.progress]
            self._go_on_for(before, batches)
            if members:
                self.replica.theta[:] = mean([checkpoint.vectors[f"{rank}/theta"] for rank in members])
                self.replica.touch()
            if members and self.fabric.rank == 0:
                self.fabric.meter.take_over([checkpoint.vectors[f"{rank}/{BOOKS}"] for rank in members])

    def _go_on_for(self, before: Sequence[Progress], batches: int) -> None:
        """Go on from where other replicas were on the average, each with so many batches in an epoch: after as many
        passes over the data, or as many steps where --steps counts them. The numbers of steps never fall."""
        at, own, count = self.progress, len(self.share), len(before)
        passes = Fraction(sum(one.epoch * batches + one.batch for one in before), batches * count)
        made = sum(one.step - one.shift for one in before) // count
        at.step, at.epoch, at.batch = max(one.step for one in before), int(passes), int(passes % 1 * own)
        at.shift = at.step - (made if self.config.steps else at.epoch * own + at.batch)
        at.loss_sum, at.correct, at.images = 0.0, 0, 0
        self.replica.steps = at.step

    def _diverged(self, what: str, making: int = 0) -> DivergedError:
        clip = self.config.clip / 2 if self.config.clip else 1.0
        return DivergedError(f"diverged in step {self.progress.step + making}: {what}; "
                             f"try a lower --lr (it is {self.config.lr:g}), or --clip {clip:g}")  # fmt: skip
