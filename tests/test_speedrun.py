"""bench/speedrun.py tests the mean of several seeds, skips finished seeds, and trains PyTorch with the same recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import speedrun
from minidl import models
from minidl.errors import ConfigError
from minidl.run.config import resolve
from minidl.run.evaluation import evaluate
from minidl.training.session import prepare
from minidl.training.trainer import Trainer


def test_verdict() -> None:
    """The t statistic and its p-value are those of a table: t = 1.833 for p = 0.05 and 9 degrees of freedom."""
    pytest.importorskip("scipy")
    accuracies = [0.94 + 0.001 * (0.5 * (-1) ** i) for i in range(10)]
    found = speedrun.verdict(accuracies, 0.94 - 1.8331129 * speedrun.verdict(accuracies, 0.9)["error"])
    assert found["p"] == pytest.approx(0.05, abs=1e-6) and found["mean"] == pytest.approx(0.94)
    assert speedrun.verdict(accuracies, 0.941)["p"] > 0.99
    assert speedrun.verdict([0.95], 0.94)["p"] != speedrun.verdict([0.95], 0.94)["p"]  # NaN: one seed proves nothing


def test_quick_run_is_resumable(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    out = ["--seeds", "1", "--out", str(tmp_path), "--json", "--", *speedrun.QUICK]
    results: list[dict[str, Any]] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "bench/speedrun.py", *out], cwd=root, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = (result["runs"][0] for result in results)
    assert first["steps"] == 4 and 0 <= first["test_accuracy"] <= 1
    del first["wall_seconds"], second["wall_seconds"]
    assert first == second  # the finished run is read again


def test_the_recipe_in_pytorch_ends_with_the_same_accuracy() -> None:
    """The same initial weights, batches and rates: after a few steps, the twins answer nearly all images alike."""
    pytest.importorskip("torch")
    options = {"data": "digits", "steps": 6, "batch_size": 200, "augment": ("translate", "alternating-flip")}
    config = resolve({"preset": "speedrun", "workers": 1, "seed": 3, "bias_lr": 5.0, **options})
    data, model = prepare(config)
    trainer = Trainer(model, data, config)
    list(trainer.run())
    ours = evaluate(model, data.x_test, data.y_test, prediction=trainer.engine.prediction).accuracy
    theirs = speedrun.train_pytorch(config, seed=3)
    assert abs(ours - theirs["test_accuracy"]) < 0.02 and theirs["steps"] == 6


def test_the_recipe_needs_images() -> None:
    with pytest.raises(ConfigError, match="at least 2x2"):
        models.build("whitened-cnn", (1, 8, 1))
