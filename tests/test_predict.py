"""bench/predict.py: the engines load the same model, and a row compares minidl with the fastest of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import engines, predict


@pytest.mark.parametrize("net", [pytest.param("mlp", marks=pytest.mark.slow), "resnet20"])
def test_engines_agree(net: str, tmp_path: Path) -> None:
    """minidl and PyTorch (frozen), on a model whose batch norm has statistics."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "bench.engines", net, "2", str(tmp_path)]
    subprocess.run(command, cwd=Path(predict.__file__).parents[1], check=True, capture_output=True)
    options = {"folder": str(tmp_path), "threads": 1}
    outputs = engines.load("minidl", net, options)()
    assert engines.difference(outputs, options) < predict.TOLERANCE
    assert engines.difference(outputs + 0.01 * abs(outputs).max(), options) == pytest.approx(0.01, rel=0.01)
    weights = dict(np.load(tmp_path / "state.npz"))
    assert all(abs(value - 1).min() > 1e-6 for name, value in weights.items() if name.endswith("running_var"))


def test_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "predict-mlp-b1", "seconds": {"minidl": 2e-3, "pytorch": 3e-3, "openvino": 1e-3},
           "difference": {"minidl": 1e-7, "pytorch": 2e-5, "openvino": float("nan")},
           "start": {"minidl": 1.0, "pytorch": 2.0, "openvino": 3.0},
           "megabytes": {"minidl": 100.0, "pytorch": 200.0, "openvino": 300.0}}  # fmt: skip
    predict.finish(row)
    printed = capsys.readouterr().out.splitlines()
    assert row["value"] == 0.5 and row["best"] == "openvino"
    assert printed[0].split() == ["mlp-b1", "2.000", "1.50x", "-", "0.50x", "0.50", "openvino"]
    assert printed[1].strip().startswith("pytorch: outputs differ by 2.0e-05") and "openvino" in printed[2]
    assert "openvino 3.00 s 300 MB" in printed[3]


def test_peers_that_are_missing_get_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "missing", lambda packages: [name for name in packages if name == "openvino"])
    assert predict.engines() == ["minidl", "pytorch", "onnxruntime"]
    assert capsys.readouterr().out == "openvino: not measured; pip install openvino\n"
    monkeypatch.setattr(predict, "missing", lambda packages: list(packages))
    assert predict.engines() == [] and "pip install torch" in capsys.readouterr().out


def test_unknown_cells(root: Path) -> None:
    command = [sys.executable, "bench/predict.py", "--only", "mlp-b2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "mlp-b2" in done.stderr


@pytest.mark.slow
def test_a_quick_run(root: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "bench/predict.py", "--quick", "--json", "--only", "mlp-b1"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["value"] > 0 and {"minidl", "pytorch"} <= set(row["seconds"])
    assert max(row["difference"].values()) < predict.TOLERANCE and min(row["megabytes"].values()) > 10
