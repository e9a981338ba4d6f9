"""Runs from the command line on a fake GPU: --device cuda:0, checkpoints, bad input, and a GPU beside a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_driver import environment
from fake_driver.driver import Settings
from test_mpi import environment as of_job
from test_mpi import mpiexec, nothing_left  # noqa: F401

ROOT = Path(__file__).parents[2]
MODEL = """
from minidl import nn

def build(input_shape, classes):
    height, width, channels = input_shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(height * width * channels, 16), nn.ReLU(), nn.Linear(16, classes)
    )
"""
OPTIONS = ("--data", "synthetic:96x4x4x1:3", "--batch-size", "16", "--schedule", "constant", "--quiet", "--json",
           "--no-report")  # fmt: skip
GPU = Settings(definition="reference")
# Replicas claim batches. The core trains 18 in 10 ms, perhaps before the other process begins; it does not train 1,800.
TOGETHER = ("--workers", "cuda:0,cpu:1", "--method", "gossip", "--epochs", "300")


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "small.py").write_text(MODEL)
    return "--model", f"{tmp_path / 'small.py'}:build", *OPTIONS


def train(*words: str, settings: Settings | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m minidl.train` with a fake driver, or without one."""
    variables = os.environ | (environment(settings) if settings else {"PYTHONPATH": str(ROOT)})
    return subprocess.run(
        [sys.executable, "-m", "minidl.train", *words], env=variables, capture_output=True, text=True, timeout=600
    )  # fmt: skip


def summary(*words: str, settings: Settings | None = None) -> dict[str, Any]:
    result = train(*words, settings=settings)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_run_on_a_gpu_has_the_cpus_result_and_continues_on_either(tmp_path: Path, options: tuple[str, ...]) -> None:
    gpu, cpu = ("--device", "cuda:0"), ("--workers", "1")
    here = summary(*options, *cpu, "--steps", "12", "--out", str(tmp_path / "cpu"))
    there = summary(*options, *gpu, "--steps", "12", "--out", str(tmp_path / "gpu"), settings=GPU)
    half = summary(*options, *gpu, "--steps", "6", "--out", str(tmp_path / "half"), settings=replace(GPU, eager=True))
    assert half["steps"] == 6
    again = summary(*options[:2], "--resume", str(tmp_path / "half"), "--device", "cpu", "--steps", "12", "--quiet",
                    "--json")  # fmt: skip
    assert there["steps"] == again["steps"] == 12
    for other in (there, again):
        assert other["test_loss"] == pytest.approx(here["test_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        (Settings(gpus=0), "cuda:0", "the NVIDIA driver finds no GPU"),
        (Settings(), "cuda:1", "there is no cuda:1: this machine has cuda:0"),
        (Settings(version=11040), "cuda", "update the driver"),
        (Settings(capability=(7, 5)), "cuda", "compute capability 7.5: expected 8.0 or higher"),
        (replace(GPU, memory=1 << 14), "cuda", "out of memory"),
        (Settings(loads=False), "cuda", "update the NVIDIA driver"),
        (replace(GPU, lose_after=9), "cuda", "has failed"),
    ],
    ids=["no GPU", "no such device", "old driver", "old GPU", "little memory", "cubin", "lost"],
)
def test_what_can_go_wrong_is_one_line(
    tmp_path: Path, options: tuple[str, ...], settings: Settings, device: str, message: str
) -> None:
    result = train(*options, "--device", device, "--steps", "4", "--out", str(tmp_path / "run"), settings=settings)
    assert result.returncode == 2
    assert message in result.stderr
    assert sum(line.startswith("minidl: error: ") for line in result.stderr.splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr


def test_products_on_tensor_cores_are_an_option(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = summary(*options, "--device", "cuda:0", "--precision", "tf32", "--steps", "4", "--out",
                    str(tmp_path / "run"), settings=GPU)  # fmt: skip
    assert found["steps"] == 4 and 'precision = "tf32"' in (tmp_path / "run" / "config.toml").read_text()


def test_without_numba_cuda_a_line_says_what_to_install(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = "import sys; sys.modules['cuda.core'] = None; from minidl.train import main; sys.exit(main(sys.argv[1:]))"
    words = (*options, "--device", "cuda:0", "--steps", "2", "--out", str(tmp_path / "run"))
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.returncode == 2
    assert "needs numba-cuda, which is not installed" not in result.stdout
    assert [line for line in result.stderr.splitlines() if "pip install 'minidl[cuda13]'" in line] == [
        line for line in result.stderr.splitlines() if line.startswith("minidl: error: ")]  # fmt: skip


def test_a_gpu_and_a_core_train_one_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = summary(*options, *TOGETHER, "--out", str(tmp_path / "run"), settings=GPU)
    assert found["replicas_alive"] == 2
    assert all(replica["seconds"]["gradient"] > 0 and replica["bytes_sent"] > 0 for replica in found["replicas"])


def test_under_mpiexec_a_gpu_and_a_core_train_one_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("mpi4py")
    command = [*mpiexec(), "-n", "2", sys.executable, "-m", "minidl.train", *options, *TOGETHER]
    command += ["--out", str(tmp_path / "run")]
    result = subprocess.run(command, env=of_job(**environment(GPU)), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["replicas_alive"] == 2
    assert all(replica["seconds"]["gradient"] > 0 and replica["bytes_sent"] > 0 for replica in found["replicas"])


def test_a_run_on_the_cpu_imports_no_cuda_package(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = ("import sys; from minidl.train import main; code = main(sys.argv[1:]); "
              "print(code, [m for m in sys.modules if m.split('.')[0] in ('numba_cuda', 'cuda')])")  # fmt: skip
    words = (*options, "--workers", "1", "--steps", "2", "--out", str(tmp_path / "run"))
    result = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr
