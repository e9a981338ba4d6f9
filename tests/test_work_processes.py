"""Claimed work in real processes: each piece is trained once, also after kill -9, a stop, and with other replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_mpi as jobs
from launching import Launched

COUNTING = str(Path(__file__).parent / "replicas" / "counting.py")
SMALL = ["--data", "synthetic:500x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--quiet", "--json"]
PIECES = 57  # of an epoch of 450 training images
RUN = [*SMALL, "--validation", "0.1", "--epochs"]
KILL, TERM = 9, 15


def settled(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split()))


def mpi(ranks: int, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run a job; return its summary, or {} if a signal stopped it."""
    command = [*jobs.mpiexec(), "-n", str(ranks), sys.executable, COUNTING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=jobs.environment(**environment))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert bool(found) == (done.returncode == 0), done.stderr
    return found[0] if found else {}


@pytest.mark.parametrize("method", ["gossip", pytest.param("ps", marks=pytest.mark.slow)])
def test_one_is_killed(tmp_path: Path, method: str) -> None:
    """The replica is killed in its 20th step, so its batch is trained again. The others train all the rest."""
    log = tmp_path / "log"
    arguments = [str(log), f"1:20:{KILL}", *RUN, "3", "--method", method, "--out", str(tmp_path / "run")]
    with Launched(4, *arguments, program=[COUNTING]) as launched:
        code, [result], errors = launched.finish()
    assert code == 0 and errors == "minidl: replica 1 was killed by SIGKILL\n"
    assert settled(log) == Counter(range(3 * PIECES))
    assert result["batches_repeated"] == 1 and result["samples"] == 3 * 450 and result["idle_seconds"] >= 0


@pytest.mark.parametrize("environment", [
    pytest.param({"MINIDL_MPI_ONLY": "1"}, id="messages"), pytest.param({}, id="memory", marks=pytest.mark.slow),
])  # fmt: skip
def test_stopped_and_resumed_under_mpi_with_another_number_of_ranks(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    log, out = tmp_path / "log", str(tmp_path / "run")
    arguments = ["6", "--method", "gossip", "--threads", "1", "--out", out]
    assert not mpi(3, environment, str(log), f"0:15:{TERM}", *RUN, *arguments)
    before = settled(log)
    assert 15 <= before.total() < 6 * PIECES and max(before.values()) == 1
    result = mpi(2, environment, str(log), "", "--resume", out, "--quiet", "--json")
    assert settled(log) == Counter(range(6 * PIECES))
    assert result["samples"] == 6 * 450 and result["batches_repeated"] == 0 and result["epochs"] == 6
