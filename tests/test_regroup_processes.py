"""Real processes: replicas of synchronous methods are killed, and the others go on (--on-death continue)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import PATIENCE, eventually

EPOCHS = 8


class Training:
    """`python -m minidl.train` with four workers, in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        words = ["--data", "synthetic:1024x8x8x1:4", "--model", "mlp", "--batch-size", "8",
                 "--epochs", str(EPOCHS), "--workers", "4", "--on-death", "continue", "--json", "--quiet",
                 "--out", str(folder), *options]  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-m", "minidl.train", *words], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)  # fmt: skip
        eventually(lambda: (folder / "metrics.jsonl").exists() or self.process.poll() is not None, "no first epoch")

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that runs."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                rank = re.search(rb"MINIDL_RANK=(\d+)", Path(f"/proc/{child}/environ").read_bytes())
            except OSError:  # it has just ended
                continue
            if rank:
                found[int(rank[1])] = int(child)
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.ranks()[rank], signal.SIGKILL)

    def finish(self) -> tuple[dict[str, Any], list[str]]:
        """Return the result and the lines of stderr."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, errors
        return json.loads(out), errors.splitlines()

    def epochs(self) -> list[int]:
        entries = [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]
        return [entry["epoch"] for entry in entries if entry["event"] == "epoch"]


def test_two_are_killed_and_the_others_finish(tmp_path: Path) -> None:
    """The first one is the leader, which writes for all."""
    run = Training(tmp_path / "run", "--method", "allreduce")
    run.kill(0)
    eventually(lambda: len(run.epochs()) >= 3, "the others do not go on")
    run.kill(2)
    result, lines = run.finish()
    assert (result["replicas_alive"], result["epochs"], result["consensus_distance"]) == (2, EPOCHS, 0.0)
    assert run.epochs() == [*range(1, EPOCHS + 1)]
    told = [line for line in lines if "go on" in line]
    assert len(told) == 2 and told[0].startswith("minidl: replica 0 died; the other 3 go on from step ")
    assert told[1].startswith("minidl: replica 2 died; the other 2 go on from step ")


@pytest.mark.slow
def test_a_frozen_replica_is_killed_and_the_others_finish(tmp_path: Path) -> None:
    run = Training(tmp_path / "run", "--method", "dpsgd", "--stall", "1")
    os.kill(run.ranks()[1], signal.SIGSTOP)
    result, lines = run.finish()
    assert (result["replicas_alive"], result["epochs"]) == (3, EPOCHS)
    assert any(line.startswith("minidl: replica 1 died; the other 3 go on from step ") for line in lines)


SCRIPT = """
import os, signal, sys
import minidl
from minidl.training.trainer import Trainer

def count(trainer, *arguments):
    if minidl.rank() == 1 and trainer.progress.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return settle(trainer, *arguments)

settle, Trainer._settle = Trainer._settle, count
minidl.seed(0)
model = minidl.models.mlp((4, 4, 1), 4)
history = minidl.fit(model, "synthetic:240x4x4x1:4", validation=0.2, epochs=3, method="allreduce",
                     on_death="continue", batch_size=8, progress=None)
line = f"{[entry['epoch'] for entry in history.epochs]} {history.test.accuracy}" + os.linesep
os.write(1, line.encode())  # one write: the lines of two ranks do not mix
"""


@pytest.mark.slow
def test_a_script_s_fit_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "minidl.launch", "--workers", "3", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert "minidl: replica 1 died; the other 2 go on from step" in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1] and lines[0].startswith("[1, 2, 3] ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ["allreduce", "local-sgd", "dpsgd"])
def test_three_are_killed_at_random_moments(tmp_path: Path, method: str, seed: int) -> None:
    run, random = Training(tmp_path / "run", "--method", method, "--validation", "0.1"), np.random.default_rng(seed)
    order = random.permutation(4).tolist()
    for rank in order[:3]:
        time.sleep(random.random() * 0.4)
        if rank in run.ranks():
            run.kill(rank)
    result, _ = run.finish()
    assert result["replicas_alive"] >= 1 and result["epochs"] == EPOCHS
    assert run.epochs() == [*range(1, EPOCHS + 1)]
