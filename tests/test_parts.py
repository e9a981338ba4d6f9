"""`--parts`: the same training up to rounding, with all methods; bad numbers of parts; Ctrl-C and kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import eventually, is_gone

import minidl
from minidl import models, nn
from minidl.comm.fabric.base import Fabric
from minidl.comm.replica import Engine, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.data import load
from minidl.engine.jit import set_threads, threads
from minidl.errors import ConfigError
from minidl.program.partitioned import PartitionedGradient
from minidl.program.replay import Gradient
from minidl.run.config import resolve
from minidl.simulate import main as simulate
from minidl.train import main

SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--lr", "0.01", "--quiet"]
PARTS = ["--threads", "2", "--parts", "2"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = threads()
    set_threads(2)
    if threads() < 2:
        pytest.skip("needs two cores")
    yield
    set_threads(before)


def fitted(**options: Any) -> tuple[np.ndarray, minidl.History]:
    nn.seed(1)
    model = models.build("mlp", (4, 4, 1), 4)
    options = {"epochs": 2, "batch_size": 16, "lr": 0.01, "threads": 2, "progress": None, **options}
    history = minidl.fit(model, load("synthetic:90x4x4x1:4"), **options)
    return model.flatten().theta.copy(), history


def test_fit_in_parts_equals_fit_up_to_rounding() -> None:
    """The last batch of an epoch has 10 images."""
    (one, told), (two, also), (again, _) = fitted(), fitted(parts=2), fitted(parts=2)
    assert two.tobytes() == again.tobytes() != one.tobytes()
    assert np.linalg.norm(two - one) < 1e-5 * np.linalg.norm(one)
    assert also.epochs[-1]["loss"] == pytest.approx(told.epochs[-1]["loss"], rel=1e-5)
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("minidl-part")], "threads are left")


def test_one_part_is_the_default() -> None:
    assert fitted(parts=1)[0].tobytes() == fitted()[0].tobytes()
    config, model = resolve({}, {}), models.build("mlp", (4, 4, 1), 4)
    assert config.parts == 1 and type(Engine(model, config).gradient) is Gradient


def test_a_replica_in_parts_gives_signs_of_life() -> None:
    fabric = Fabric(LoopbackTransport())
    engine = Replica(Engine(models.build("mlp", (4, 4, 1), 4), resolve({}, {"parts": 2})), fabric).engine
    assert isinstance(engine.gradient, PartitionedGradient) and engine.gradient.waiting == fabric.beat
    assert len(engine.gradient.cores) == 2 and engine.gradient.threads == 1


@pytest.mark.parametrize(("words", "expected"), [
    ("--parts 0", "parts: expected a whole number between 1 and 4096, got 0"),
    ("--parts -2", "parts: expected a whole number between 1 and 4096, got -2"),
    ("--parts half", "parts: expected a whole number between 1 and 4096, got 'half'"),
    ("--parts 3", "parts 3 and batch-size 16: expected a batch-size that is a multiple of the parts"),
    ("--threads 2 --parts 4", "parts 4: this replica has 2 threads; expected a number of parts that divides it, or"),
    ("--threads 1 --parts 2", "parts 2: this replica has 1 thread; expected"),
])  # fmt: skip
def test_bad_numbers_of_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    assert main([*SMALL, *words.split(), "--out", str(tmp_path / "run")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("minidl: error: " + expected) and not (tmp_path / "run").exists()


def test_fit_refuses_what_the_command_line_refuses() -> None:
    for options in ({"parts": 0}, {"parts": 3}, {"parts": 2, "threads": 1}):
        with pytest.raises(ConfigError, match="parts"):
            fitted(**options)


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "minidl.train", *SMALL, "--out", str(folder), *words]


def trained(folder: Path, *words: str) -> bytes:
    done = subprocess.run(command(folder, "--workers", "2", *words), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "model.safetensors").read_bytes()


def vector(file: bytes) -> np.ndarray:
    """Return all numbers of a .safetensors file, which begins with the length of its header, and the header."""
    return np.frombuffer(file[8 + int.from_bytes(file[:8], "little") :], np.float32)


def test_two_replicas_in_parts_with_a_synchronous_method(tmp_path: Path) -> None:
    """Small buckets: the parts compute the gradient in several stages."""
    words = ["--method", "allreduce", "--bucket", "0.01", "--steps", "3"]
    parts = trained(tmp_path / "parts", *words, *PARTS)
    assert simulate([*SMALL, *words, "--ranks", "2", "--out", str(tmp_path / "whole")]) == 0  # with undivided batches
    two, one = vector(parts), vector((tmp_path / "whole" / "model.safetensors").read_bytes())
    assert two.tobytes() != one.tobytes()
    assert np.linalg.norm(two - one) < 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_two_replicas_in_parts_with_gossip_until_a_signal(tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(command(folder, "--workers", "2", "--method", "gossip", *PARTS, "--epochs", "1000000"),
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        eventually(lambda: len(metrics(folder)) > 3, "no epoch has ended")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signum)
        _, errors = process.communicate(timeout=300)
    losses = [json.loads(line)["loss"] for line in metrics(folder)]
    assert len(children) == 2 and losses[0] > losses[3]
    for child in children:
        eventually(lambda child=child: is_gone(int(child)), "a replica is left")
    if signum == signal.SIGINT:
        assert process.returncode == 130 and "saved; to continue" in errors


def metrics(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def test_a_resumed_run_may_have_other_parts(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert main([*SMALL, *PARTS, "--steps", "4", "--out", run]) == 0
    assert main(["--resume", run, "--parts", "1", "--steps", "6", "--quiet"]) == 0
    assert [json.loads(line)["step"] for line in metrics(tmp_path / "run")] == [6]
