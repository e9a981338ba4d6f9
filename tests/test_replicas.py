"""Several replicas on one machine, started by `python -m minidl.train`: their files, and what happens after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE, eventually, is_gone

from bench.fault_jobs import ranks_of

SMALL = ["--data", "synthetic:1800x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--lr", "0.02", "--seed", "3"]
LEARNT = 0.6  # test accuracy: a single replica reaches about 0.75 on these data; chance is 0.25


class Command:
    """Runs `python -m minidl.train ...` with several replicas in the given folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(self.root), "MINIDL_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minidl.train", *options], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return self.process

    def run(self, *options: str, code: int = 0) -> dict[str, Any]:
        out, err = self.start(*options, "--json").communicate(timeout=300)
        assert self.process and self.process.returncode == code, err
        return json.loads(out.splitlines()[-1]) if not code else {"error": err}

    def replicas(self) -> dict[int, int]:
        """Return {rank: process id} of the running replicas."""
        assert self.process
        return ranks_of(self.process.pid)

    def wait_for_epoch(self, run: str, epoch: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
                if any(json.loads(line)["epoch"] > epoch for line in lines):
                    return
            time.sleep(0.02)
        raise AssertionError(f"epoch {epoch} was not finished in {PATIENCE} s")


@pytest.fixture
def command(root: Path, tmp_path: Path) -> Iterator[Command]:
    started = Command(root, tmp_path)
    yield started
    if started.process:
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.communicate()


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_local_replicas_drift_apart(command: Command) -> None:
    result = command.run(*SMALL, "--workers", "2", "--method", "local", "--epochs", "2", "--validation", "0.1")
    assert result["consensus_distance"] > 1e-3 and result["best_step"] > 0
    entries = [json.loads(line) for line in (command.folder / result["out"] / "metrics.jsonl").open()]
    assert [entry["epoch"] for entry in entries if entry["event"] == "average"] == [1, 2]


@pytest.mark.parametrize("method", [
    "--method dpsgd --topology ring",
    pytest.param("--method allreduce", marks=pytest.mark.slow),
    pytest.param("--method local-sgd --period 3", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_with_the_same_options_is_bit_identical_also_if_it_is_stopped(command: Command, method: str) -> None:
    result = command.run(*SMALL, "--workers", "3", *method.split(), "--epochs", "12", "--out", "whole")
    assert result["workers"] == 3 and result["bytes_sent"] > 0 and result["messages"] > 0
    assert result["accuracy_worst"] <= result["accuracy_best"] and result["consensus_distance"] < 1e-3
    assert result["test_accuracy"] == result["accuracy_average"] > LEARNT
    entries = [json.loads(line) for line in (command.folder / "whole" / "metrics.jsonl").open()]
    epochs = [entry for entry in entries if entry["event"] == "epoch"]
    assert [entry["epoch"] for entry in epochs] == [*range(1, 13)]
    assert 0 < epochs[0]["bytes_sent"] < epochs[1]["bytes_sent"] < result["bytes_sent"]
    assert all(0 <= entry["wait_fraction"] < 1 and entry["consensus_distance"] < 0.1 for entry in epochs)
    process = command.start("--config", "whole/config.toml", "--out", "run", "--quiet")
    command.wait_for_epoch("run")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143 and err == "minidl: saved; to continue: python -m minidl.train --resume run\n"
    command.run("--resume", "run")
    assert weights(command.folder / "run") == weights(command.folder / "whole")


@pytest.mark.slow  # test_work_processes.py has the same under mpiexec
def test_resumed_with_another_number_of_workers(command: Command) -> None:
    process = command.start(*SMALL, "--workers", "3", "--epochs", "25", "--out", "run", "--quiet")
    command.wait_for_epoch("run")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    result = command.run("--resume", "run", "--workers", "2")
    assert result["workers"] == 2 and result["epochs"] == 25 and result["test_accuracy"] > LEARNT


@pytest.mark.slow
def test_gossip_stopped_and_resumed(command: Command) -> None:
    options = [*SMALL, "--workers", "3", "--method", "gossip", "--mix", "mass", "--epochs", "25"]
    process = command.start(*options, "--out", "run", "--quiet")
    command.wait_for_epoch("run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    checkpoint = max((command.folder / "run" / "checkpoints").glob("step-*"))
    from minidl.run import checkpoint as files

    vectors = files.load(checkpoint).vectors
    assert sum(vectors[f"{rank}/method.mass"][0] for rank in range(3)) == 3.0, "no mass is lost, and none is in flight"
    result = command.run("--resume", "run")
    assert result["replicas_alive"] == 3 and result["test_accuracy"] > LEARNT


@pytest.mark.slow
def test_parameter_server_stopped_and_resumed(command: Command) -> None:
    process = command.start(*SMALL, "--workers", "2", "--method", "ps", "--epochs", "20", "--out", "run", "--quiet")
    command.wait_for_epoch("run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    result = command.run("--resume", "run")
    assert result["workers"] == 2 and result["epochs"] == 20 and result["test_accuracy"] > LEARNT
    out, _ = command.start("--resume", "run", "--json").communicate(timeout=300)
    assert json.loads(out) == result, "resuming a finished run prints the same result"


@pytest.mark.slow
def test_replicas_that_stopped_in_different_epochs(command: Command) -> None:
    options = [*SMALL, "--workers", "2", "--method", "gossip", "--validation", "0.1", "--epochs", "40"]
    process = command.start(*options, "--out", "run", "--quiet")
    command.wait_for_epoch("run")
    slow = command.replicas()[1]
    os.kill(slow, signal.SIGSTOP)
    command.wait_for_epoch("run", 10)
    process.send_signal(signal.SIGTERM)
    os.kill(slow, signal.SIGCONT)
    process.communicate(timeout=300)
    assert process.returncode == 143
    assert command.run("--resume", "run")["epochs"] == 40


def test_gossip_continues_without_killed_replicas(command: Command) -> None:
    process = command.start(*SMALL, "--workers", "4", "--method", "gossip", "--epochs", "15", "--out", "run", "--json")
    command.wait_for_epoch("run")
    replicas = command.replicas()
    os.kill(replicas[0], signal.SIGKILL)
    os.kill(replicas[2], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and all(f"replica {victim} was killed by SIGKILL" in err for victim in (0, 2))
    result = json.loads(out.splitlines()[-1])
    assert result["replicas_alive"] == 2 and result["test_accuracy"] > LEARNT
    assert "epoch  15/15" in err, "the next leader reports progress"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])  # 0 leads
def test_dpsgd_stops_and_saves_when_a_replica_is_killed(command: Command, victim: int) -> None:
    options = [*SMALL, "--workers", "3", "--topology", "ring", "--epochs", "100000", "--out", "run", "--quiet"]
    process = command.start(*options)
    command.wait_for_epoch("run")
    os.kill(command.replicas()[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    lines = err.splitlines()
    assert process.returncode == 2 and len(lines) == 2 and f"replica {victim} was killed by SIGKILL" in lines[0], err
    assert "error" in lines[1] and f"replica {victim} died" in lines[1] and "--resume run" in lines[1]
    process = command.start("--resume", "run", "--quiet")
    before = len((command.folder / "run" / "metrics.jsonl").read_text().splitlines())
    deadline = time.monotonic() + PATIENCE
    while len((command.folder / "run" / "metrics.jsonl").read_text().splitlines()) < before + 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_gossip_resumes_from_its_last_epoch_after_the_launcher_is_killed(command: Command) -> None:
    """The replicas exit with the launcher."""
    options = [*SMALL, "--workers", "2", "--method", "gossip", "--epochs", "15", "--out", "run", "--quiet"]
    process = command.start(*options)
    command.wait_for_epoch("run", 2)
    replicas = command.replicas()
    assert len(replicas) == 2
    process.kill()
    eventually(lambda: all(map(is_gone, replicas.values())), "a replica does not exit with the launcher")
    process.communicate()
    result = command.run("--resume", "run")
    assert result["epochs"] == 15 and result["replicas_alive"] == 2 and result["test_accuracy"] > LEARNT


@pytest.mark.parametrize(("options", "message"), [
    (["--workers", "2", "--data", "nothing.npz"], "nothing.npz"),
    pytest.param(["--workers", "3", "--topology", "hypercube"], "hypercube", marks=pytest.mark.slow),
    pytest.param(["--workers", "2", "--shards", "skewed:x"], "skewed:ALPHA", marks=pytest.mark.slow),
    pytest.param(["--workers", "2", "--method", "gossip", "--mix", "mass", "--exchange", "pull"], "mass",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_an_error_of_all_replicas_is_one_line(command: Command, options: list[str], message: str) -> None:
    data = [] if "--data" in options else SMALL[:4]
    error = command.run(*data, *options, "--quiet", code=2)["error"]
    assert error.startswith("minidl: error: ") and message in error and error.count("\n") == 1
    assert not list(command.folder.iterdir()), "a run that never started leaves no folder"
