"""A replica joins a synchronous run between two steps, also if others die or a signal comes meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import quick
from sessions import Sessions, one_folder_at_a_time
from test_regroup import IMAGES, METHODS, Diary, diary  # noqa: F401 (a fixture)

from minidl.run.signals import Stopped
from minidl.training.regroup import Regrouping
from minidl.training.trainer import Trainer

BEGAN, NEWCOMER, NEVER = 3, 3, 1000.0
SMALL = {"data": f"synthetic:{IMAGES}x2x2x1:2", "epochs": 2}


class Job:
    """Runs of one method that begin with `began` replicas. `folders` yields a new folder for each.

    begins: when the first replica begins each step of a run without a join, in virtual seconds.
    """

    def __init__(
        self, folders: Iterator[Path], diary: Callable[[], Diary], method: str, began: int = BEGAN, **options: Any  # noqa: F811
    ) -> None:  # fmt: skip
        self.folders, self.diary, self.method, self.began = folders, diary, method, began
        self.options = {**SMALL, **METHODS[method], **options}
        self.begins: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "step", self._timed(Trainer.step))
            whole = self.run(dict.fromkeys(range(began, 4), NEVER))  # of 4 ranks, as the others: it has their jitter
        assert whole.summary

    def _timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(trainer: Trainer, *batch: Any) -> Any:
            if trainer.fabric.rank == 0:
                self.begins.append(trainer.fabric.now())
            return step(trainer, *batch)

        return timed

    def run(self, joins: dict[int, float], deaths: dict[int, float] | None = None, stop: float = 0.0) -> Sessions:
        self.notes = self.diary()
        ranks = self.began + len(joins)
        return Sessions(next(self.folders), ranks, deaths or {}, stop, joins, method=self.method, **self.options)

    def check(self, run: Sessions, dead: list[int] | None = None, epochs: int = 2) -> list[dict[str, Any]]:
        """Check what the replicas have trained; return the lines about changes of the members.

        epochs: the number of those that are complete.
        """
        if not any(isinstance(result, Stopped) for result in run.results.values()):
            run.check()
        ranks, dead = [*range(run.simulation.size)], dead or []
        alive = [rank for rank in ranks if rank not in dead]
        for key, weights in self.notes.settled.items():
            if self.method == "allreduce":
                assert len(set(weights.values())) == 1, f"different weights after {key}"
        for epoch in range(epochs):
            images = self.notes.images(epoch, ranks, alive)
            missing, repeated = IMAGES - len(images), images.total() - len(images)
            if self.method == "allreduce" or not dead:
                assert missing < len(ranks) and not repeated, f"epoch {epoch}: {missing} left out, {repeated} repeated"
        journal = run.folder / "metrics.jsonl"
        entries = [json.loads(line) for line in journal.open()] if journal.exists() else []
        return [entry for entry in entries if entry["event"] == "members"]


@pytest.fixture
def job(tmp_path: Path, diary: Callable[[], Diary]) -> Callable[..., Job]:  # noqa: F811
    folders = one_folder_at_a_time(tmp_path)
    return lambda method, **options: Job(folders, diary, method, **options)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the virtual times at which replicas begin and end a pause, in the runs so far."""
    times: list[float] = []
    include = Regrouping.include_newcomer

    def noted(self: Regrouping, admitted: list[int]) -> bool:
        times.append(self.fabric.now())
        found = include(self, admitted)
        times.append(self.fabric.now())
        return found

    monkeypatch.setattr(Regrouping, "include_newcomer", noted)
    return times


def within(run: Sessions, pauses: list[float], longer: float = 0.02) -> list[float]:
    """Return the moments of a run that lie in its pause, or shortly before or afterwards."""
    first, last = min(pauses) - 0.003, max(pauses) + longer
    pauses.clear()
    return [moment for moment in sorted(run.moments) if first < moment < last]


@pytest.mark.parametrize("method", quick(METHODS, *[*METHODS][::2]))
def test_a_replica_joins_at_every_step_of_an_epoch(job: Callable[..., Job], method: str) -> None:
    runs = job(method, epochs=1)
    assert len(runs.begins) == 4, "33 images each; the last one joins the batch before it"
    for step, begins in enumerate(runs.begins[:3], 1):
        run = runs.run({NEWCOMER: begins + 1e-9})
        [line] = runs.check(run, epochs=1)
        assert (line["members"], line["joined"], line["died"], line["epoch"]) == ([0, 1, 2, 3], [3], [], 0)
        assert step <= line["step"] <= step + (method != "allreduce"), "after this step, or the next of another replica"
        assert run.summary and run.summary["replicas_alive"] == 4 and run.summary["epochs"] == 1


