"""Trained weights: find them in the folder of a run, use them for new images, begin another run with them.

    model, standardise = minidl.load("runs/mine")
    minidl.predict(model, standardise(images)).argmax(axis=1)

    minidl.save(net, "net.safetensors")         # any model
    minidl.load("net.safetensors", net)         # fills a model that the user has built
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from minidl import models
from minidl.checked import shown
from minidl.data.dataset import Dataset, standardise
from minidl.engine.random import isolated
from minidl.errors import CheckpointError, ConfigError
from minidl.nn import Module, init
from minidl.reading import blaming, json_value
from minidl.run import checkpoint as files
from minidl.run import model_file
from minidl.run.array_writer import write_arrays
from minidl.run.checkpoint import ArrayFile
from minidl.run.config import DATASETS
from minidl.run.folder import read_options, replaced
from minidl.schema import Kind, Mismatch, named, number, several, text, whole

Standardise = Callable[[np.ndarray], np.ndarray]
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


def save(model: Module, path: str | Path, data: Dataset | None = None) -> None:
    """Write the weights of a model to a .safetensors file, with PyTorch's names and layouts.

    The file replaces an older one atomically. If `models.build` made the model, `load` can rebuild it from the file.
    data: the data set of its training. `load` then returns a function that standardises new images like this data set.
    Raises ConfigError for other arguments, CheckpointError if a value is not finite or the file cannot be written.
    """
    models.check("save", model)
    path = _path("save", path)
    if data is not None and not isinstance(data, Dataset):
        raise ConfigError(f"save: data = {shown(data)}; expected a Dataset, such as minidl.data.load returns")
    if path.is_dir():
        raise CheckpointError(f"save: {path} is a folder; expected a file, such as {path / files.MODEL}")
    weights, about = model.state_dict(), {"format": "pt"}  # other programs require this entry
    if model.built_as is not None and model.built_for is not None:
        name, classes = model.built_as
        about |= {"model": name, "input_shape": json.dumps(model.built_for), "classes": json.dumps(classes)}
    if data is not None:
        about |= {"mean": json.dumps(data.mean.tolist()), "std": json.dumps(data.std.tolist())}
    try:
        files.require_finite(weights)
        with replaced(path) as beside:
            write_arrays(beside, weights, about)
    except CheckpointError as error:
        raise CheckpointError(f"save: {error}") from None
    except OSError as error:
        raise CheckpointError(f"save: cannot write {path}: {error.strerror}") from None


def load(path: str | Path, model: Module | None = None) -> tuple[Module, Standardise]:
    """Return a model with trained weights, and a function to standardise new images.

    path   the folder of a run, one of its checkpoints, or a .safetensors file, anywhere
    model  the model to fill. It keeps its mode, and keeps its weights if the file does not fit. None: the file must
           name one of the models of `minidl.models`, which is built, in evaluation mode

    The function subtracts the mean and divides by the standard deviation of the training images. If the file does not
    contain them, the function returns images unchanged, as float32.
    Raises ConfigError for other arguments, CheckpointError if the file does not name or fit the model, or is damaged.
    """
    weights = find_weights(_path("load", path))
    if model is not None:
        models.check("load", model)
        standardised = _standardise(weights, model.built_for)
        with _of(weights):
            load_weights(model, weights)
        return model, standardised
    about = weights.metadata
    if model_file.is_own(about.get("model")):
        raise CheckpointError(f"{weights.path} holds the weights of a model from a file, "
                              f"{shown(model_file.short(about['model']))}: build the model, and give it to "
                              "minidl.load(path, model)")  # fmt: skip
    with blaming(f"{weights.path} does not name its model, as a file written by a run does (to fill a model of your "
                 "own: minidl.load(path, model))", CheckpointError):  # fmt: skip
        found = {name: _described(about, name) for name in ("model", "input_shape", "classes")}
    shape, classes, name = tuple(found["input_shape"]), found["classes"], found["model"]
    standardised = _standardise(weights, shape)
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
    with _of(weights):
        load_weights(model, weights)
    model.flatten()  # in an arena, predictions keep packed weights
    return model.eval(), standardised


def _path(where: str, path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{where}: path = {shown(path)}; expected the path of a file")
    return Path(path)


@contextmanager
def _of(weights: ArrayFile, begin: str = "") -> Iterator[None]:
    """Name the file in a CheckpointError. begin: the beginning of the message."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{begin}{weights.path}: {error}") from None


