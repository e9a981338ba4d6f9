"""What a run writes for TensorBoard while it trains (--tensorboard).

    RUN/tensorboard/              of one replica: everything
    RUN/tensorboard/all           of several: the lines of metrics.jsonl, which are about all; text, options, images
    RUN/tensorboard/replica-R     of several: the steps and epochs of replica R, its weights and its gradients

Writing takes at most SHARE of the time of training: what is not written in time is left out. Before the first step and
after the last one, it is not limited. So a run of a few seconds has few points within its epochs, but all its options
and its final weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from minidl.engine.tensor import Tensor
from minidl.errors import MinidlError, printable, tell
from minidl.ops import softmax
from minidl.run import event_file
from minidl.run.config import Config
from minidl.run.display import count
from minidl.run.event_file import EventFile, scalars
from minidl.run.model_file import short
from minidl.run.options import options
from minidl.training.trainer import Entry, Trainer

SHARE = 0.005  # of the time of training; with what is written before and after, a run of a minute stays below 1%
EVERY = 10  # steps between two points within an epoch, at least
MOST_REPLICAS = 64  # that write files of their own; of more, some do, at equal distances
LOOKED_AT, SHOWN = 256, 25  # test images: the model is asked about so many, and the worst answers are shown
RESULTS = ("result/test_accuracy", "result/test_loss")
POSITION = ("event", "step", "epoch", "seconds", "time", "samples")  # in an entry: what is no result


class Budget:
    """The time that a process spends on writing. spent: while it trains. beside: before and after."""

    def __init__(self) -> None:
        self.began, self.ended = 0.0, 0.0  # of the training; 0: not yet
        self.spent = self.beside = 0.0
        self._last: dict[str, float] = {}  # seconds that each kind took the last time

    def allows(self, kind: str, first: float = 0.0) -> bool:
        """Return whether there is time for events of this kind. first: the seconds that the first of them may take."""
        expected = self._last.get(kind, first)
        return self.spent + expected <= SHARE * (time.perf_counter() - self.began)

    @contextmanager
    def writing(self, kind: str, trains: bool = True) -> Iterator[None]:
        """Count the time of the `with` block. trains: whether it is between the first step and the last one."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._last[kind] = seconds = time.perf_counter() - began
            if trains:
                self.spent += seconds
            else:
                self.beside += seconds

    def told(self) -> str:
        """Return the time, for a printed line."""
        share = self.spent / max(self.ended - self.began, 1e-9)
        return (f"{self.spent:.3f} s of writing while it trained ({share:.2%} of that time), {self.beside:.2f} s "
                "before and after")  # fmt: skip


