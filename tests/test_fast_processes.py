"""FAST with real processes: in shared memory and under mpiexec it learns, and a killed replica does not end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench import rows_of
from test_mpi import environment, mpiexec
from test_replicas import LEARNT, SMALL, Command, command  # noqa: F401

OPTIONS = ["--method", "fast", "--topology", "torus", "--lr", "0.005", "--momentum", "0.5"]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gradients", "models"])
def test_shared_memory(command: Command, exchange: str) -> None:  # noqa: F811
    """A replica is killed, and the others are stopped and resumed."""
    options = [*SMALL, *OPTIONS, "--exchange", exchange, "--workers", "4", "--epochs", "40"]
    process = command.start(*options, "--out", "run", "--quiet")
    command.wait_for_epoch("run", 2)
    os.kill(command.replicas()[1], signal.SIGKILL)
    command.wait_for_epoch("run", 6)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    result = command.run("--resume", "run", "--workers", "4")
    assert result["replicas_alive"] == 4 and result["epochs"] == 40 and result["test_accuracy"] > LEARNT
    assert (result["consensus_distance"] == 0) == (exchange == "gradients")


@pytest.mark.parametrize("exchange", [pytest.param("gradients", marks=pytest.mark.slow), "models"])
def test_mpiexec(tmp_path: Path, exchange: str) -> None:
    """No two ranks share memory: all messages and published weights are sent by MPI."""
    options = [*SMALL, *OPTIONS, "--exchange", exchange, "--epochs", "15", "--out", str(tmp_path / "run"), "--json"]
    words = [*mpiexec(), "-n", "4", sys.executable, "-m", "minidl.train", *options]
    variables = environment(MINIDL_THREADS="1", MINIDL_MPI_ONLY="1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["replicas_alive"] == 4 and result["test_accuracy"] > LEARNT
    assert (result["consensus_distance"] == 0) == (exchange == "gradients") and result["bytes_sent"] > 0


@pytest.mark.slow
def test_the_benchmark(root: Path) -> None:
    rows = {row["name"]: row["value"] for row in rows_of(root, "fast.py")}
    assert min(rows[f"{name}-{size}"] for name in ("gradients", "models", "allreduce") for size in (4, 16)) > 10
    assert rows["models-step-16"] < 1.05 * rows["models-step-4"]