def _standardise(weights: ArrayFile, shape: tuple[int, ...] | None) -> Standardise:
    """Return the function to standardise images (N, *shape). Raises CheckpointError for invalid metadata."""
    about = weights.metadata
    if "mean" not in about and "std" not in about:
        return lambda images: np.asarray(images).astype(np.float32)
    with blaming(f"{weights.path}: its metadata", CheckpointError):
        mean, std = (np.array(_described(about, name), np.float32) for name in ("mean", "std"))
    channels = len(mean) if shape is None else shape[2]
    if not len(mean) == len(std) == channels or not (np.isfinite(mean).all() and (std > 0).all()):
        raise CheckpointError(f"{weights.path}: expected a mean, and a positive std, for each of {channels} channels")
    return lambda images: standardise(images, mean, std)


def begin_with(model: Module, path: str, classes: int) -> str:
    """Load the weights of --init into a model; return a note about its last layer, or "".

    If only the last layer does not fit, because the weights are for another number of classes, it keeps its random
    weights. Raises CheckpointError if anything else does not fit.
    """
    weights = find_weights(Path(path))
    shapes = {name: values.shape for name, values in model.state_dict().items()}
    others = {name: stored.shape for name, stored in weights.arrays.items()
              if name in shapes and stored.shape != shapes[name]}  # fmt: skip
    layers = {name.rpartition(".")[0] for name in others}
    known = {shape[:1] for shape in others.values()}  # the number of classes of the weights
    is_last = len(layers) == 1 == len(known) and () not in known and all(
        shapes[name][0] == classes and shapes[name][1:] == shape[1:] for name, shape in others.items()
    )  # fmt: skip
    with _of(weights, "--init "):
        load_weights(model, weights, leave_out=others if is_last else ())
    if not is_last:
        return ""
    return (f"--init {path}: layer {layers.pop()} has {known.pop()[0]} outputs there, and the data have {classes} "
            "classes: it begins with random weights")  # fmt: skip


def load_weights(model: Module, weights: ArrayFile, leave_out: Collection[str] = ()) -> None:
    """Load the values of a weights file into a model. Raises CheckpointError if they do not fit.

    leave_out: parameters that keep their values.
    """
    # Compare the header first: a file with other arrays may be of any size.
    own = model.state_dict()
    shapes = {name: values.shape for name, values in own.items()}
    for name, stored in weights.arrays.items():
        if name in shapes and stored.shape != shapes[name] and name not in leave_out:
            raise CheckpointError(f"{named(name)} has the shape {stored.shape}; expected floats {shapes[name]} "
                                  "(PyTorch's layout): another model?")  # fmt: skip
        if name not in shapes and stored.shape:  # PyTorch's counters of batches have no axes, and are ignored
            raise CheckpointError(f"{named(name)} is unknown to this model: another model?")
    values = weights.values()
    files.require_finite(values)
    model.load_state_dict(values | {name: own[name] for name in leave_out})


def _described(about: dict[str, str], name: str) -> Any:
    if name not in about:
        raise Mismatch(f"it has no {name!r}")
    value = about[name] if name == "model" else json_value(about[name])
    DESCRIBED[name](value, name)
    return value


def difference(about: dict[str, str], data: Dataset, tolerance: float) -> tuple[str, str, str] | None:
    """Return how a data set differs from the one that the metadata of weights describes: what, before, now.

    None if it does not, or if there is no metadata. tolerance: by how much of the standard deviation means and
    standard deviations may differ. Raises Mismatch if the metadata is invalid.
    """
    now: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "mean": data.mean, "std": data.std}
    then = {name: _described(about, name) for name in now if name in about}
    for name, value in then.items():
        slack = tolerance * data.std if name in ("mean", "std") else 0
        if np.shape(value) != np.shape(now[name]) or (np.abs(np.subtract(value, now[name])) > slack).any():
            before, after = (np.array2string(np.asarray(v), precision=4, threshold=6) for v in (value, now[name]))
            return name, before, after
    return None


def check_data(weights: ArrayFile, data: Dataset) -> None:
    """Raise CheckpointError if a data set is not like the one that the metadata of a weights file describes.

    Files without metadata are accepted. Means and standard deviations may differ by 1% of the standard deviation.
    """
    with blaming(f"{weights.path}: its metadata", CheckpointError):
        found = difference(weights.metadata, data, 0.01)
    if found:
        name, before, now = found
        raise CheckpointError(f"{weights.path} was trained on data with {name} {before}, and {data.name} has {now}: "
                              "give the data of its training, or use minidl.load and minidl.evaluate in "
                              "Python")  # fmt: skip


def find_weights(path: Path) -> ArrayFile:
    """Return the weights file of the run or checkpoint at a path, or the file at this path.

    A run's weights are those of its best checkpoint on the validation images, or of its last one without validation.
    Raises CheckpointError if there is no such file, or if it is damaged.
    """
    if (path / "config.toml").is_file():
        last = files.last(path / "checkpoints")
        if not last:
            raise CheckpointError(f"the run {path} has no checkpoint yet: wait until its first epoch ends")
        best = files.best(last)["best_step"]
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