class TensorBoard:
    """The events of one rank. Without --tensorboard, its functions do nothing.

    If a file cannot be written, the run goes on without it.
    budget: ranks in one process, as in a simulation, share one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.fabric, self.budget = trainer, trainer.fabric, Budget()
        self.wanted = bool(trainer.config.tensorboard)
        self.folder = Path()
        self._files: dict[str, EventFile] = {}
        self._first = list[Any]()  # the first events of the run, made before training begins
        self._step = -EVERY  # of the last point within an epoch
        self._clock = 0.0  # Unix time minus the time of the fabric

    def prepare(self) -> None:
        """Import tensorboardX, and make the first events, before the ranks begin together. No file is written."""
        trainer = self.trainer
        if not self.wanted:
            return
        with self.budget.writing("first", trains=False):
            scalars({})  # imports tensorboardX
            if self.leads:
                config = {name: getattr(trainer.config, name) for name, entry in options(Config).items()
                          if entry.saved}  # fmt: skip
                config["model"] = short(config["model"])
                table = trainer.model.summary(trainer.data.input_shape)
                self._first = [event_file.text("model", f"```\n{table}\n```"),
                               *event_file.options(config, RESULTS)]  # fmt: skip

    @property
    def alone(self) -> bool:
        return self.fabric.size == 1

    @property
    def leads(self) -> bool:
        return self.fabric.rank == self.fabric.leader

    def begin(self, run: Path) -> None:
        """Write the first events, when training begins. run: its folder."""
        self.folder = run / event_file.FOLDER
        if self.fabric.newcomer:  # it does not get the options of the command line
            self.wanted = self.folder.is_dir()
        self._clock = time.time() - self.fabric.now()
        if self._first:
            self._write("all", "first", lambda: self._first, trains=False)
        self._histograms(("weights",), trains=False)
        self.budget.began = self.budget.began or time.perf_counter()

    def step(self, entry: Entry) -> None:
        """Write a point within an epoch."""
        if not self.wanted or entry["step"] < self._step + EVERY or not self.budget.allows("step"):
            return
        self._step = entry["step"]
        names = ("loss", "accuracy", "lr", "images_per_second")
        self._write("own", "step", lambda: [scalars({f"step/{name}": entry[name] for name in names})])

    def epoch(self, entry: Entry) -> None:
        """Write an epoch of this replica: its results, its weights, and its last gradient."""
        if not self.wanted:
            return
        last = self.trainer.finished
        if not self.alone:  # else `line` does it
            self._write("own", "epoch", lambda: [scalars(_numbers(entry))], trains=not last)
        if last or self.budget.allows("histograms"):
            self._histograms(("weights", "gradients"), trains=not last)
        if not last and self.leads:
            seconds = LOOKED_AT / (3 * entry["images_per_second"] or 1.0)  # a prediction is a third of a gradient
            if self.budget.allows("images", seconds):
                self.trainer.replica.show()
                self._images(trains=True)

    def line(self, entry: Entry) -> None:
        """Write a line of metrics.jsonl. Only the leader does this."""
        if entry["event"] in ("epoch", "average"):
            self._write("all", "epoch", lambda: [scalars(_numbers(entry))], entry["step"])

    def end(self, summary: Entry | None) -> None:
        """Write the result, which the leader has. The model has the weights of the result."""
        self.budget.ended = time.perf_counter()
        if self.wanted and summary is not None:
            result = {name: summary[name.partition("/")[2]] for name in RESULTS}
            self._write("all", "end", lambda: [scalars(result), event_file.end_of_options()], trains=False)
            self._images(trains=False)
            self.close()
            if not self.trainer.config.quiet:
                tell(f"for TensorBoard: {printable(str(self.folder))}; {self.budget.told()}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            self._guarded(file.close)
        self._files.clear()

    # -- writing -----------------------------------------------------------------------------------------

    def _histograms(self, names: tuple[str, ...], trains: bool) -> None:
        """Write the histograms of this replica's weights, and of its last gradient."""
        arena, replica = self.trainer.engine.arena, self.trainer.replica
        vectors = {"weights": replica.theta, "gradients": replica.grad}
        self._write("own", "histograms", lambda: [
            event_file.histogram(f"{what}/{name}", part) for what in names
            for name, part in arena.views(vectors[what])], trains=trains)  # fmt: skip

    def _images(self, trains: bool) -> None:
        """Write the test images whose right class the model finds least likely, and what it says about them."""
        data = self.trainer.data
        if len(data.y_test) and data.input_shape[:2] != (1, 1):
            self._write("all", "images", self._worst_images, trains=trains)

    def _worst_images(self) -> list[Any]:
        data = self.trainer.data
        labels = data.y_test[:LOOKED_AT]
        found = softmax(Tensor(self.trainer.engine.prediction(data.x_test[:LOOKED_AT]))).numpy()
        worst = np.argsort(found[np.arange(len(labels)), labels], kind="stable")[:SHOWN]
        said = [f"{labels[n]}: {found[n].argmax()} ({found[n].max():.0%})" for n in worst]
        wrong = int((found.argmax(axis=1) != labels).sum())
        words = (f"Of the first {count(len(labels), 'test image')}, {wrong} are answered wrong. The worst, in the "
                 f"order of the picture, as class: answer (how sure): {', '.join(said)}")  # fmt: skip
        name = "test_images/worst"
        return [event_file.images(name, data.x_test[worst]), event_file.text(name, words)]

    def _write(
        self, which: str, kind: str, make: Callable[[], list[Any]], step: int = -1, trains: bool = True
    ) -> None:
        """Make events and write them. which: "all", or "own" for the file of this replica."""
        if not self.wanted or (which == "own" and not self._writes_own):
            return
        with self.budget.writing(kind, trains):
            at = self.trainer.progress.step
            when = self._clock + self.fabric.now()
            self._guarded(lambda: self._file(which).add(at if step < 0 else step, when, *make()))

    @property
    def _writes_own(self) -> bool:
        ranks = self.fabric.replicas
        return self.fabric.rank in ranks and ranks.index(self.fabric.rank) % -(-len(ranks) // MOST_REPLICAS) == 0

    def _file(self, which: str) -> EventFile:
        name = "" if self.alone else which if which == "all" else f"replica-{self.fabric.rank}"
        if name not in self._files:
            at = self.trainer.progress.step
            self._files[name] = EventFile(self.folder / name, at + 1 if at else 0)
        return self._files[name]

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write. After an error, write nothing more: the run does not depend on it."""
        try:
            write()
        except (OSError, MinidlError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.wanted = False
            tell(f"minidl: no more events for TensorBoard; the run goes on: {printable(str(reason))}")


def _numbers(entry: Entry) -> dict[str, float]:
    """Return the results in an entry, by their names in TensorBoard."""
    return {f"epoch/{name}": float(value) for name, value in entry.items()
            if name not in POSITION and isinstance(value, int | float)}  # fmt: skip
