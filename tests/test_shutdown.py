"""Any replica may die at any moment: the run ends with a result, or with a checkpoint of the other replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import Launched
from sessions import Sessions

from minidl.run import checkpoint as files


@pytest.fixture
def sessions(tmp_path: Path) -> Callable[..., Sessions]:
    """Return a function that runs several replicas, each time in a new folder."""
    number = iter(range(10**6))
    return lambda deaths=(), ranks=3, **options: Sessions(
        tmp_path / f"run-{next(number)}", ranks, dict(deaths), epochs=2, **options
    )


@pytest.mark.parametrize("method", ["dpsgd", "gossip", "ps"])
def test_one_dies_at_the_end(sessions: Callable[..., Sessions], method: str) -> None:
    """A replica dies near the end. The final messages carry test scores, which may be lost."""
    whole = sessions(method=method)
    whole.check()
    for moment in sorted(whole.moments)[-8::4]:
        for victim in (0, 1):
            run = sessions({victim: moment + 1e-9}, method=method)
            run.check()
            assert run.summary or method == "dpsgd"


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 2, 3])
@pytest.mark.parametrize("method", ["dpsgd", "allreduce", "local-sgd", "gossip", "ps", "local"])
def test_some_die_at_random_moments(sessions: Callable[..., Sessions], method: str, dead: int) -> None:
    moments = sorted(sessions(method=method, ranks=4).moments)
    random = np.random.default_rng(dead)
    for _ in range(40):
        times = random.choice([*moments, *moments[len(moments) // 2 :]], dead) + 1e-9
        deaths = zip(random.choice(4, dead, replace=False).tolist(), times.tolist())
        sessions(deaths, method=method, ranks=4).check()


def test_all_workers_die(sessions: Callable[..., Sessions]) -> None:
    """Only the parameter server holds the common weights, the center. It must save them before the run ends."""
    whole = sessions(method="ps")
    half = whole.simulation.time / 2
    run = sessions({0: half, 1: half + 1e-9}, method="ps")
    assert run.errors == [f"all workers have died; the center is saved; to continue from it: "
                          f"python -m minidl.train --resume {run.folder}"]  # fmt: skip
    progress = run.last().state["progress"]
    work = run.last().state["work"]
    assert progress["step"] == -(-work["first"] // 2) > 0 and progress["epoch"] == work["first"] // 6


@pytest.mark.parametrize("method", ["dpsgd", "gossip"])
def test_metrics_that_cannot_be_written(tmp_path: Path, method: str) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    run = Sessions(tmp_path, 3, {}, method=method, epochs=3)
    assert len(run.errors) == 1 and "cannot write" in run.errors[0]
    assert len(run.last().state["members"]) == 3


def test_checkpoints_that_a_run_keeps(sessions: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    writing = files.writing
    monkeypatch.setattr(files, "writing", lambda folder, step: (saved.append(step), writing(folder, step))[1])
    sessions(method="dpsgd", validation=0.25)
    assert saved == [2, 4], "each epoch must be saved exactly once"
    run = sessions(method="gossip", validation=0.25, lr=0.001, schedule="constant")
    last = run.last()
    assert run.summary and run.summary["best_step"] == last.state["progress"]["best_step"] >= 0
    assert list(last.state["members"]) == ["0", "1", "2"]
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert [(e["step"], e["epoch"]) for e in entries if e["event"] == "average"] == [(2, 1), (4, 2)]


# Real processes.

KILLED = str(Path(__file__).parent / "replicas" / "killed.py")
SMALL = ["--data", "synthetic:240x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "4", "--quiet"]


def killed(folder: Path, ranks: int, victims: Iterable[int], where: str, *options: str) -> tuple[int, list[Any], str]:
    """Run a job whose victims are killed by SIGKILL when they first call the function `where`; see Launched.finish."""
    who = ",".join(map(str, victims))
    arguments = [who, where, *SMALL, "--out", str(folder), "--json", *options]
    with Launched(ranks, *arguments, program=[KILLED]) as launched:
        return launched.finish()


@pytest.mark.parametrize(("method", "victim", "where"), [
    ("dpsgd", 0, "training.shutdown:_save"),
    pytest.param("dpsgd", 1, "training.shutdown:_save", marks=pytest.mark.slow),
    pytest.param("dpsgd", 0, "training.shutdown:summarise", marks=pytest.mark.slow),
    pytest.param("gossip", 0, "training.output:averaged", marks=pytest.mark.slow),
    pytest.param("gossip", 0, "training.shutdown:gather_numbers", marks=pytest.mark.slow),
    pytest.param("ps", 0, "training.shutdown:gather_numbers", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_is_killed_at_the_end(tmp_path: Path, method: str, victim: int, where: str) -> None:
    code, lines, errors = killed(tmp_path / "run", 3, [victim], where, "--method", method)
    assert (code, errors) == (0, f"minidl: replica {victim} was killed by SIGKILL\n")
    [result] = lines
    assert result["replicas_alive"] == (1 if method == "ps" else 2) and result["epochs"] == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result


def test_all_workers_are_killed(tmp_path: Path) -> None:
    code, lines, errors = killed(tmp_path / "run", 3, [0, 1], "training.session:Session._epoch_done", "--method", "ps")
    words = errors.splitlines()
    assert code == 2 and not lines and len(words) == 3
    assert "the center is saved; to continue from it: python -m minidl.train --resume" in words[2]
    run = [sys.executable, "-m", "minidl.train", "--resume", str(tmp_path / "run"), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["epochs"] == 4
