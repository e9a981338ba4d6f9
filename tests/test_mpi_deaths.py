"""Ranks of an MPI job are killed, frozen or stopped. With Open MPI's `mpiexec --with-ft ulfm` the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import test_mpi as jobs
from launching import eventually
from quick import quick
from replicas.deaths import PIECES
from test_mpi import nothing_left  # noqa: F401 (a fixture)

COUNTING = str(Path(__file__).parent / "replicas" / "counting.py")
RUN = ["--data", "synthetic:500x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--validation", "0.1", "--quiet",
       "--json", "--threads", "1"]  # fmt: skip
ULFM = ["--with-ft", "ulfm"]
BATCHES = 57  # of an epoch of 450 training images


def open_mpi() -> bool:
    return "--oversubscribe" in jobs.mpiexec()


def run(ranks: int, options: list[str], *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a job. options: of mpiexec."""
    return subprocess.run([*jobs.mpiexec(), *options, "-n", str(ranks), sys.executable, *program], timeout=300,
                          capture_output=True, text=True, env=jobs.environment(**environment))  # fmt: skip


def surviving(ranks: int, *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a job that survives the death of a rank. Skip the test without Open MPI."""
    if not open_mpi():
        pytest.skip("only Open MPI has --with-ft ulfm")
    return run(ranks, ULFM, *program, **environment)


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("minidl:")]


@pytest.mark.parametrize("nodes", quick(
    ["0,0,1,1,2", "0,0,0,0,0", "0,1,0,1,0", "1,0,0,1,1"], "0,0,1,1,2", "0,0,0,0,0",
))  # fmt: skip
def test_the_others_communicate_after_two_deaths(nodes: str) -> None:
    """Rank 2 dies, then rank 0, which receives rows for its node and answers for the ledger of the work."""
    with tempfile.TemporaryDirectory() as folder:
        done = surviving(5, str(jobs.HELPER), "deaths", "2", "0", RESULTS=folder, RANKS="5", GROUPING=nodes)
        assert done.returncode == 0, done.stderr
        found = {int(file.name): json.loads(file.read_text()) for file in Path(folder).iterdir()}
    assert list(sorted(found)) == [1, 3, 4]
    told = Counter(ours(done.stderr))
    assert told.pop("minidl: replica 0 died") == 1
    # The first live rank reports. Rank 0 may die before that, or before rank 1 knows of rank 2, which it reports again.
    assert set(told) <= {"minidl: replica 2 died"} and told.total() <= 2
    settled = Counter(piece for result in found.values() for piece in result["settled"])
    assert set(settled) <= set(range(PIECES)) and set(settled.values()) == {1}
    assert PIECES - len(settled) == 3 + 2 + 3 + 2 + 2, "the victims have settled the others"
    assert all(result["alive"] == [1, 3, 4] for result in found.values())
    assert {result["repeated"] for result in found.values()} <= {1, 2}, "the begin of rank 2 may be lost with it"


def train(log: Path, victim: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return surviving(3, COUNTING, str(log), victim, *arguments, **environment)


def settled(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split()))


def test_a_killed_leader_is_not_missed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = train(log, "0:15:9", *RUN, "--method", "gossip", "--epochs", "3", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    [result] = [json.loads(line) for line in done.stdout.splitlines()]
    assert ours(done.stderr) == ["minidl: replica 0 died"]
    assert settled(log) == Counter(range(3 * BATCHES)) and result["samples"] == 3 * 450
    assert result["replicas_alive"] == 2 and result["batches_repeated"] == 1


@pytest.mark.parametrize(("method", "why", "environment"), [
    ("gossip", "the ledger of the work, which was on its node", {"MINIDL_MPI_ONLY": "1"}),
    ("allreduce", "a collective operation", {}),
])  # fmt: skip
def test_a_run_that_cannot_go_on_is_saved(tmp_path: Path, method: str, why: str, environment: dict[str, str]) -> None:
    log, out = tmp_path / "log", str(tmp_path / "run")
    log.touch()
    done = train(log, "0:15:9", *RUN, "--method", method, "--epochs", "12", "--out", out, **environment)
    assert done.returncode == 2
    died, error = ours(done.stderr)
    assert died == "minidl: replica 0 died" and f"replica 0 died while others waited for {why}" in error
    assert error.endswith(f"to continue from their average: python -m minidl.train --resume {out}")
    before = settled(log)
    done = train(log, "", "--resume", out, "--quiet", "--json", **environment)
    assert done.returncode == 0, done.stderr
    [result] = [json.loads(line) for line in done.stdout.splitlines()]
    assert result["epochs"] == 12 and result["replicas_alive"] == 3
    if method == "gossip":
        lost = set(range(12 * BATCHES)) - set(settled(log))
        assert len(lost) <= 8 and max(settled(log).values()) <= 2 and before, "a few batches per rank"


def test_a_death_that_ends_the_job_can_be_resumed(tmp_path: Path) -> None:
    """With MPICH one of the others says so, unless mpiexec kills them first: it sends SIGUSR1, and often SIGKILL."""
    log, out = tmp_path / "log", str(tmp_path / "run")
    options = [] if open_mpi() else ["-disable-auto-cleanup"]
    done = run(3, options, COUNTING, str(log), "1:60:9", *RUN, "--method", "dpsgd", "--epochs", "6", "--out", out)
    assert done.returncode != 0
    if not open_mpi():
        lines = ours(done.stderr)
        assert len(lines) <= 1, done.stderr
        assert all(line.endswith("a rank has died, which ends a job of MPICH; --resume continues a run from its last "
                                 "checkpoint") for line in lines)  # fmt: skip
    done = run(3, [], COUNTING, str(log), "", "--resume", out, "--quiet", "--json")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["epochs"] == 6, done.stderr


def test_a_frozen_replica_is_left_out_and_killed_at_the_end(tmp_path: Path) -> None:
    """Under MPICH its death ends the job, so it is killed when all others have finished."""
    log = tmp_path / "log"
    words = [str(log), "1:5:19", *RUN, "--method", "gossip", "--epochs", "3", "--stall", "1"]
    done = run(3, ULFM if open_mpi() else [], COUNTING, *words, "--out", str(tmp_path / "run"))
    [result] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert result["replicas_alive"] == 2 and result["samples"] == 3 * 450
    assert settled(log) == Counter(range(3 * BATCHES))
    words = [line.partition("replica 1 (")[2].partition(") ")[2] for line in ours(done.stderr)]
    assert "still shows no sign of life: it is killed, so that the others can end" in words, done.stderr
    assert any(word.endswith(": it is left out until it wakes") for word in words)
    assert not open_mpi() or done.returncode == 0


@pytest.mark.slow  # the frozen replica has some seconds to notice the signal
def test_a_signal_ends_a_synchronous_run_with_a_frozen_replica(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = run(3, ULFM if open_mpi() else [], COUNTING, str(tmp_path / "log"), "1:20:19,0:20:15", *RUN, "--method",
               "allreduce", "--epochs", "12", "--out", out)  # fmt: skip
    lines = ours(done.stderr)
    assert any(line.endswith("since the signal: it is killed") for line in lines), done.stderr
    assert lines[-1] == f"minidl: saved; to continue: python -m minidl.train --resume {out}"
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("signum", "saved"), [(10, True), (15, False)])
def test_signals_to_open_mpi_s_mpiexec(tmp_path: Path, signum: int, saved: bool) -> None:
    """It forwards SIGUSR1, and the ranks have time to save. After SIGTERM it kills them within half a second."""
    if not open_mpi():
        pytest.skip("for Open MPI")
    log, out = tmp_path / "log", tmp_path / "run"
    log.touch()
    words = [COUNTING, str(log), "", *RUN, "--method", "gossip", "--epochs", "9999", "--out", str(out)]
    job = subprocess.Popen([*jobs.mpiexec(), "-n", "3", sys.executable, *words], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, env=jobs.environment())  # fmt: skip
    try:
        eventually(lambda: settled(log).total() > 200, "no replica trains")
        job.send_signal(signum)
        errors = job.communicate(timeout=300)[1]
    finally:
        job.kill()
    lines = [line for line in ours(errors) if "to continue" in line]
    if saved:
        assert lines == [f"minidl: saved; to continue: python -m minidl.train --resume {out}"]
        assert job.returncode == 128 + signum
        return
    victims = ",".join(f"0:{step}:15" for step in range(1, 9999))
    run(3, [], COUNTING, str(log), victims, "--resume", str(out), "--quiet")
    assert not list((out / "checkpoints").glob(".new-*")), "what a killed rank has left is removed"
