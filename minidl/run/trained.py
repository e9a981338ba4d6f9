"""Trained weights: find them in the folder of a run, and use them for new images.

    model, standardise = load_model("runs/mine")
    predict(model, standardise(images)).argmax(axis=1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minidl import models
from minidl.data.dataset import Dataset, standardise
from minidl.engine.random import isolated
from minidl.errors import CheckpointError, ConfigError
from minidl.nn import Module, init
from minidl.reading import blaming, json_value
from minidl.run import checkpoint as files
from minidl.run.checkpoint import ArrayFile
from minidl.run.config import DATASETS
from minidl.run.folder import read_options
from minidl.schema import Kind, Mismatch, named, number, several, text, whole

FLOATS = ("F16", "F32", "F64")
FLOAT32 = number(-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
DESCRIBED: dict[str, Kind] = {
    "model": text(),
    "input_shape": several(whole(1), 3, 3),
    "classes": whole(1),
    "mean": several(FLOAT32, 1),
    "std": several(FLOAT32, 1),
    "seed": whole(0, 2**32 - 1),
    "validation": number(0.0, 1.0),
}  # metadata that a run writes, as JSON except for `model`: see training/resume.py


def load_model(path: str | Path) -> tuple[Module, Callable[[np.ndarray], np.ndarray]]:
    """Return a trained model, in evaluation mode, and a function to standardise new images.

    path: the folder of a run, one of its checkpoints, or a model.safetensors file, anywhere.
    Raises CheckpointError if the weights were not written by a run of minidl, or are damaged.
    """
    weights = find_weights(Path(path))
    about = weights.metadata
    with blaming(f"{weights.path} does not name its model, as a file written by a run does", CheckpointError):
        found = {name: _described(about, name) for name in ("model", "input_shape", "classes", "mean", "std")}
    shape, classes, name = tuple(found["input_shape"]), found["classes"], found["model"]
    mean, std = np.array(found["mean"], np.float32), np.array(found["std"], np.float32)
    if not len(mean) == len(std) == shape[2] or not (np.isfinite(mean).all() and (std > 0).all()):
        raise CheckpointError(f"{weights.path}: expected a mean, and a positive std, for each of {shape[2]} channels")
    # A model with more values than the file is refused before memory for it is allocated.
    sizes = sum(math.prod(stored.shape) for stored in weights.arrays.values() if stored.kind in FLOATS)
    try:
        with init.limit(sizes), isolated(0):  # the initial weights are not used: draw none from the user's generator
            model = models.build(name, shape, classes)
    except init.TooLarge:
        raise CheckpointError(f"{weights.path} holds {sizes:,} values, too few for {name} with images {shape} and "
                              f"{classes} classes, which its metadata names") from None  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    try:
        load_weights(model, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    return model.eval(), lambda images: standardise(images, mean, std)


def load_weights(model: Module, weights: ArrayFile) -> None:
    """Load the values of a weights file into a model. Raises CheckpointError if they do not fit."""
    # Compare the header first: a file with other arrays may be of any size.
    shapes = {name: values.shape for name, values in model.state_dict().items()}
    for name, stored in weights.arrays.items():
        if name in shapes and stored.shape != shapes[name]:
            raise CheckpointError(f"{named(name)} has the shape {stored.shape}; expected floats {shapes[name]} "
                                  "(PyTorch's layout): another model?")  # fmt: skip
        if name not in shapes and stored.shape:  # PyTorch's counters of batches have no axes, and are ignored
            raise CheckpointError(f"{named(name)} is unknown to this model: another model?")
    values = weights.values()
    files.require_finite(values)
    model.load_state_dict(values)


def _described(about: dict[str, str], name: str) -> Any:
    if name not in about:
        raise Mismatch(f"it has no {name!r}")
    value = about[name] if name == "model" else json_value(about[name])
    DESCRIBED[name](value, name)
    return value


def check_data(weights: ArrayFile, data: Dataset) -> None:
    """Raise CheckpointError if a data set is not like the one that the metadata of a weights file describes.

    Files without metadata are accepted. Means and standard deviations may differ by 1% of the standard deviation.
    """
    about = weights.metadata
    now: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "mean": data.mean, "std": data.std}
    with blaming(f"{weights.path}: its metadata", CheckpointError):
        then = {name: _described(about, name) for name in now if name in about}
    for name, value in then.items():
        slack = 0.01 * data.std if name in ("mean", "std") else 0
        if np.shape(value) != np.shape(now[name]) or (np.abs(np.subtract(value, now[name])) > slack).any():
            before, after = (np.array2string(np.asarray(v), precision=4, threshold=6) for v in (value, now[name]))
            raise CheckpointError(f"{weights.path} was trained on data with {name} {before}, and {data.name} has "
                                  f"{after}: give the data of its training, or use minidl.load_model and "
                                  "minidl.evaluate in Python")  # fmt: skip


def find_weights(path: Path) -> ArrayFile:
    """Return the weights file of the run or checkpoint at a path, or the file at this path.

    A run's weights are those of its best checkpoint on the validation images, or of its last one without validation.
    Raises CheckpointError if there is no such file, or if it is damaged.
    """
    if (path / "config.toml").is_file():
        last = files.last(path / "checkpoints")
        if not last:
            raise CheckpointError(f"the run {path} has no checkpoint yet: wait until its first epoch ends")
        best = files.best_step(last)
        path = files.folder_of(path / "checkpoints", best) if best >= 0 else last
        if not path.is_dir():
            raise CheckpointError(f"the best checkpoint, {path}, is missing: name another one, such as {last}")
    if path.is_dir():
        return files.verify(path)[0]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a run folder, a checkpoint or a .safetensors file")
    if path.name == files.MODEL and (path.parent / files.SUMS).is_file():
        return files.verify(path.parent)[0]
    return files.header(path)


def run_options(weights: Path) -> dict[str, Any]:
    """Return the options of the run that contains a weights file; empty outside a run."""
    # RUN/model.safetensors, or RUN/checkpoints/step-00000480/model.safetensors
    for folder in (weights.absolute().parent, weights.absolute().parent.parent.parent):
        if (folder / "config.toml").is_file():
            return read_options(folder / "config.toml")
    return {}


def described_options(weights: ArrayFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options model, data, seed and validation that a file's metadata names and `given` lacks.

    {} if minidl did not write the file. Raises ConfigError for a user's data file, CheckpointError for invalid values.
    """
    about = weights.metadata
    found: dict[str, Any] = {name: about[name] for name in ("model", "data") if name in about and name not in given}
    data = found.get("data", "")
    if data and data not in DATASETS and not data.startswith("synthetic:"):
        raise ConfigError(f"{weights.path} was trained on a file {data[:60]!r}: give --data with the path of this file")
    with blaming(f"{weights.path}: its metadata", CheckpointError):
        others = [name for name in ("seed", "validation") if name in about and name not in given]
        found |= {name: _described(about, name) for name in others}
    return found
