"""A replica of a synchronous method dies at any moment, and the others go on (--on-death continue)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import Sessions

from minidl.training.trainer import Trainer

METHODS: dict[str, dict[str, Any]] = {"allreduce": {}, "local-sgd": {"period": 2}, "dpsgd": {}}  # with options
STARTING = ("a collective operation", "all to be ready", "the compiled kernels", "all ranks to join")
BATCH, RANKS, IMAGES = 8, 4, 101  # of 101 images, 1 is left out by 4 replicas, and 2 by 3


class Diary:
    """What all replicas of a run have trained. A key is (epoch, step, number of the view).

    begun: {(rank, key): indices of images}. settled: {key: {rank: weights}} after the step.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[int, Any], list[int]] = {}
        self.settled: dict[Any, dict[int, bytes]] = {}

    @staticmethod
    def key(trainer: Trainer) -> tuple[int, int, int]:
        at = trainer.progress
        return at.epoch, at.step, trainer.fabric.view.number

    def images(self, epoch: int, ranks: list[int], alive: list[int]) -> Counter[int]:
        """Count how often each image was trained in an epoch by these ranks, in steps that a survivor has completed."""
        keys = [key for key, done in self.settled.items() if key[0] == epoch and not done.keys().isdisjoint(alive)]
        pairs = [(rank, key) for key in keys for rank in ranks]
        return Counter(image for pair in pairs for image in self.begun.get(pair, ()))


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Diary]:
    """Return a function that begins a new diary of the replicas."""
    current = [Diary()]
    step, settle = Trainer.step, Trainer._settle

    def noted_step(self: Trainer, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        known = {image.tobytes(): index for index, image in enumerate(self.data.x_train)}
        current[0].begun[self.fabric.rank, Diary.key(self)] = [known[image.tobytes()] for image in x]
        return step(self, x, y)

    def noted_settle(self: Trainer, *arguments: Any) -> None:
        current[0].settled.setdefault(Diary.key(self), {})[self.fabric.rank] = self.replica.theta.tobytes()
        settle(self, *arguments)

    monkeypatch.setattr(Trainer, "step", noted_step)
    monkeypatch.setattr(Trainer, "_settle", noted_settle)

    def begin() -> Diary:
        current[0] = Diary()
        return current[0]

    return begin


class Job:
    """Runs of one method. `folders` yields a new folder for each."""

    def __init__(self, folders: Iterator[Path], diary: Callable[[], Diary], method: str, **options: Any) -> None:
        self.folders, self.diary, self.method = folders, diary, method
        self.options = {"data": f"synthetic:{IMAGES}x2x2x1:2", "on_death": "continue", "epochs": 2,
                        **METHODS[method], **options}  # fmt: skip
        self.whole = self.run({})
        self.moments = sorted(self.whole.moments)

    def run(self, deaths: dict[int, float]) -> Sessions:
        self.notes = self.diary()
        return Sessions(next(self.folders), RANKS, deaths, method=self.method, **self.options)

    def check(self, deaths: dict[int, float]) -> bool:
        """Let replicas die, check what the others do, and return whether they have finished the training."""
        run, notes = self.run(deaths), self.notes
        run.check()
        if not notes.settled:  # it failed before the first step
            assert run.summary is None and any(words in run.errors[0] for words in STARTING)
            return False
        assert run.summary, run.errors
        assert run.summary["replicas_alive"] >= RANKS - len(deaths)
        alive = [rank for rank in range(RANKS) if rank not in deaths]
        for key, weights in notes.settled.items():
            if self.method == "allreduce":
                assert len(set(weights.values())) == 1, f"different weights after {key}"
        for epoch in range(2):
            images = notes.images(epoch, [*range(RANKS)], alive)
            missing, repeated = IMAGES - len(images), images.total() - len(images)
            if self.method == "allreduce":  # a step is completed by all, or repeated by all
                assert missing < RANKS and not repeated
            else:  # batches of the dead may be lost or repeated
                mine = notes.images(epoch, alive, alive)
                assert mine.total() == len(mine), "a survivor's batch was repeated"
                most = 4 * (BATCH + 1) * len(deaths)
                assert missing < RANKS + most and repeated <= most
        return True


@pytest.fixture
def job(tmp_path: Path, diary: Callable[[], Diary]) -> Callable[..., Job]:
    folders = (tmp_path / f"run-{number}" for number in range(10**6))
    return lambda method, **options: Job(folders, diary, method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_one_dies_at_some_moments(job: Callable[..., Job], method: str) -> None:
    runs = job(method)
    chosen = runs.moments[9 :: len(runs.moments) // 6]
    finished = [runs.check({number % RANKS: moment + 1e-9}) for number, moment in enumerate(chosen)]
    assert sum(finished) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("options", [{}, {"validation": 0.2}], ids=["plain", "validated"])
@pytest.mark.parametrize("method", METHODS)
def test_one_dies_at_every_moment(job: Callable[..., Job], method: str, options: dict[str, Any], victim: int) -> None:
    runs = job(method, **options)
    for moment in runs.moments:
        runs.check({victim: moment + 1e-9})
