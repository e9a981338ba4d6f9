"""Whole runs of elastic averaging on a simulated cluster: stopped, resumed, and with deaths."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import quick
from sessions import Sessions
from test_shutdown import killed

from minidl.comm.methods.elastic import Elastic
from minidl.comm.replica import Batch
from minidl.run import checkpoint as files
from minidl.run.evaluation import Score
from minidl.training.output import RunOutput

WORKERS = 3
RUNS: dict[str, dict[str, Any]] = {  # with options, and the number of ranks
    "easgd": {"method": "easgd", "period": 2},
    "easgd rank": {"method": "easgd", "center": "rank"},
    "sync-easgd": {"method": "sync-easgd", "period": 2, "overlap": True},
    "sync-easgd beside": {"method": "sync-easgd", "center": "beside"},
    "sync-easgd rank": {"method": "sync-easgd", "center": "rank", "period": 2, "overlap": True},
    "async-easgd": {"method": "async-easgd", "period": 2},
    "async-easgd rank": {"method": "async-easgd", "center": "rank"},
    "eamsgd": {"method": "eamsgd", "period": 2},
    "eamsgd rank": {"method": "eamsgd", "center": "rank", "period": 1},
}
ASYNCHRONOUS = [name for name in RUNS if "eamsgd" in name or "async" in name]
EXACT = [name for name in RUNS if name not in ASYNCHRONOUS]


@pytest.fixture
def sessions(tmp_path: Path) -> Callable[..., Sessions]:
    """Return a function that makes a run, each time in a new folder."""
    number = iter(range(10**6))

    def run(name: str, deaths: dict[int, float] | None = None, ranks: int = WORKERS, **options: Any) -> Sessions:
        ranks += RUNS[name].get("center") == "rank"
        return Sessions(tmp_path / f"run-{next(number)}", ranks, deaths or {}, **{"epochs": 2, **RUNS[name], **options})

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sessions]:
    """Return a function that returns a run without deaths. Tests share it."""

    @cache
    def run(name: str) -> Sessions:
        ranks = WORKERS + (RUNS[name].get("center") == "rank")
        return Sessions(tmp_path_factory.mktemp("whole"), ranks, {}, epochs=2, **RUNS[name])

    return run


def vectors(run: Sessions) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in run.last().vectors.items() if "communication" not in name}


@pytest.mark.parametrize("name", quick(RUNS, *[*RUNS][::2]))
def test_all_end_with_the_same_center(whole: Callable[[str], Sessions], name: str) -> None:
    run = whole(name)
    run.check()
    saved = run.last().vectors
    centers = {saved[f"{rank}/method.center"].tobytes() for rank in range(WORKERS)}
    assert len(centers) == 1 and saved["0/method.center"].any()
    assert len({saved[f"{rank}/theta"].tobytes() for rank in range(WORKERS)}) == WORKERS
    assert run.summary and run.summary["replicas_alive"] == WORKERS


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_contains_the_center_and_the_statistics_of_its_server(
    whole: Callable[[str], Sessions], name: str
) -> None:
    run = whole(name)
    summary, saved = run.summary, run.last()
    assert summary and summary["accuracy_worst"] <= summary["accuracy_best"]
    assert 0 <= summary["accuracy_center"] <= 1 and np.isfinite(summary["loss_center"])
    assert not np.array_equal(saved.vectors["0/method.center"], flat(saved.weights)), "it is not the average"
    if "sync-easgd" not in name or name.startswith("async"):  # there, a server counts the visits
        visits = sum(len(range(0, state["steps"], RUNS[name].get("period", 1)))
                     for state in saved.state["members"].values())  # fmt: skip
        own = 0 if "rank" in name else len(range(0, saved.state["members"]["0"]["steps"], RUNS[name].get("period", 1)))
        assert summary["staleness"]["count"] == visits - own


def test_the_statistics_of_a_parameter_server_are_in_the_summary(tmp_path: Path) -> None:
    """Also if the leader dies while it collects them."""
    whole = Sessions(tmp_path / "whole", 3, {}, method="ps", epochs=2)
    for number, moment in enumerate([0.0, *sorted(whole.moments)[-20::4]]):
        run = Sessions(tmp_path / f"run-{number}", 3, {0: moment + 1e-9} if moment else {}, method="ps", epochs=2)
        run.check()
        assert run.summary and run.summary["replicas_alive"] == (1 if moment else 2)
        gradients = sum(state["steps"] for state in run.last().state["members"].values())
        assert run.summary["staleness"]["count"] >= gradients > 0


@pytest.mark.parametrize("name", EXACT)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(
    sessions: Callable[..., Sessions], whole: Callable[[str], Sessions], name: str
) -> None:
    run = sessions(name, stop=whole(name).simulation.time / 2)
    assert run.summary is None and not run.errors
    ranks = WORKERS + (RUNS[name].get("center") == "rank")
    again = Sessions(run.folder, ranks, {})
    assert again.summary and vectors(again) == vectors(whole(name))


@pytest.mark.parametrize("method", ["easgd", "sync-easgd", "async-easgd", "eamsgd"])
def test_one_replica_goes_on_with_its_center(sessions: Callable[..., Sessions], method: str) -> None:
    """The last checkpoint of a finished run is deleted, so the run goes on from the one before."""
    run = sessions(method, ranks=1)
    expected, last = vectors(run), files.last(run.folder / "checkpoints")
    assert last and "method.center" in expected and len(files.steps(run.folder / "checkpoints")) == 2
    shutil.rmtree(last)
    (run.folder / "summary.json").unlink()
    assert vectors(run)["method.center"] != expected["method.center"]
    again = Sessions(run.folder, 1, {})
    assert again.summary and vectors(again) == expected


@pytest.mark.parametrize("name", quick(
    ["easgd", "easgd rank", "sync-easgd", "async-easgd rank", "eamsgd"], "easgd rank", "sync-easgd", "eamsgd",
))  # fmt: skip
@pytest.mark.parametrize("ranks", quick([1, 2, 4], 2))
def test_a_run_goes_on_with_another_number_of_replicas(
    sessions: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    """All begin with the average, and the center begins as it was saved."""
    if ranks == 4 and "rank" in name:
        pytest.skip("the cluster has 4 devices")
    run = sessions(name, stop=0.02)
    assert run.summary is None and not run.errors
    center, began = run.last().vectors["0/method.center"].tobytes(), list[bytes]()
    step = Elastic.step

    def noted(self: Elastic, batch: Batch) -> float:
        began.append(self.center.tobytes())
        return step(self, batch)

    monkeypatch.setattr(Elastic, "step", noted)
    again = Sessions(run.folder, ranks + (RUNS[name].get("center") == "rank"), {})
    assert again.summary and again.summary["epochs"] == 2
    assert began[0] == center


def test_one_replica_goes_on_alone_and_then_three_with_its_center(sessions: Callable[..., Sessions]) -> None:
    run = sessions("easgd", ranks=1, stop=0.02)
    assert run.summary is None and not run.errors and "method.center" in run.last().vectors
    assert Sessions(run.folder, 3, {}).summary


def test_the_center_of_ps_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker tests its weights, and the leader the result, which is the center."""
    tests: list[int] = []
    score = RunOutput.score

    def noted(self: RunOutput) -> Score:
        tests.append(self.fabric.rank)
        return score(self)

    monkeypatch.setattr(RunOutput, "score", noted)
    run = Sessions(tmp_path / "run", 3, {}, method="ps", epochs=1)
    assert run.summary and run.summary["accuracy_center"] == run.summary["test_accuracy"]
    assert sorted(tests) == [0, 0, 1]


@pytest.mark.parametrize("name", quick(RUNS, "easgd rank", "sync-easgd beside", "eamsgd"))
def test_one_dies_at_some_moments(
    sessions: Callable[..., Sessions], whole: Callable[[str], Sessions], name: str
) -> None:  # fmt: skip
    """A replica or the center dies: asynchronous replicas go on. All others stop, and are saved."""
    moments = sorted(whole(name).moments)
    for victim, part in ((WORKERS if "rank" in name else 0, 0.4), (1, 0.5)):
        run = sessions(name, {victim: moments[int(part * len(moments))] + 1e-9})
        run.check()
        assert (run.summary is not None) == (name in ASYNCHRONOUS)


@pytest.mark.parametrize("name", [name for name in RUNS if "rank" in name])
def test_the_only_replica_dies_and_the_center_is_saved(sessions: Callable[..., Sessions], name: str) -> None:
    half = sessions(name, ranks=1).simulation.time / 2
    run = sessions(name, {0: half}, ranks=1)
    assert len(run.errors) == 1 and "all workers have died; the center is saved; to continue" in run.errors[0]
    still = sessions(name, ranks=1, rho=0.0).last().vectors["0/method.center"]  # without a pull
    assert not np.array_equal(flat(run.last().weights), still)
    assert Sessions(run.folder, 2, {}).summary


def flat(weights: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([values.reshape(-1) for values in weights.values()])


@pytest.mark.parametrize("name", ["async-easgd", "eamsgd"])
def test_a_newcomer_begins_with_the_center_and_its_rho(sessions: Callable[..., Sessions], name: str) -> None:
    run = sessions(name, ranks=WORKERS + 1, joins={WORKERS: 0.02}, max_workers=WORKERS + 1, epochs=3)
    run.check()
    assert run.summary and run.summary["replicas_alive"] == WORKERS + 1
    saved = run.last().vectors
    for vector in ("center", "curvature"):
        assert len({saved[f"{rank}/method.{vector}"].tobytes() for rank in range(WORKERS + 1)}) == 1


# Real processes.


@pytest.mark.slow
@pytest.mark.parametrize(("method", "where"), [
    ("sync-easgd", "comm.methods.sync_easgd:SyncEASGD.update_center"),
    ("easgd", "comm.methods.elastic:Served.update_center"),
])  # fmt: skip
def test_the_center_is_killed(tmp_path: Path, method: str, where: str) -> None:
    """The replicas stop and are saved. Their copies of the center are saved, too."""
    code, lines, errors = killed(tmp_path / "run", 3, [2], where, "--method", method, "--center", "rank")
    assert code == 2 and not lines and "the others are saved; to continue from their average" in errors
    last = files.last(tmp_path / "run" / "checkpoints")
    assert last and {"0/method.center", "1/method.center"} <= files.load(last).vectors.keys()


def test_the_replica_with_the_center_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    options = ["--method", "sync-easgd", "--center", "beside", "--on-death", "continue"]
    where = "comm.methods.sync_easgd:SyncEASGD.update_center"
    code, [result], errors = killed(tmp_path / "run", 3, [0], where, *options)
    assert code == 0 and result["replicas_alive"] == 2 and result["epochs"] == 4
    assert "replica 0 died; the other 2 go on" in errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(WORKERS + 1))
@pytest.mark.parametrize("name", RUNS)
def test_one_dies_at_every_moment(sessions: Callable[..., Sessions], name: str, victim: int) -> None:
    if victim == WORKERS and RUNS[name].get("center") != "rank":
        pytest.skip("there is no such rank")
    for moment in sorted(sessions(name).moments):
        sessions(name, {victim: moment + 1e-9}).check()
