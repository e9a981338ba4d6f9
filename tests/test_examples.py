"""The scripts in examples/ run, and reach the accuracy that a reader expects of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick import quick

from minidl.train import main as train

LAUNCH = ("-m", "minidl.launch", "--workers", "2", "--quiet")
SCRIPTS = {  # script: (Python's arguments before it, lowest accuracy)
    "own_data.py": ((), 0.95),
    "own_loop.py": ((), 0.95),
    "own_op.py": ((), 0.94),
    "own_model_across_workers.py": (LAUNCH, 0.95),
    "own_method.py": (LAUNCH, 0.93),
}


def run(root: Path, folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore::UserWarning"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", quick(SCRIPTS, "own_data.py", "own_loop.py", "own_model_across_workers.py"))
def test_a_script_trains_a_model(name: str, root: Path, tmp_path: Path) -> None:
    before, least = SCRIPTS[name]
    last = run(root, tmp_path, *before, str(root / "examples" / name)).splitlines()[-1]
    assert float(re.findall(r"test accuracy ([\d.]+)%", last)[0]) >= 100 * least
    if before:
        assert last.startswith("2 replicas")
    assert list(tmp_path.iterdir()) == []


def test_a_method_takes_30_lines(root: Path) -> None:
    docstring, code = (root / "examples" / "own_method.py").read_text().split('"""\n', 1)
    assert docstring.startswith('"""') and len([line for line in code.splitlines() if line]) <= 30


def test_the_metrics_of_a_run_are_read(root: Path, tmp_path: Path) -> None:
    argv = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--workers", "1", "--epochs", "3", "--quiet"]
    assert train([*argv, "--out", str(tmp_path / "run")]) == 0
    lines = run(root, tmp_path, str(root / "examples" / "read_metrics.py"), "run").splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1", "2", "3"]
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert lines[-1].startswith(f"test accuracy {result['test_accuracy']:.2%}")


def test_the_readme_names_every_script(root: Path) -> None:
    text = (root / "README.md").read_text()
    names = {file.name for file in (root / "examples").glob("*.py")}
    assert names == {*SCRIPTS, "read_metrics.py"} and "(examples)" in text
