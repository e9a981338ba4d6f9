"""Evaluate a trained model: loss and accuracy on labelled images, predictions for new images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import ArrayLike

from minidl import models, ops
from minidl.checked import shown, whole
from minidl.data.dataset import check_labels
from minidl.data.views import averaged
from minidl.engine.autograd import no_grad
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, DataError, DivergedError
from minidl.nn import Module, evaluating, watching
from minidl.nn.modes import watchers
from minidl.program.replay import Prediction, correct_answers
from minidl.program.workspace import Workspace

BATCH = 256

_shared: ref[Workspace] | None = None  # the workspace that all predictions of `kept_prediction` share


class Score(NamedTuple):
    """The mean cross-entropy and the fraction of correct answers."""

    loss: float
    accuracy: float


def evaluate(
    model: Module,
    x: ArrayLike,
    y: ArrayLike,
    batch_size: int = BATCH,
    check: Callable[[], None] = lambda: None,
    prediction: Prediction | None = None,
    views: str = "none",
) -> Score:
    """Compute the score of a model on images x (N, H, W, C), standardised as in training, with labels y (N,).

    check: called for every batch; its exception ends the evaluation. prediction: a `Prediction` of the model, to reuse
    it for several evaluations (None: see `kept_prediction`). views: see `predict`; a given `Prediction` has its own.
    Raises ConfigError or DataError if an argument is invalid,
    DivergedError if the loss is not finite.
    """
    x, y = _images("evaluate", model, x), _labels(y)
    if len(x) != len(y):
        raise ConfigError(f"evaluate: {len(x)} images and {len(y)} labels; expected one label for each image")
    batch_size = whole("evaluate", "batch_size", batch_size, 1)
    loss, correct, start = 0.0, 0, 0
    for logits in _logits(model, x, batch_size, prediction, views):
        check()
        part = slice(start, start + batch_size)
        loss += ops.cross_entropy(logits, y[part]).item() * len(y[part])
        if not math.isfinite(loss):
            with evaluating(model):
                raise DivergedError(f"evaluate: the loss is {loss}, {first_not_finite(model, x[part])}")
        correct += correct_answers(logits, y[part])
        start += batch_size
    return Score(loss / len(y), correct / len(y))


def predict(model: Module, x: ArrayLike, batch_size: int = BATCH, views: str = "none") -> np.ndarray:
    """Return probabilities (N, classes) for images x (N, H, W, C); `.argmax(axis=1)` gives the predicted classes.

    Images must be standardised as in training: `dataset.standardise(images)`. If an image contains NaN, so do its
    probabilities. Raises ConfigError if there are no images, if they are not floats, or if `models.build` made the
    model for images of another size.

    views: "mirror" or "mirror-shift": average the model's outputs over several views of each image (data/views.py).

    The computation is recorded, and kept as long as the model. Calls from several threads run one after the other; for
    simultaneous calls, give each thread its own `Prediction`.
    """
    x, batch_size = _images("predict", model, x), whole("predict", "batch_size", batch_size, 1)
    return np.concatenate([ops.softmax(logits).numpy() for logits in _logits(model, x, batch_size, views=views)])


def kept_prediction(model: Module) -> Prediction:
    """Return the model's `Prediction` for `predict` and `evaluate`. The model keeps it; copies have their own.

    If a model kept a Prediction of itself, the two would refer to each other, and only the garbage collector could free
    their memory. So the Prediction is of a stand-in: another object of the same class that shares the model's
    attribute dict.
    """
    if watchers() or any(vars(kind).get("__slots__") for kind in type(model).__mro__ if kind is not Module):
        return Prediction(model)  # watchers must see the model itself; attributes in slots cannot be shared
    kept: Prediction | None = getattr(model, "kept_prediction", None)
    if kept is None or type(kept.model) is not type(model) or vars(kept.model) is not vars(model):
        stand_in = object.__new__(type(model))
        object.__setattr__(stand_in, "__dict__", vars(model))
        kept = Prediction(stand_in, workspace=_workspace())
        object.__setattr__(model, "kept_prediction", kept)
    return kept


def _workspace() -> Workspace:
    """Return the workspace that all kept predictions share. It is freed with the last of them."""
    global _shared
    workspace = None if _shared is None else _shared()
    if workspace is None:
        workspace = Workspace()
        _shared = ref(workspace)
    return workspace


def _logits(
    model: Module, x: np.ndarray, batch_size: int, prediction: Prediction | None = None, views: str = "none"
) -> Iterator[Tensor]:
    """Yield the model's outputs (B, classes) for each batch."""
    outputs = prediction or partial(averaged, kept_prediction(model), views)
    for start in range(0, len(x), batch_size):
        yield Tensor(outputs(_as_model(model, x[start : start + batch_size])))


def _images(where: str, model: Module, x: ArrayLike) -> np.ndarray:
    """Return images as an array. Raises ConfigError if they are not floats, or if the model does not take them."""
    models.check(where, model)
    try:
        images = np.asarray(x)
    except ValueError:
        raise ConfigError("images of different shapes; expected an array (N, H, W, C)") from None
    if not images.ndim:
        raise ConfigError(f"{where}: the images are {shown(x)}; expected an array (N, H, W, C) of floats")
    if not len(images):
        raise ConfigError("no images were given; expected at least one")
    if images.dtype.kind != "f":
        raise ConfigError(f"images {images.shape} hold {images.dtype}; expected floats, standardised as in training: "
                          "dataset.standardise(images)")  # fmt: skip
    models.check_images(where, model, images.shape)
    return images


def _labels(y: ArrayLike) -> np.ndarray:
    """Return labels as an array. Raises DataError unless they are whole numbers (N,) of 0 or more."""
    try:
        labels = np.asarray(y)
    except ValueError:
        raise DataError("labels of different shapes; expected whole numbers (N,), the class of each image") from None
    check_labels(labels)
    return labels


def _as_model(model: Module, x: np.ndarray) -> np.ndarray:
    """Convert x to the floating-point type of the model's parameters."""
    return x.astype(next((parameter.dtype for parameter in model.parameters()), x.dtype), copy=False)


def first_not_finite(model: Module, x: np.ndarray) -> str:
    """Return a clause that says where NaN or infinity first occurs in a forward pass on images x (N, H, W, C)."""
    if not np.isfinite(x).all():
        return "because the images contain NaN or infinity"
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    def note(module: Module, output: Tensor) -> None:
        if not found and not np.isfinite(output.numpy()).all():
            weights = any(not np.isfinite(p.numpy()).all() for p in module.parameters())
            layer = repr(module).partition("\n")[0].rstrip("(")
            where = "weights" if weights else "output"
            found.append(f"which arises in the {where} of layer {names[id(module)] or 'model'!r} ({layer})")

    with no_grad(), watching(note):
        model(_as_model(model, x))
    return found[0] if found else "although the outputs of all layers are finite"
