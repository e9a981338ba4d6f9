"""`python -m bench.gpu --quick` on a fake GPU: every part runs, and writes its lines. No test checks a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_driver import environment
from fake_driver.driver import Settings

ROOT = Path(__file__).parents[2]


def bench(folder: Path, settings: Settings | None, *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | (environment(settings) if settings else {"PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-m", "bench.gpu", "--quick", "--json", "--out", str(folder / "report.md"), *words]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=900)


def report(folder: Path, settings: Settings, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the report and its rows."""
    done = bench(folder, settings, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return (folder / "report.md").read_text(), rows


def test_tests_and_kernels(tmp_path: Path) -> None:
    text, rows = report(tmp_path, Settings(), "--only", "tests", "sanitizer", "kernels")
    assert "GPU: emulated GPU" in text and "compute capability: 8.0" in text
    assert " passed" in text
    for row in rows:
        assert row["value"] > 0 and f"| {row['name'].removeprefix('kernel-')} |" in text
    names = {row["name"] for row in rows}
    assert {"kernel-nn-96", "kernel-optim.sgd-0.016MB"} <= names
    assert any(name.startswith("kernel-small") and name.endswith("backward_weight") for name in names)


def test_steps_and_a_gpu_beside_the_cores(tmp_path: Path) -> None:
    text, rows = report(tmp_path, Settings(definition="cpu"), "--only", "steps", "together")
    assert "| lenet, batch 4 |" in text and "of the sum of both alone" in text
    assert {"step-lenet-b4", "together"} <= {row["name"] for row in rows}


@pytest.mark.slow
def test_predicted_steps(tmp_path: Path) -> None:
    text, _ = report(tmp_path, Settings(), "--only", "predicted")
    rows = [line for line in text.splitlines() if line.startswith("| mlp, batch 128 |")]
    assert [row.split("|")[2].strip() for row in rows] == ["A100", "H100"]
    for row in rows:
        shares = [float(cell.strip(" %")) for cell in row.split("|")[5:8]]
        assert sum(shares) == pytest.approx(100, abs=2) and min(shares) > 0


def test_a_test_that_fails_is_reported_and_the_other_parts_run(tmp_path: Path) -> None:
    done = bench(tmp_path, Settings(lose_after=1), "--only", "tests", "sanitizer")
    assert done.returncode == 1
    text = (tmp_path / "report.md").read_text()
    assert "**tests has failed**" in text and "## sanitizer" in text


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [(Settings(gpus=0), (), "finds no GPU"), (Settings(), ("--device", "cuda:3"), "there is no cuda:3"),
     (None, ("--device", "cpu"), "expected a GPU")],
)  # fmt: skip
def test_without_a_gpu(tmp_path: Path, settings: Settings | None, words: tuple[str, ...], message: str) -> None:
    done = bench(tmp_path, settings, *words)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