def test_the_rate_follows_the_new_number_of_replicas(job: Callable[..., Job]) -> None:
    """An epoch of four replicas has fewer steps, so the schedule goes on faster after the join."""
    runs = job("allreduce", epochs=3, schedule="cosine")
    run = runs.run({NEWCOMER: runs.begins[1]})
    runs.check(run)
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    epochs = [entry for entry in entries if entry["event"] == "epoch"]
    per_epoch = epochs[2]["step"] - epochs[1]["step"]
    assert per_epoch == 3, "25 images of each of 4 replicas"
    assert epochs[2]["lr"] == pytest.approx(0.05 * 0.5 * (1 + np.cos(np.pi * (3 * per_epoch - 1) / (3 * per_epoch))))


def test_two_join_one_after_the_other(job: Callable[..., Job]) -> None:
    runs = job("allreduce", began=2)
    [first, second] = runs.check(runs.run({2: runs.begins[1], 3: runs.begins[1]}))
    assert [first["members"], second["members"]] == [[0, 1, 2], [0, 1, 2, 3]] and second["step"] > first["step"]


# Scenarios draw deaths in a pause for each method.
@pytest.mark.parametrize("method", quick(METHODS, "allreduce", "diloco"))
def test_a_replica_dies_during_the_pause(job: Callable[..., Job], pauses: list[float], method: str) -> None:
    """It is the leader, another member or the newcomer. The others finish, with or without the newcomer."""
    runs = job(method, on_death="continue")
    joins = {NEWCOMER: runs.begins[1] + 1e-9}
    moments = within(runs.run(joins), pauses)
    assert len(moments) >= 6
    for number, moment in enumerate(moments[:: len(moments) // 6]):
        victim = (0, 1, NEWCOMER)[number % 3]
        run = runs.run(joins, {victim: moment + 1e-9})
        runs.check(run, [victim])
        assert run.summary and run.summary["replicas_alive"] == 3


def test_without_on_death_a_death_during_the_pause_stops_the_run(job: Callable[..., Job], pauses: list[float]) -> None:
    runs = job("allreduce")
    joins = {NEWCOMER: runs.begins[1] + 1e-9}
    moments = within(runs.run(joins), pauses, longer=0.0)
    for victim, moment in zip((0, 1, NEWCOMER), moments[:: len(moments) // 3]):
        run = runs.run(joins, {victim: moment + 1e-9})
        runs.check(run, [victim], epochs=0)
        resumed = Sessions(run.folder, BEGAN, {})
        assert resumed.summary and resumed.summary["replicas_alive"] == BEGAN


def test_a_signal_comes_during_the_pause(job: Callable[..., Job], pauses: list[float]) -> None:
    """All stop after the same step, often before the next one. A resume with three replicas trains the rest once.

    After one step of an epoch, four replicas need as many steps for the rest as for a whole epoch. So they count no
    step of it, but the epoch is divided again.
    """
    runs = job("allreduce")
    joins = {NEWCOMER: runs.begins[0] + 1e-9}
    moments = within(runs.run(joins), pauses)
    batches = set()
    for moment in moments[:: len(moments) // 7]:
        run = runs.run(joins, stop=moment + 1e-9)
        members = runs.check(run, epochs=0)
        assert {type(result) for result in run.results.values()} == {Stopped}
        state = run.last().state
        assert len(state["members"]) == state["work"]["replicas"] == BEGAN + len(members)
        batches.add(state["progress"]["batch"])
        assert Sessions(run.folder, BEGAN, {}).summary
        images = runs.notes.images(state["progress"]["epoch"], [*range(4)], [*range(4)])
        assert images.total() == len(images) > IMAGES - 4
    assert batches == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("method", METHODS)
def test_one_dies_at_every_moment_near_a_join(
    job: Callable[..., Job], pauses: list[float], method: str, victim: int
) -> None:
    runs = job(method, on_death="continue")
    for step in (0, 3, 5):
        joins = {NEWCOMER: runs.begins[step]}
        moments = within(runs.run(joins), pauses, longer=0.2)
        for moment in [moment for moment in moments if moment > joins[NEWCOMER]]:
            run = runs.run(joins, {victim: moment + 1e-9})
            runs.check(run, [victim])
            assert run.summary and run.summary["replicas_alive"] == 3
