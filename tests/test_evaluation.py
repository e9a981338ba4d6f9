"""`--evaluate` compares the data with the metadata of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import models
from minidl.data import Dataset, load
from minidl.errors import CheckpointError
from minidl.run.array_writer import write_arrays
from minidl.run.checkpoint import header
from minidl.run.trained import check_data
from minidl.train import main


def weights(path: Path, data: Dataset, **changes: Any) -> Path:
    """Save a resnet20 with the metadata of a run on this data. `changes` replaces entries of it; None removes one."""
    about = {"input_shape": data.input_shape, "classes": data.classes, "mean": data.mean.tolist(),
             "std": data.std.tolist()} | changes  # fmt: skip
    told = {name: json.dumps(value) for name, value in about.items() if value is not None}
    model = models.build("resnet20", (8, 8, 1), data.classes)
    write_arrays(path, model.state_dict(), {"model": "resnet20", **told})
    return path


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load("synthetic:40x8x8x1:4")


@pytest.mark.parametrize(("changes", "words"), [
    ({"input_shape": [9, 9, 1]}, r"with input_shape \[9 9 1\], and synthetic:40x8x8x1:4 has \[8 8 1\]: give the data"),
    ({"classes": 5}, "with classes 5, and synthetic:40x8x8x1:4 has 4"),
    ({"mean": [3.0]}, r"with mean \[3\.\], and synthetic:40x8x8x1:4 has \["),
    ({"std": [0.5]}, r"with std \[0\.5\], and"),
    ({"std": [0.5, 0.5]}, r"with std \[0\.5 0\.5\], and"),
    ({"classes": "4"}, "its metadata: classes is '4'; expected a whole number"),
])  # fmt: skip
def test_other_data_than_in_training(tmp_path: Path, data: Dataset, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        check_data(header(weights(tmp_path / "a.safetensors", data, **changes)), data)
    assert "\n" not in str(caught.value)


def test_data_like_those_of_the_training(tmp_path: Path, data: Dataset) -> None:
    check_data(header(weights(tmp_path / "a.safetensors", data)), data)
    nearly = [float(data.mean[0] + 0.005 * data.std[0])]  # another part is held out for validation, for example
    check_data(header(weights(tmp_path / "a.safetensors", data, mean=nearly)), data)
    without = dict.fromkeys(("input_shape", "classes", "mean", "std"))
    check_data(header(weights(tmp_path / "a.safetensors", data, **without)), data)


def test_evaluate_on_images_of_another_size(tmp_path: Path, data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    path = weights(tmp_path / "a.safetensors", data)
    assert main(["--evaluate", str(path), "--data", "synthetic:40x9x9x1:4"]) == 2
    told = capsys.readouterr().err
    assert "was trained on data with input_shape [8 8 1], and synthetic:40x9x9x1:4 has [9 9 1]" in told
    assert told.startswith("minidl: error: ") and told.count("\n") == 1
    x = np.random.default_rng(0).integers(0, 255, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=np.arange(20) % 4, x_test=x, y_test=np.arange(20) % 4)
    assert main(["--evaluate", str(path), "--data", str(tmp_path / "b.npz")]) == 2
    assert "was trained on data with mean" in capsys.readouterr().err
