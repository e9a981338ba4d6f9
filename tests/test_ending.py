"""Whoever dies, and whenever: a run ends. Whole sessions on a simulated cluster, where a death can be put anywhere."""

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

from minidl import checkpoint as files
from minidl.comm.cluster import parse
from minidl.comm.fabric.sim import Simulation
from minidl.config import resolve
from minidl.errors import AbortedError, MinidlError
from minidl.run import Run
from minidl.session import Session
from minidl.signals import Signals, Stopped

CLUSTER = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", count = 4, devices = ["core"]}]
between = {alpha = 1e-3, rate = 1e6}
"""
OPTIONS: dict[str, Any] = dict(data="synthetic:48x2x2x1:2", model="mlp", batch_size=8, quiet=True)


class Sessions:
    """A run of several replicas, each with a session of its own as in a process of its own, on a virtual clock.

    deaths: {rank: seconds}. Afterwards `results` has what each rank returned, or the error that it ended with.
    """

    def __init__(self, folder: Path, ranks: int, deaths: dict[int, float], **options: Any) -> None:
        self.folder, self.options = folder, options
        lines = ", ".join(f"{{rank = {rank}, time = {time!r}}}" for rank, time in deaths.items())
        self.simulation = simulation = Simulation(parse(f"{CLUSTER}deaths = [{lines}]"), ranks, flops=1e5)
        self.failed, self.moments = False, set[float]()
        plan = simulation.at

        def at(time: float, call: Callable[..., None], *arguments: Any) -> None:
            self.moments.add(time)
            plan(time, call, *arguments)

        simulation.at = at  # type: ignore[method-assign]
        for fabric in simulation.fabrics:
            fabric.close = lambda: None  # type: ignore[method-assign]  # its state stays, as a process's does
            fabric.aborted = lambda: self.failed  # type: ignore[method-assign]
        self.results: dict[int, Any] = simulation.run({rank: self.main(rank) for rank in range(ranks)})

    def main(self, rank: int) -> Callable[[], Any]:
        def work() -> Any:
            try:
                config = resolve(OPTIONS, {**self.options, "out": str(self.folder)})
                session = Session(config, Signals(), self.simulation.fabric(rank))
                with session.lead(lambda: Run.create(session.config)):
                    return session.train()
            except Stopped as stopped:
                return stopped
            except MinidlError as error:
                self.failed = True  # as Job.fail has it
                for fabric in self.simulation.fabrics:
                    fabric.wake()
                return error

        return work

    def check(self) -> None:
        """It has ended with a result, or with an error and what could be saved."""
        if self.summary is not None:
            assert json.loads((self.folder / "summary.json").read_text()) == self.summary
            assert self.summary["steps"] == self.last().state["progress"]["step"]
            assert len(self.last().state["members"]) >= self.summary["replicas_alive"] > 0
            return
        assert self.errors and not (self.folder / "summary.json").exists()
        words = " ".join(self.errors)
        if "saved" in words:
            assert f"python -m minidl.train --resume {self.folder}" in words and self.last()
        else:  # before the first step
            assert "died while others waited for" in words and not files.last(self.folder / "checkpoints")

    def last(self) -> files.Checkpoint:
        folder = files.last(self.folder / "checkpoints")
        assert folder
        return files.load(folder)

    @property
    def errors(self) -> list[str]:
        return [str(r) for r in self.results.values() if isinstance(r, MinidlError) and not isinstance(r, AbortedError)]

    @property
    def summary(self) -> dict[str, Any] | None:
        found = [result for result in self.results.values() if isinstance(result, dict)]
        assert len(found) <= 1
        return found[0] if found else None


@pytest.fixture
def sessions(tmp_path: Path) -> Callable[..., Sessions]:
    """Each run in a folder of its own."""
    number = iter(range(10**6))
    return lambda deaths=(), ranks=3, **options: Sessions(
        tmp_path / f"run-{next(number)}", ranks, dict(deaths), epochs=2, **options
    )


@pytest.mark.parametrize("method", ["dpsgd", "gossip", "ps"])
def test_one_dies_at_the_end(sessions: Callable[..., Sessions], method: str) -> None:
    """Between any two of the last messages; the last of all are the scores, and only they are missed then."""
    whole = sessions(method=method)
    whole.check()
    for moment in sorted(whole.moments)[-8:]:
        for victim in (0, 1):
            run = sessions({victim: moment + 1e-9}, method=method)
            run.check()
            assert run.summary or method == "dpsgd"


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 2, 3])
@pytest.mark.parametrize("method", ["dpsgd", "allreduce", "local-sgd", "gossip", "ps", "local"])
def test_some_die_whenever(sessions: Callable[..., Sessions], method: str, dead: int) -> None:
    moments = sorted(sessions(method=method, ranks=4).moments)
    random = np.random.default_rng(dead)
    for _ in range(40):
        times = random.choice([*moments, *moments[len(moments) // 2 :]], dead) + 1e-9
        deaths = zip(random.choice(4, dead, replace=False).tolist(), times.tolist())
        sessions(deaths, method=method, ranks=4).check()


def test_all_workers_die(sessions: Callable[..., Sessions]) -> None:
    """The server has the center; were it saved by nobody, nothing would be left of the steps after the last epoch."""
    whole = sessions(method="ps")
    half = whole.simulation.time / 2
    run = sessions({0: half, 1: half + 1e-9}, method="ps")
    assert run.errors == [f"all workers have died; the center is saved: to go on from it: "
                          f"python -m minidl.train --resume {run.folder}"]  # fmt: skip
    progress = run.last().state["progress"]
    assert progress["epoch"] >= 0 and progress["step"] == 3 * progress["epoch"] + progress["batch"] > 0


@pytest.mark.parametrize("method", ["dpsgd", "gossip"])
def test_a_journal_that_cannot_be_written(tmp_path: Path, method: str) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    run = Sessions(tmp_path, 3, {}, method=method, epochs=3)
    assert len(run.errors) == 1 and "cannot write" in run.errors[0]
    assert len(run.last().state["members"]) == 3


def test_what_is_kept_at_the_end(sessions: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = files.save
    monkeypatch.setattr(files, "save", lambda folder, step, *rest: (saved.append(step), save(folder, step, *rest)))
    sessions(method="dpsgd", validation=0.25)
    assert saved == [2, 4], "each epoch once, the last one, too"
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
    """A job whose victims are killed by SIGKILL where they call a function for the first time; see Launched.finish."""
    who = ",".join(map(str, victims))
    arguments = [who, where, *SMALL, "--out", str(folder), "--json", *options]
    with Launched(ranks, *arguments, program=[KILLED]) as launched:
        return launched.finish()


@pytest.mark.parametrize(("method", "victim", "where"), [
    ("dpsgd", 0, "ending.collect"),
    ("dpsgd", 1, "ending.collect"),
    ("dpsgd", 0, "ending.together"),
    ("gossip", 0, "session.averaged"),
    ("gossip", 0, "ending.gather_numbers"),
    ("ps", 0, "ending.gather_numbers"),
])  # fmt: skip
def test_one_is_killed_at_the_end(tmp_path: Path, method: str, victim: int, where: str) -> None:
    code, lines, errors = killed(tmp_path / "run", 3, [victim], where, "--method", method)
    assert (code, errors) == (0, f"minidl: replica {victim} was killed by SIGKILL\n")
    [result] = lines
    assert result["replicas_alive"] == (1 if method == "ps" else 2) and result["epochs"] == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result


def test_all_workers_are_killed(tmp_path: Path) -> None:
    code, lines, errors = killed(tmp_path / "run", 3, [0, 1], "session.Session._epoch_done", "--method", "ps")
    words = errors.splitlines()
    assert code == 2 and not lines and len(words) == 3
    assert "the center is saved: to go on from it: python -m minidl.train --resume" in words[2]
    run = [sys.executable, "-m", "minidl.train", "--resume", str(tmp_path / "run"), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["epochs"] == 4
