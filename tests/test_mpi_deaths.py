"""Ranks of an MPI job are killed. With Open MPI's `mpiexec --with-ft ulfm` the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import test_mpi as jobs
from replicas.deaths import PIECES
from test_mpi import nothing_left  # noqa: F401 (a fixture)

COUNTING = str(Path(__file__).parent / "replicas" / "counting.py")
RUN = ["--data", "synthetic:500x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--validation", "0.1", "--quiet",
       "--json", "--threads", "1"]  # fmt: skip
BATCHES = 57  # of an epoch of 450 training images


def surviving(ranks: int, *program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a job that survives the death of a rank. Skip the test without Open MPI."""
    command = jobs.mpiexec()
    if "--oversubscribe" not in command:
        pytest.skip("only Open MPI has --with-ft ulfm")
    return subprocess.run([*command, "--with-ft", "ulfm", "-n", str(ranks), sys.executable, *program], timeout=90,
                          capture_output=True, text=True, env=jobs.environment(**environment))  # fmt: skip


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("minidl:")]


@pytest.mark.parametrize("nodes", ["0,0,1,1,2", "0,0,0,0,0", "0,1,0,1,0", "1,0,0,1,1"])
def test_the_others_communicate_after_two_deaths(nodes: str) -> None:
    """Rank 2 dies, then rank 0, which receives rows for its node and answers for the ledger of the work."""
    with tempfile.TemporaryDirectory() as folder:
        done = surviving(5, str(jobs.HELPER), "deaths", "2", "0", RESULTS=folder, RANKS="5", GROUPING=nodes)
        assert done.returncode == 0, done.stderr
        found = {int(file.name): json.loads(file.read_text()) for file in Path(folder).iterdir()}
    assert list(sorted(found)) == [1, 3, 4]
    assert sorted(ours(done.stderr)) == ["minidl: replica 0 died", "minidl: replica 2 died"]
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
