"""Softmax and the losses."""

from __future__ import annotations

from numbers import Real
from typing import ClassVar

import numpy as np

from minidl.checked import shown
from minidl.engine.autograd import Function
from minidl.engine.device import acting
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, ShapeError


class Softmax(Function):
    """e^x / sum e^x over the last axis."""

    kernel: ClassVar[str] = "softmax"

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.y = self.device.empty(x.shape, x.dtype)
        getattr(self.device.softmax, self.kernel)(self.rows(x), self.rows(self.y))
        return self.y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(dy.shape, dy.dtype)
        getattr(self.device.softmax, f"{self.kernel}_backward")(self.rows(dy), self.rows(self.y), self.rows(dx))
        return dx

    @staticmethod
    def rows(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, x.shape[-1])


class LogSoftmax(Softmax):
    kernel = "log_softmax"


class CrossEntropy(Function):
    """Softmax and negative log-likelihood in one op: its gradient, (probabilities - targets) / N, cannot overflow."""

    def forward(self, logits: np.ndarray, labels: np.ndarray, smoothing: float) -> np.ndarray:
        self.labels, self.smoothing = labels, smoothing
        self.probabilities = self.device.empty(logits.shape, logits.dtype)
        loss = self.device.empty((1,), logits.dtype)
        self.device.softmax.cross_entropy(logits, labels, smoothing, self.probabilities, loss)
        return loss.reshape(())

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dlogits = self.device.empty(self.probabilities.shape, dy.dtype)
        self.device.softmax.cross_entropy_backward(
            dy.reshape(1), self.probabilities, self.labels, self.smoothing, dlogits
        )
        return dlogits


def softmax(x: Tensor) -> Tensor:
    """Return e^x / sum e^x over the last axis. Raises ShapeError if this axis is empty or missing."""
    return Softmax.apply(_with_classes("softmax", x))


def log_softmax(x: Tensor) -> Tensor:
    """Return ln softmax(x) over the last axis. Raises ShapeError if this axis is empty or missing."""
    return LogSoftmax.apply(_with_classes("log_softmax", x))


def _with_classes(name: str, x: Tensor) -> Tensor:
    if not x.ndim or not x.shape[-1]:
        raise ShapeError(f"{name}: a tensor of shape {x.shape}; expected a last axis of at least one class")
    return x


def cross_entropy(logits: Tensor, labels: np.ndarray, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over the batch of -sum(target * ln softmax(logits)), a scalar.

    logits (N, classes); labels (N,): integers in [0, classes). With label_smoothing s, the target of the correct class
    is 1 - s + s / classes, and the target of every other class is s / classes (Szegedy et al. 2016).
    Raises ShapeError for wrong shapes or labels, ConfigError unless 0 <= s < 1.
    """
    labels = acting(logits.device).labels(labels)
    if logits.ndim != 2 or not logits.size or labels.shape != logits.shape[:1] or labels.dtype.kind not in "iu":
        raise ShapeError(f"cross_entropy: logits {logits.shape} and labels {labels.dtype} {labels.shape}; "
                         "expected (N, classes) and N integers")  # fmt: skip
    known = type(labels) is np.ndarray  # while a step is recorded, labels have no values
    if known and (labels.min() < 0 or labels.max() >= logits.shape[1]):
        raise ShapeError(f"cross_entropy: labels from {labels.min()} to {labels.max()}; "
                         f"expected 0 to {logits.shape[1] - 1}")  # fmt: skip
    if not isinstance(label_smoothing, Real) or not 0 <= label_smoothing < 1:
        raise ConfigError(f"cross_entropy: label_smoothing {shown(label_smoothing)}; expected 0 <= s < 1")
    labels = np.ascontiguousarray(labels, np.int64)
    return CrossEntropy.apply(logits, labels=labels, smoothing=float(label_smoothing))


def mse_loss(prediction: Tensor, target: Tensor | np.ndarray) -> Tensor:
    """Return the mean of (prediction - target)^2, a scalar. Raises ShapeError if the shapes differ."""
    if prediction.shape != np.shape(target):
        raise ShapeError(f"mse_loss: prediction {prediction.shape} and target {np.shape(target)}; shapes must be equal")
    difference = prediction - target
    return (difference * difference).mean()
