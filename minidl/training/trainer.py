"""The training loop, used by the command line and by `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from signal import SIGTERM
from typing import Any, NamedTuple

import numpy as np

from minidl import schedules
from minidl.comm import claims, stability
from minidl.comm.balance import per_step
from minidl.comm.fabric.base import Column, Fabric, Pause, PeerLost
from minidl.comm.methods import method
from minidl.comm.methods.local import Local
from minidl.comm.replica import Engine, Mark, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.data import Dataset
from minidl.data.sampler import Sampler
from minidl.data.shared import SharedSampler
from minidl.errors import DivergedError, tell
from minidl.nn import Module, set_random_state
from minidl.run.config import Config
from minidl.run.evaluation import BATCH as EVALUATED
from minidl.run.evaluation import evaluate
from minidl.run.progress import BEST, Progress
from minidl.run.signals import Stopped
from minidl.training.balanced import Balanced
from minidl.training.work import Claimed, Divided, Work

Entry = dict[str, Any]  # a line of metrics.jsonl
PIECES = 2  # of the run's batches, on which the curvature of the loss is estimated
PATIENCE = 60.0  # seconds without a sign of life meanwhile


class InFlight(NamedTuple):
    """A step that a death interrupted before the weights changed. mark: the replica before it. images: of its batch."""

    mark: Mark
    images: int


class Trainer:
    """The training of one replica, from the position in `progress`.

    check    called between steps, and between batches of an evaluation; an exception that it raises ends `run`
    fabric   connects the replicas; the default is a single replica
    engine   in a simulation, the engine that all replicas share; the default is a new engine
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
        self.model, self.data, self.config, self._check = model, data, config, check
        self.fabric = fabric or Fabric(LoopbackTransport())
        self.engine = engine or Engine(model, config)
        self.progress = Progress()
        chosen = method(config.method)
        self.prefetch, self.claims = 0 if engine else 2, chosen.claims(config)
        self.share_work()
        self.schedule = schedules.build(config.schedule, self.work.planned, config.warmup)
        if self.sampler.place:  # replicas have different dropout masks
            set_random_state({"seed": self.sampler.seed, "offset": 0})
        self.replica = Replica(self.engine, self.fabric, own=engine is not None)
        kind = chosen if self.fabric.size > 1 or chosen.alone else Local
        self.method = kind(self.replica, self.fabric, config)
        self.curvature: Callable[[], float] | None = None  # instead of `estimate_curvature`
        self.note: Callable[[str], None] = lambda line: None  # called with a line about the method, in each replica
        self._examined = False  # whether the method has seen the loss
        self._warm = False  # whether the first step is done: it compiles, so images/s exclude it
        # With --on-death continue: a step that a death interrupted; the progress before the end of an epoch, until all
        # replicas have ended it.
        self.in_flight: InFlight | None = None
        self.before_end: Progress | None = None

    def share_work(self) -> None:
        """Divide the run's work among `fabric.replicas`. Claimed work is measured by the replicas at the beginning."""
        config, ranks, rank = self.config, self.fabric.replicas, self.fabric.rank
        trains = rank in ranks and not self.fabric.newcomer  # servers do not
        unequal = config.balance in ("static", "dynamic") and len(ranks) > 1
        self.sampler = (SharedSampler if unequal else Sampler)(
            self.data, config.batch_size, config.seed, place=ranks.index(rank) if trains else 0,
            replicas=self.fabric.beginners if self.claims else len(ranks), augment=config.augment,
            shards=config.shards, prefetch=self.prefetch,
        )  # fmt: skip
        self.work: Work
        if self.claims:
            self.work = Claimed(self.sampler, config, self.fabric, self.check)
        elif isinstance(self.sampler, SharedSampler):
            self.work = Balanced(self.sampler, config, self.fabric)
        else:
            self.work = Divided(self.sampler, config, ranks)
        self.work.looks_ahead = self.engine.arena.gpu is not None

    @property
    def regroups(self) -> bool:
        """Whether the replicas go on together when one of them dies (regroup.py)."""
        return self.config.on_death == "continue" and self.fabric.size > 1

    def go_on_with(self, total: int, first: int, left: Sequence[int]) -> None:
        """Continue claimed work: see Claimed. With another number of replicas, each makes another number of steps."""
        assert isinstance(self.work, Claimed)
        self.work.continue_from(total, first, tuple(left))
        self.plan()

    def plan(self) -> None:
        """Build the schedule for the steps that this replica makes in the whole run."""
        planned = self.work.planned
        self.schedule = schedules.build(self.config.schedule, planned, min(self.config.warmup, planned))

    @property
    def total_steps(self) -> int:
        """The value of `progress.step` at the end of the run."""
        return self.work.planned + self.progress.shift

    @property
    def epochs(self) -> int:
        """The number of epochs, counting one that --steps interrupts."""
        return self.work.epochs

    @property
    def finished(self) -> bool:
        return self.work.finished(self.progress)

    def run(self) -> Iterator[Entry]:
        """Train to the end. Yields an entry with "event": "step" after each step and "epoch" after each epoch.

        When all members pause, so that a newcomer can join (regroup.py), it yields an entry with "event": "pause".
        The timer stops while the caller handles the entry of an epoch or of a pause. Raises DivergedError as soon as a
        loss is not finite, Stopped if the replicas were asked to stop, and PeerLost if this replica needs one that has
        died.
        """
        now, stats = self.fabric.now, self.fabric.stats
        self._examine()
        began = now() - self.progress.seconds
        while not self.finished:
            paused = False
            stats.start()
            try:
                for entry in self._steps():
                    self.progress.seconds = now() - began
                    yield entry
            except (Stopped, PeerLost):
                self.progress.seconds = now() - began
                raise
            except Pause:
                paused = True
            if not paused and self.method.meets(self.config):
                self._meet()
            stats.stop()
            if not paused:
                self.before_end = replace(self.progress) if self.regroups else None
            entry = self._entry("pause") if paused else self._finish_epoch()
            self.progress.seconds = now() - began
            yield entry
            self.before_end = None
            began = now() - self.progress.seconds

    def check(self) -> None:
        """Note a sign of life. Raise the exception that ends the training, if there is any."""
        self.fabric.beat()
        self._check()

    def prepare(self) -> None:
        """Record the step for a full batch. Compile all kernels, also of methods and claims, so no step compiles."""
        self.model.train()
        for x, y in self.work.first_batches():
            self.engine.gradient.prepare(x, y)
            if self.engine.arena.gpu is not None:  # memory for evaluations is taken before the first step
                self.engine.prediction.prepare(np.zeros((EVALUATED, *x.shape[1:]), x.dtype))
        claims.prepare(self.fabric.size)
        if not isinstance(self.method, Local) or self.fabric.size > 1:
            self.replica.compile_arithmetic()

    def _examine(self) -> None:
        """Let the method choose what depends on the loss, before the first step. The leader reports what it chose."""
        if self._examined:
            return
        self._examined, fabric = True, self.fabric
        note, warning = self.method.examine(self.curvature or self.estimate_curvature)
        if fabric.rank == fabric.leader:
            if note:
                self.note(note)
            if warning and not self.config.quiet:
                tell(f"minidl: {warning}")

    def estimate_curvature(self) -> float:
        """Return the largest curvature of the loss at the weights of now, on the first pieces of the run."""
        self.model.train()
        with self.fabric.busy(PATIENCE):
            pieces = range(min(PIECES, self.sampler.pieces))
            return stability.curvature(self.replica, [self.sampler.piece(number) for number in pieces])

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Make one step on a batch x (B, H, W, C), y (B,); return its mean loss and the number of correct answers."""
        self.replica.weight, self.replica.shares = self._weight(len(y)), self.work.shares()
        self.progress.lr = self.replica.lr = self.config.lr * self.schedule(self.work.position(self.progress))
        if self.work.looks_ahead:
            self.engine.gradient.announce(self.work.following)
        try:
            loss = self.method.step((x, y))
        except DivergedError as error:
            raise self.diverged(str(error), self.progress.step + 1) from None
        self.work.seconds = self.replica.seconds
        return loss, self.replica.correct

    def _weight(self, images: int) -> float:
        """Return how much the gradient of a batch counts.

        The weights of replicas that run freely are divided by how many steps they make, relative to the mean.
        """
        if self.config.weighting != "share":
            return 1.0
        weight = self.work.weight(self.progress, images)
        if not self.method.synchronous and not self.claims:
            steps = self.fabric.status[list(self.fabric.replicas), Column.STEP]
            return per_step(weight, steps, self.fabric.replicas.index(self.fabric.rank))
        return weight

    def _steps(self) -> Iterator[Entry]:
        """Make the remaining steps of the current epoch."""
        at = self.progress
        self.model.train()
        now = self.fabric.now
        began = now()
        for x, y in self.work.epoch(at):
            self.check()
            if self.regroups and (dead := self.fabric.lost(())) is not None:
                raise PeerLost(dead, "the next step")
            if not self.fabric.begin_step(self.replica.steps, self.method.synchronous):
                raise Stopped(SIGTERM)
            made, mark = self.replica.steps, self.replica.mark() if self.regroups else None
            lost: PeerLost | None = None
            try:
                loss, correct = self.step(x, y)
            except PeerLost as error:
                if self.replica.steps == made:
                    self.in_flight = mark and InFlight(mark, len(y))
                    raise
                lost, loss, correct = error, self.replica.loss, self.replica.correct
            self.fabric.stats.stepped()
            self._settle(loss, correct, len(y))
            if self._warm and (seconds := now() - began) > 0:  # on a virtual clock, a step may take no time
                at.timed_images, at.timed_seconds = at.timed_images + len(y), at.timed_seconds + seconds
            yield self._entry("step", loss=loss, accuracy=correct / max(1, len(y)))
            if lost is not None:
                raise lost
            self._warm, began = True, now()

    def _settle(self, loss: float, correct: int, images: int) -> None:
        self.work.settle(self.progress, images, correct, loss * images)

    def end_interrupted_step(self, completed: bool) -> None:
        """End a step that a death interrupted, if there is one. completed: whether this replica now has its result.

        If not, the replica continues as before it.
        """
        interrupted, self.in_flight, replica = self.in_flight, None, self.replica
        if interrupted is None:
            return
        if completed:
            replica.stepped_elsewhere()
            self._settle(replica.loss, replica.correct, interrupted.images)
        else:
            replica.undo(interrupted.mark)

    def return_before_end(self) -> None:
        """If the end of an epoch is not complete, return to the position before it, except for the best score."""
        if self.before_end is not None:
            best = {name: getattr(self.progress, name) for name in BEST}
            self.progress, self.before_end = replace(self.before_end, **best), None

    def _meet(self) -> None:
        """Let the replicas meet at the end of an epoch. One that finds no piece would wait for the claims of others."""
        at = self.progress
        self.work.give_back()
        loss = at.loss_sum / at.images if at.images else at.train_loss
        self.method.meet(at.epoch + 1, at.images, at.correct / max(at.images, 1), loss)

    def _finish_epoch(self) -> Entry:
        """Count the epoch as done. Validate the replica if it trains alone.

        "images" in the entry is the number of this replica's samples in the epoch. If it has made no step, "loss" is
        that of its latest epoch with a step.
        """
        at = self.progress
        self.work.end_epoch(at)
        images = at.images
        scores = {"loss": at.loss_sum / images if images else at.train_loss, "accuracy": at.correct / max(images, 1)}
        if self.fabric.size == 1:
            scores |= self.validate(at.step)
        at.train_loss = scores["loss"]
        at.epoch, at.batch = at.epoch + 1, 0
        at.loss_sum, at.correct, at.images = 0.0, 0, 0
        return self._entry("epoch", **scores, images=images)

    def validate(self, step: int) -> dict[str, float]:
        """Evaluate the present weights on the validation images, if there are any; remember the best step so far."""
        at = self.progress
        if self.data.x_validation is None or self.data.y_validation is None:
            return {}
        try:
            score = evaluate(self.model, self.data.x_validation, self.data.y_validation, check=self.check,
                             prediction=self.engine.prediction)  # fmt: skip
        except DivergedError as error:
            raise self.diverged(str(error), at.step) from None
        if at.best_step < 0 or (score.accuracy, -score.loss) > (at.best_accuracy, -at.best_loss):
            at.best_step, at.best_accuracy, at.best_loss = step, score.accuracy, score.loss
        return {"validation_loss": score.loss, "validation_accuracy": score.accuracy}

    def _entry(self, event: str, **values: float) -> Entry:
        at = self.progress
        epoch = at.epoch + (event == "step")  # counted from 1
        speed = round(at.images_per_second, 1)
        return {"event": event, "step": at.step, "samples": self.work.samples(at), "epoch": epoch, **values,
                "lr": at.lr, "images_per_second": speed}  # fmt: skip

    def diverged(self, what: str, step: int) -> DivergedError:
        """Return the error for a loss or weights that are not finite in this step."""
        clip = self.config.clip / 2 if self.config.clip else 1.0
        return DivergedError(f"diverged in step {step}: {what}; "
                             f"try a lower --lr (it is {self.config.lr:g}), or --clip {clip:g}")  # fmt: skip
