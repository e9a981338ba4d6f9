"""Elastic averaging chooses rho by the curvature of the loss before the first step, or warns about the given rho."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import Sessions

from minidl import fit
from minidl.comm.methods import method
from minidl.comm.methods.elastic import UNKNOWN, Elastic
from minidl.comm.stability import default_rho
from minidl.models import mlp
from minidl.train import main

FAMILY = ("easgd", "sync-easgd", "async-easgd", "eamsgd")
CURVED: dict[str, Any] = {"momentum": 0.0, "lr": 2.08}  # with the model of Sessions, eta h is 1.96
RUN = ["--data", "synthetic:48x2x2x1:2", "--model", "mlp", "--epochs", "1", "--batch-size", "8", "--momentum", "0"]


class Watch:
    """The choices of rho: (rho, the number of replicas, the curvature)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen: list[tuple[float, int, float]] = []
        choose, watch = Elastic.choose_rho, self

        def watched(self: Elastic, view: Any) -> None:
            choose(self, view)
            watch.chosen.append((self.rho, len(view.members), float(self.curvature[0])))

        monkeypatch.setattr(Elastic, "choose_rho", watched)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def expected(name: str, replicas: int, curvature: float) -> float:
    kind: Any = method(name)
    return default_rho(replicas, CURVED["lr"], curvature, 4 if name == "eamsgd" else 1, 0.0, kind.order)


@pytest.mark.parametrize("name", FAMILY)
def test_all_replicas_choose_the_same_rho(tmp_path: Path, watch: Watch, name: str) -> None:
    """Each has an engine and a sampler of its own."""
    Sessions(tmp_path / "run", 3, {}, method=name, epochs=1, **CURVED).check()
    [(rho, replicas, curvature)] = set(watch.chosen[-3:])
    assert replicas == 3 and curvature > 0 and rho == expected(name, 3, curvature)
    assert name == "eamsgd" or rho < 0.5 * 0.9 / (3 * CURVED["lr"]), "it is far below the usual one"


def test_rho_follows_the_number_of_replicas_at_the_same_curvature(tmp_path: Path, watch: Watch) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, method="sync-easgd", epochs=2, on_death="continue", **CURVED)
    curvature, half = watch.chosen[-1][2], sorted(whole.moments)[len(whole.moments) // 2]
    Sessions(tmp_path / "run", 3, {1: half}, method="sync-easgd", epochs=2, on_death="continue", **CURVED).check()
    assert watch.chosen[-1] == (expected("sync-easgd", 2, curvature), 2, curvature)


def test_a_resumed_run_keeps_the_curvature(tmp_path: Path, watch: Watch) -> None:
    """At the weights of the checkpoint, it would be another one."""
    run = Sessions(tmp_path / "run", 3, {}, stop=0.03, method="sync-easgd", epochs=2, **CURVED)
    assert run.summary is None and not run.errors
    before = watch.chosen[-1]
    assert Sessions(run.folder, 3, {}).summary and watch.chosen[-1] == before
    assert run.last().vectors["0/method.curvature"] == [before[2]]


def test_without_a_pull_or_sgd_there_is_no_estimate(tmp_path: Path, watch: Watch) -> None:
    for number, options in enumerate(({"rho": 0.0}, {"optimizer": "adam"})):
        Sessions(tmp_path / f"run-{number}", 2, {}, method="sync-easgd", epochs=1, **options).check()
    assert {curvature for _, _, curvature in watch.chosen} == {UNKNOWN}


def test_the_chosen_rho_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "minidl.train", *RUN, "--workers", "2", "--method", "sync-easgd", "--lr", "0.2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("rho = ")]
    assert ", lowered from 2.25: P eta rho = " in line and "an estimated curvature h = " in line
    assert "diverge" not in done.stdout + done.stderr


@pytest.mark.parametrize(("options", "words"), [
    (["--rho", "9", "--lr", "0.1"], "rho = 9 is too large: the bound of the synchronous method"),
    (["--rho", "30", "--lr", "0.1", "--period", "2"], "no bound is known for a period of 2; a simulation on parabolas"),
    (["--lr", "0.25"], "no rho is stable"),
])  # fmt: skip
def test_one_line_warns_of_a_rho_outside_the_stable_region(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main([*RUN, "--workers", "1", "--method", "sync-easgd", *options, "--out", str(tmp_path / "run")]) == 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "diverge" in line]
    assert line.startswith("minidl: elastic averaging may diverge: with 1 replicas") and words in line


def test_fit_warns_too(capfd: pytest.CaptureFixture[str]) -> None:
    chance = np.random.default_rng(0)
    data = chance.standard_normal((48, 4)).astype(np.float32), chance.integers(2, size=48)
    fit(mlp((4,), 2), data, method="sync-easgd", rho=1e3, lr=0.1, momentum=0.0, epochs=1)
    assert "rho = 1000 is too large" in capfd.readouterr().err
