"""A replica of a synchronous method dies at any moment, and the others go on (--on-death continue)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import quick
from sessions import Sessions, one_folder_at_a_time
from toy_replicas import batch_of, config_of

from minidl import nn
from minidl.comm.fabric.base import Fabric
from minidl.comm.replica import Engine, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.training.trainer import Trainer

METHODS: dict[str, dict[str, Any]] = {  # with options
    "allreduce": {}, "local-sgd": {"period": 2}, "dpsgd": {}, "sync-easgd": {"period": 2, "center": "beside"},
    "diloco": {"period": 2, "fragments": 2, "merge_after": 1}, "noloco": {"period": 2},
}  # fmt: skip
STARTING = ("a collective operation", "all to be ready", "the compiled kernels", "all ranks to join", "the result")
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
        """Count how often each image was trained in an epoch by these ranks.

        A survivor's batch counts if the survivor has completed the step: a death may interrupt it before the gradient.
        A dead replica's batch counts if a survivor has completed the step.
        """
        completed = [(key, done) for key, done in self.settled.items()
                     if key[0] == epoch and not done.keys().isdisjoint(alive)]  # fmt: skip
        pairs = [(rank, key) for key, done in completed for rank in ranks if rank in done or rank not in alive]
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
        self.options = {"data": f"synthetic:{IMAGES}x2x2x1:2", "on_death": "continue", **METHODS[method], **options}
        if "steps" not in options:
            self.options.setdefault("epochs", 2)
        self.images = IMAGES - int(IMAGES * options.get("validation", 0))
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
            assert run.summary is None and any(words in run.errors[0] for words in STARTING), run.errors
            return False
        assert run.summary, run.errors
        assert run.summary["replicas_alive"] >= RANKS - len(deaths)
        alive = [rank for rank in range(RANKS) if rank not in deaths]
        entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
        epochs = [entry["epoch"] for entry in entries if entry["event"] == "epoch"]
        assert epochs in ([1, 2], [1, 2, 2]), "only the death of a leader in the shutdown repeats the last one"
        for key, weights in notes.settled.items():
            if self.method == "allreduce":
                assert len(set(weights.values())) == 1, f"different weights after {key}"
        for epoch in range(2):
            images = notes.images(epoch, [*range(RANKS)], alive)
            missing, repeated = self.images - len(images), images.total() - len(images)
            if self.method == "allreduce":  # a step is completed by all, or repeated by all
                assert missing < RANKS and not repeated
            else:  # batches of the dead may be repeated, and lost if only another dead replica knows of them
                mine = notes.images(epoch, alive, alive)
                assert mine.total() == len(mine), "a survivor's batch was repeated"
                most = 4 * (BATCH + 1) * len(deaths)
                assert missing < RANKS + most * (len(deaths) > 1) and repeated <= most
        return True


@pytest.fixture
def job(tmp_path: Path, diary: Callable[[], Diary]) -> Callable[..., Job]:
    folders = one_folder_at_a_time(tmp_path)
    return lambda method, **options: Job(folders, diary, method, **options)


@pytest.mark.parametrize("method", quick(METHODS, "allreduce", "dpsgd", "diloco"))
def test_one_dies_at_some_moments(job: Callable[..., Job], method: str) -> None:
    runs = job(method)
    chosen = runs.moments[len(runs.moments) // 5 :: len(runs.moments) // 4]
    assert all([runs.check({number % RANKS: moment + 1e-9}) for number, moment in enumerate(chosen)])


@pytest.mark.parametrize("options", [{"validation": 0.2}, {"overlap": True}, {"velocity": "quasi-global"}], ids=str)
def test_one_dies_with_other_options(job: Callable[..., Job], options: dict[str, Any]) -> None:
    runs = job("dpsgd", **options)
    half = len(runs.moments) // 2
    assert runs.check({0: runs.moments[half] + 1e-9}) and runs.check({2: runs.moments[half + 9] + 1e-9})


def test_another_dies_while_the_others_regroup(job: Callable[..., Job]) -> None:
    runs = job("allreduce")
    middle = runs.moments[len(runs.moments) // 2]
    first = runs.run({1: middle + 1e-9})
    after = [moment for moment in sorted(first.moments) if moment > middle + 1e-9][:36:9]
    assert len(after) == 4
    for number, moment in enumerate(after):
        assert runs.check({1: middle + 1e-9, (0, 2, 3)[number % 3]: moment + 1e-9})


def test_another_dies_while_the_others_agree_that_the_training_is_over(job: Callable[..., Job]) -> None:
    """The leader has ended the last epoch; for the others, the death interrupts the average of the last step."""
    runs = job("local-sgd")
    first = runs.moments[-27] + 1e-9
    after = [moment for moment in sorted(runs.run({1: first}).moments) if moment > first]
    for moment in after[4:9:2]:
        assert runs.check({1: first, 2: moment + 1e-9})


@pytest.mark.parametrize("method", quick(METHODS, "local-sgd", "sync-easgd"))
def test_one_goes_on_alone(job: Callable[..., Job], method: str, capfd: pytest.CaptureFixture[str]) -> None:
    runs = job(method)
    third = len(runs.moments) // 3
    times = [runs.moments[third + 9 * number] + 1e-9 for number in range(3)]
    capfd.readouterr()
    assert runs.check({0: times[0], 3: times[1], 1: times[2]})
    assert "replica 2 goes on from step" in capfd.readouterr().err


def test_the_learning_rate_goes_on_along_the_schedule(job: Callable[..., Job]) -> None:
    """The schedule is over the whole run: with fewer replicas, which make more steps each, it falls more slowly."""
    runs = job("allreduce", epochs=4, schedule="cosine")
    run = runs.run({1: runs.moments[len(runs.moments) // 2] + 1e-9})
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    rates = {entry["epoch"]: entry["lr"] for entry in entries if entry["event"] == "epoch"}
    steps = {entry["epoch"]: entry["step"] for entry in entries if entry["event"] == "epoch"}
    assert run.summary and run.summary["steps"] > runs.whole.summary["steps"]
    per_epoch = steps[4] - steps[3]
    assert per_epoch == 4, "33 images of each of 3 replicas"
    expected = 0.05 * 0.5 * (1 + np.cos(np.pi * (4 * per_epoch - 1) / (4 * per_epoch)))
    assert rates[4] == pytest.approx(expected)


def test_with_a_number_of_steps_each_makes_that_many(job: Callable[..., Job]) -> None:
    runs = job("allreduce", steps=7)
    run = runs.run({3: runs.moments[len(runs.moments) // 2] + 1e-9})
    assert run.summary and run.summary["steps"] == 7


def test_a_topology_that_three_replicas_cannot_have(job: Callable[..., Job]) -> None:
    runs = job("dpsgd", topology="hypercube")
    run = runs.run({2: runs.moments[len(runs.moments) // 2] + 1e-9})
    run.check()
    assert run.summary is None and len(run.last().state["members"]) == 3
    assert all("replica 2 died, and the other 3 cannot go on: hypercube" in error and "saved" in error
               for error in run.errors)  # fmt: skip


def test_a_gradient_is_undone() -> None:
    """A step that is repeated has the same dropout masks, and the running statistics of batch norm change once."""
    nn.seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
                          nn.Linear(16, 3))  # fmt: skip
    model.train()
    replica = Replica(Engine(model, config_of("local")), Fabric(LoopbackTransport()))
    found = []
    for _ in range(2):
        mark = replica.mark()
        replica.gradient(batch_of(0, 0))
        assert replica.statistics is not None
        found.append((replica.grad.tobytes(), replica.statistics.tobytes(), replica.images))
        replica.undo(mark)
    assert found[0] == found[1] and replica.images == 0 and replica.mark().random == mark.random


def test_a_stopped_run_is_resumed_by_all(job: Callable[..., Job]) -> None:
    """The checkpoint says which images three replicas have trained of the epoch that four replicas began."""
    runs = job("allreduce")
    stop = runs.moments[len(runs.moments) // 4]
    notes = runs.diary()
    folder = next(runs.folders)
    Sessions(folder, RANKS, {2: stop / 2}, stop=stop, method="allreduce", **runs.options)
    work = Sessions.last_of(folder).state["work"]
    assert work["members"] == [0, 1, 3] and work["replicas"] == 3
    resumed = Sessions(folder, RANKS, {})
    assert resumed.summary and resumed.summary["replicas_alive"] == RANKS
    images = notes.images(0, [*range(RANKS)], [0, 1, 3])
    assert len(images) == images.total() > IMAGES - RANKS


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("options", [{}, {"validation": 0.2}], ids=["plain", "validated"])
@pytest.mark.parametrize("method", METHODS)
def test_one_dies_at_every_moment(job: Callable[..., Job], method: str, options: dict[str, Any], victim: int) -> None:
    runs = job(method, **options)
    for moment in runs.moments:
        runs.check({victim: moment + 1e-9})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_die_at_random_moments(job: Callable[..., Job], method: str) -> None:
    runs, random = job(method), np.random.default_rng(5)
    for _ in range(150):
        first, second = random.choice(RANKS, 2, replace=False).tolist()
        at = int(random.integers(len(runs.moments)))
        later = min(len(runs.moments) - 1, at + int(random.integers(40)))
        runs.check({first: runs.moments[at] + 1e-9, second: runs.moments[later] + 2e-9})
