"""What the model of a run says about the test images, computed when the page is written, in bounded time and memory."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from minidl import data, resources
from minidl.data.dataset import Splits
from minidl.errors import ConfigError, MinidlError
from minidl.nn import Module
from minidl.nn.summary import Row
from minidl.report.data import RunData
from minidl.run import model_file, trained
from minidl.run.config import Config
from minidl.run.evaluation import predict
from minidl.run.own_model import build

MOST_IMAGES = 10_000  # test images that the model is asked about
PATIENCE = 10.0  # seconds after which the model is asked about no further image
BATCH = 256
SHOWN = 24
MOST_CLASSES = 20  # in the confusion matrix
SPARE = 4  # of the free memory, reading a data set may take a part: 1 / SPARE bytes for each byte of the set
BYTES = {"mnist": 70_000 * 784, "fashion-mnist": 70_000 * 784, "cifar10": 60_000 * 3072}


@dataclass
class Predictions:
    """Answers to the first test images of the data set.

    labels (N,). probabilities (N, classes). images (N, H, W, C), as in the files. total: the number of test images.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    images: np.ndarray
    total: int

    @property
    def confusion(self) -> np.ndarray:
        """(classes, classes): how often the images of each class (row) were said to be of each class (column)."""
        classes = self.probabilities.shape[1]
        found = np.zeros((classes, classes), int)
        np.add.at(found, (self.labels, self.probabilities.argmax(axis=1)), 1)
        return found

    def worst(self) -> list[int]:
        """Return the images whose right class the model finds least likely, the worst first; at most SHOWN."""
        right = self.probabilities[np.arange(len(self.labels)), self.labels]
        return np.argsort(right, kind="stable")[:SHOWN].tolist()

    def described(self, number: int) -> str:
        """Return what the model said about an image, and how sure it was."""
        said, label = int(self.probabilities[number].argmax()), int(self.labels[number])
        sure = f"{self.probabilities[number, said]:.1%} sure"
        return f"is {label}, said {said}, {sure}" if said != label else f"is {label}, said so, only {sure}"

    def picture(self, number: int) -> str:
        """Return an image as PNG in base64."""
        from matplotlib.image import imsave

        image = np.asarray(self.images[number], float)
        low, high = image.min(), image.max()
        low, high = (0.0, 255.0) if self.images.dtype == np.uint8 else (low, high if high > low else low + 1)
        grey = image.shape[2] != 3
        pixels = (image[..., 0] if grey else image) - low
        stream = io.BytesIO()
        shades: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1} if grey else {}
        imsave(stream, np.clip(pixels / (high - low), 0, 1), format="png", **shades)
        return base64.b64encode(stream.getvalue()).decode()


def ask(run: RunData, model: str = "") -> tuple[Predictions, list[Row]]:
    """Ask the model of a run about test images. Return the answers, and the layers of the model.

    model: the FILE.py:FUNCTION that the user has named, or "". Only then, a file is imported.
    Raises MinidlError if the weights or the data are missing, or do not fit together.
    """
    config = run.config
    if config is None:
        raise ConfigError("the options of the run are not those of this version of minidl")
    path = run.folder / "model.safetensors"
    source = path if run.result and path.exists() else run.folder
    own: Module | None = None
    splits = _splits(config)
    if model_file.is_own(config.model):
        own = _own_model(run, model, splits)
    network, standardise = trained.load(source, own)
    network.eval()
    answers: list[np.ndarray] = []
    chosen, deadline = min(len(splits.x_test), MOST_IMAGES), time.monotonic() + PATIENCE
    for start in range(0, chosen, BATCH):
        if answers and time.monotonic() > deadline:
            break
        first = max(0, min(start, chosen - BATCH))  # the last batch is a whole one: another size is recorded again
        found = predict(network, standardise(splits.x_test[first : min(first + BATCH, chosen)]), BATCH)
        answers.append(found[start - first :])
    found = np.concatenate(answers) if answers else np.zeros((0, splits.classes), np.float32)
    if not np.isfinite(found).all():
        raise ConfigError("the model's answers are not finite")
    asked = len(found)
    predictions = Predictions(splits.y_test[:asked].astype(int), found, splits.x_test[:asked], len(splits.x_test))
    if asked and predictions.labels.max() >= found.shape[1]:
        raise ConfigError(f"the test images have the label {predictions.labels.max()}, and the model has "
                          f"{found.shape[1]} classes: the data have changed since the run")  # fmt: skip
    return predictions, network.summary_rows(splits.x_test.shape[1:])


def _splits(config: Config) -> Splits:
    size = BYTES.get(config.data) or (Path(config.data).stat().st_size if Path(config.data).is_file() else 0)
    if SPARE * size > resources.available():
        raise ConfigError(f"the data set has {resources.size(size)}, and {resources.size(resources.available())} of "
                          "memory are free")  # fmt: skip
    return data.read(config.data, config.data_dir or None, config.seed, config.layout or "channels-last")


def _own_model(run: RunData, model: str, splits: Splits) -> Module:
    if not model:
        named = model_file.short(run.options["model"])
        raise ConfigError(f"the model is from a file, {named}, which is imported only if the command line names it: "
                          f"python -m minidl.report {quote(str(run.folder))} --model FOLDER/{named}")  # fmt: skip
    _, found = model_file.read(model)
    shape: Any = splits.x_test.shape[1:]
    return build(model, found, shape, splits.classes)


def parts(run: RunData, model: str = "") -> tuple[Predictions | None, list[Row], str]:
    """Return what `ask` returns, and why something is missing, or ""."""
    try:
        return *ask(run, model), ""
    except (MinidlError, MemoryError, OSError) as error:
        return None, [], str(error) or "there is not enough memory"
