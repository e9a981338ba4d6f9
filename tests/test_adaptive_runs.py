"""Whole runs with --adaptive: stopped and resumed, with deaths and newcomers, in processes, under mpiexec, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from sessions import Sessions
from test_mpi import environment, mpiexec

from minidl import train

WORKERS = 3
ADAPTIVE: dict[str, Any] = {"adaptive": "drift", "exchange_rate": 0.3, "longest_silence": 20, "epochs": 4}
RUNS: dict[str, dict[str, Any]] = {
    "gossip": {"method": "gossip", "block": "layers", "mix": "mass"},
    "dpsgd": {"method": "dpsgd", "topology": "ring"},
    "local-sgd": {"method": "local-sgd", "period": 1},
    "easgd": {"method": "easgd"},
    "sync-easgd": {"method": "sync-easgd"},
    "async-easgd": {"method": "async-easgd"},
    "eamsgd": {"method": "eamsgd", "period": 1},
}
EXACT = ("dpsgd", "local-sgd", "easgd", "sync-easgd")
SMALL = ["--data", "synthetic:256x8x8x1:4", "--model", "mlp", "--batch-size", "8", "--threads", "1", "--epochs", "2"]
RULE = ["--adaptive", "drift", "--exchange-rate", "0.25"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sessions]:
    """Return a function that returns a run without deaths. Tests share it."""

    @cache
    def run(name: str) -> Sessions:
        return Sessions(tmp_path_factory.mktemp("whole"), WORKERS, {}, **{**ADAPTIVE, **RUNS[name]})

    return run


def vectors(run: Sessions) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in run.last().vectors.items() if "communication" not in name}


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_counts_what_was_left_out(whole: Callable[[str], Sessions], name: str) -> None:
    run = whole(name)
    run.check()
    assert run.summary and run.summary["exchanges"] > 0
    assert run.summary["exchanges_suppressed"] > 0 and run.summary["bytes_suppressed"] > 0


@pytest.mark.parametrize("name", EXACT)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, whole: Callable[[str], Sessions], name: str
) -> None:
    half = whole(name).simulation.time / 2
    run = Sessions(tmp_path / "run", WORKERS, {}, stop=half, **{**ADAPTIVE, **RUNS[name]})
    assert run.summary is None and not run.errors
    again = Sessions(run.folder, WORKERS, {})
    assert again.summary and vectors(again) == vectors(whole(name))
    expected = whole(name).summary
    assert expected and again.summary["exchanges"] == expected["exchanges"]
    assert again.summary["exchanges_suppressed"] == expected["exchanges_suppressed"]


@pytest.mark.parametrize("name", quick(RUNS, "gossip", "dpsgd", "easgd"))
def test_a_run_goes_on_with_another_number_of_replicas(
    tmp_path: Path, whole: Callable[[str], Sessions], name: str
) -> None:
    run = Sessions(tmp_path / "run", WORKERS, {}, stop=whole(name).simulation.time / 2, **{**ADAPTIVE, **RUNS[name]})
    assert run.summary is None and not run.errors
    assert Sessions(run.folder, 2, {}).summary


@pytest.mark.parametrize("name", quick(RUNS, "gossip", "local-sgd", "eamsgd"))
def test_one_dies_at_some_moments(tmp_path: Path, whole: Callable[[str], Sessions], name: str) -> None:
    """The others go on, and still decide together where they do."""
    moments, goes_on = sorted(whole(name).moments), {} if name in ("gossip", "async-easgd", "eamsgd") else {
        "on_death": "continue"}  # fmt: skip
    for number, part in enumerate((0.2, 0.45, 0.7)):
        moment = moments[int(part * len(moments))] + 1e-9
        run = Sessions(tmp_path / f"run-{number}", WORKERS, {1: moment}, **{**ADAPTIVE, **RUNS[name], **goes_on})
        run.check()
        assert run.summary and run.summary["replicas_alive"] == WORKERS - 1


@pytest.mark.parametrize("name", quick(
    ["gossip", "dpsgd", "local-sgd", "async-easgd", "eamsgd"], "gossip", "dpsgd", "eamsgd",
))  # fmt: skip
def test_a_newcomer_takes_part(tmp_path: Path, name: str) -> None:
    options = {**ADAPTIVE, **RUNS[name], "max_workers": WORKERS + 1}
    run = Sessions(tmp_path / "run", WORKERS + 1, {}, joins={WORKERS: 0.02}, **options)
    run.check()
    assert run.summary and run.summary["replicas_alive"] == WORKERS + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_dies_at_every_moment(tmp_path: Path, whole: Callable[[str], Sessions], name: str) -> None:
    for number, moment in enumerate(sorted(whole(name).moments)):
        for goes_on in ({}, {"on_death": "continue"} if name in EXACT else {}):
            folder = tmp_path / f"run-{number}-{len(goes_on)}"
            Sessions(folder, WORKERS, {1: moment + 1e-9}, **{**ADAPTIVE, **RUNS[name], **goes_on}).check()


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    ["--method", "dpsgd", "--topology", "ring"],
    *(pytest.param(["--method", *words], marks=pytest.mark.slow) for words in (
        ["gossip", "--block", "layers"], ["sync-easgd"], ["hogwild-easgd"],
    )),
])  # fmt: skip
def test_processes_that_share_memory(tmp_path: Path, options: list[str]) -> None:
    result = trained_with(tmp_path, [sys.executable], [*options, "--workers", "2"])
    assert result["replicas_alive"] == 2 and result["exchanges"] > 0 < result["exchanges_suppressed"]


@pytest.mark.parametrize("options", [
    ["--method", "gossip"], pytest.param(["--method", "dpsgd", "--topology", "ring"], marks=pytest.mark.slow),
])  # fmt: skip
def test_under_mpiexec(tmp_path: Path, options: list[str]) -> None:
    result = trained_with(tmp_path, [*mpiexec(), "-n", "2", sys.executable], options)
    assert result["replicas_alive"] == 2 and result["exchanges"] > 0 < result["exchanges_suppressed"]


def trained_with(folder: Path, command: list[str], options: list[str]) -> dict[str, Any]:
    argv = [*command, "-m", "minidl.train", *SMALL, *RULE, *options, "--quiet", "--json", "--out", str(folder / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "message"), [
    ("--method gossip --adaptive sometimes", "unknown adaptive 'sometimes'"),
    ("--method gossip --adaptive drift --threshold 0", "threshold: expected a number above 0, got 0"),
    ("--method gossip --adaptive drift --threshold -1", "threshold: expected a number above 0, got -1"),
    ("--method gossip --adaptive drift --threshold nan", "threshold: expected a number above 0"),
    ("--method gossip --adaptive drift --exchange-rate 1.5", "exchange-rate: expected a number between 0 and 1"),
    ("--method gossip --adaptive drift --exchange-rate 0.001", "exchange-rate 0.001: expected 0.01 to 1"),
    ("--method gossip --adaptive drift --horizon 3", "horizon: expected a number between 0 and 2"),
    ("--method gossip --adaptive drift --exchange-rate 0.1 --horizon 1", "exclude each other"),
    ("--method gossip --adaptive drift --adaptive-after -1", "adaptive-after: expected a whole number of 0 or more"),
    ("--method gossip --adaptive drift --shortest-silence 0", "shortest-silence: expected a whole number of 1 or more"),
    ("--method gossip --adaptive drift --longest-silence 0.5", "longest-silence: expected a whole number of 1 or more"),
    ("--method gossip --adaptive drift --shortest-silence 200", "shortest-silence 200 and longest-silence 100"),
    ("--method gossip --threshold 0.1", "threshold has an effect only with adaptive drift or norm"),
    ("--method gossip --adaptive norm --velocity quasi-global", "velocity quasi-global needs each of them"),
    ("--method allreduce --adaptive drift", "adaptive is an option of the methods"),
    ("--method ps --adaptive drift", "adaptive is an option of the methods"),
    ("--method dpsgd --adaptive drift --workers 3", "needs an undirected graph"),
    ("--method dpsgd --adaptive drift --topology ring --overlap", "excludes overlap and compress"),
])  # fmt: skip
def test_one_clear_line(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    workers = [] if "--workers" in line else ["--workers", "2"]
    assert train.main([*SMALL, *line.split(), *workers, "--quiet"]) == 2
    errors = capfd.readouterr().err
    assert len(errors.splitlines()) == 1 and message in errors, errors
    assert not list(tmp_path.iterdir())
