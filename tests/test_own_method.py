"""The method in CONTRIBUTING.md: it runs in a simulation, in processes on one machine and under mpiexec.

A folder contains a package minidl with the method's file and its line in METHODS. It takes all other files from the
checkout, so its kernels are compiled only once.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quick import quick
from test_mpi import environment, mpiexec

from minidl.run import checkpoint as files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidl"
SMALL = ("--data", "synthetic:900x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--lr", "0.02", "--json")
ALONE = {"MINIDL_WORKERS": "", "MINIDL_THREADS": "1"}


def example() -> str:
    """Return the method's file, as CONTRIBUTING.md contains it."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A method is one file")[2]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a package minidl that has the method `triggered`."""
    folder = tmp_path_factory.mktemp("own")
    package = folder / "minidl"
    methods = package / "comm" / "methods"
    shutil.copytree(PACKAGE / "comm" / "methods", methods, ignore=shutil.ignore_patterns("__pycache__"))
    for file in PACKAGE.glob("*.py"):
        shutil.copy(file, package)
    shutil.copytree(PACKAGE / "clusters", package / "clusters")
    with (package / "__init__.py").open("a") as file:
        file.write(f"\n__path__.append({str(PACKAGE)!r})\n")
    (methods / "triggered.py").write_text(example())
    [line] = re.findall('`("triggered": .*,)`', (ROOT / "CONTRIBUTING.md").read_text())
    registry = methods / "__init__.py"
    text = registry.read_text()
    registry.write_text(text.replace("\n}\n", f"\n    {line}\n}}\n", 1))
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = environment(**ALONE)
    variables["PYTHONPATH"] = str(folder)
    return subprocess.Popen(words, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    with started(folder, *words) as process:
        try:
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == code, errors
    return out, errors


def test_the_example_has_at_most_40_lines_of_code() -> None:
    code = example().partition('"""\n\n')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


TRANSPORTS: dict[str, Callable[[], list[str]]] = {
    "simulation": lambda: command("minidl.simulate", "--ranks", "3"),
    "launcher": lambda: command("minidl.train", "--workers", "3"),
    "mpiexec": lambda: [*mpiexec(), "-n", "3", *command("minidl.train")],
}


def trained(folder: Path, transport: str, drift: str) -> int:
    """Train three replicas; return how many models they have mixed in."""
    options = ["--method", "triggered", "--drift", drift, "--epochs", "10", "--out", f"{transport}-{drift}"]
    out, _ = run(folder, *TRANSPORTS[transport](), *SMALL, *options)
    summary = json.loads(out.splitlines()[-1])
    assert (summary["method"], summary["replicas_alive"]) == ("triggered", 3)
    assert summary["test_accuracy"] > 0.35, "chance is 0.25"
    assert f"[method.triggered]\ndrift = {drift}\n" in (folder / f"{transport}-{drift}" / "config.toml").read_text()
    return int(summary["staleness"]["count"])


@pytest.mark.parametrize("transport", quick(TRANSPORTS, "simulation", "mpiexec"))
def test_it_runs_on_every_transport(folder: Path, transport: str) -> None:
    assert trained(folder, transport, "0.002") > 10


def test_a_larger_drift_sends_less(folder: Path) -> None:
    assert trained(folder, "simulation", "0.5") < 10


def test_its_option_is_in_the_help_and_refused_by_other_methods(folder: Path) -> None:
    out, _ = run(folder, *command("minidl.train", "--help", "triggered"))
    assert "method triggered: Gossip by events" in out
    assert "--drift X relative change after which a replica sends its model (default: 0.05)" in " ".join(out.split())
    out, _ = run(folder, *command("minidl.train", "--help"))
    assert "only for the method triggered:" in out
    _, errors = run(folder, *command("minidl.train", "--method", "gossip", "--drift", "1"), code=2)
    assert errors == ("minidl: error: drift is an option of the method triggered, not of gossip: leave it out, or "
                      "choose another method\n")  # fmt: skip


def stop(folder: Path, out: str, epochs: int, *words: str) -> files.Checkpoint:
    """Stop a run of several processes after so many epochs; return its checkpoint."""
    with started(folder, *command("minidl.train", *words)) as process:
        try:
            deadline = time.monotonic() + 300
            while epochs_of(folder / out) < epochs:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 143, errors
    return files.load(last(folder / out))


def epochs_of(run: Path) -> int:
    """Return how many epochs of a run are logged."""
    file = run / "metrics.jsonl"
    return file.read_text().count('"event": "epoch"') if file.exists() else 0


def last(run: Path) -> Path:
    found = files.last(run / "checkpoints")
    assert found
    return found


@pytest.mark.slow
def test_its_vector_is_saved_and_restored(folder: Path) -> None:
    """The vector has the length of the model. tests/test_method_state.py tests that a run continues from it."""
    options = ("--workers", "2", "--method", "triggered", "--epochs", "500", "--out", "stopped")
    saved = stop(folder, "stopped", 1, *SMALL, *options)
    for rank in range(2):
        sent, theta = saved.vectors[f"{rank}/method.sent"], saved.vectors[f"{rank}/theta"]
        assert sent.dtype == np.float32 and sent.shape == theta.shape
    vectors = [(saved.vectors[f"{rank}/method.sent"], saved.vectors[f"{rank}/theta"]) for rank in range(2)]
    assert not all(np.array_equal(*both) for both in vectors), "a replica may stop right after it has sent its model"
    assert not np.array_equal(saved.vectors["0/method.sent"], saved.vectors["1/method.sent"])
    checkpoint = last(folder / "stopped")
    step = int(checkpoint.name.removeprefix("step-"))
    damaged = {**saved.vectors, "1/method.sent": np.zeros(7, np.float32)}
    files.save(checkpoint.parent, step, replace(saved, vectors=damaged))
    resume = ("--resume", "stopped", "--quiet")
    _, errors = run(folder, *command("minidl.train", *resume), code=2)
    assert "1/method.sent is float32 (7,); expected float32 (" in errors and errors.count("\n") == 1
    files.save(checkpoint.parent, step, saved)
    again = stop(folder, "stopped", epochs_of(folder / "stopped") + 1, *resume)
    assert again.state["progress"]["step"] > step
