"""Softmax and cross-entropy over the rows of a matrix: the definition and the oracle of the tests.

x, y, logits, probabilities and their gradients are (rows, classes). Before exp, the largest element of a row is
subtracted. This changes no result, and prevents an overflow of exp. A NaN makes its whole row NaN.
"""

from __future__ import annotations

import math

from numpy import ndarray

__all__ = [
    "correct", "cross_entropy", "cross_entropy_backward", "log_softmax", "log_softmax_backward",
    "softmax", "softmax_backward",
]  # fmt: skip


def _log_probabilities(row: ndarray) -> list[float]:
    """Return log(exp(row_j) / sum_k exp(row_k)), computed so that large numbers cost no digits of the logarithm."""
    largest = max(row)
    log_sum = math.log(sum(math.exp(value - largest) for value in row))
    return [(value - largest) - log_sum for value in row]


def softmax(x: ndarray, y: ndarray) -> None:
    """Compute y_j = exp(x_j) / sum_k exp(x_k)."""
    rows, classes = x.shape
    for i in range(rows):
        logarithms = _log_probabilities(x[i])
        for j in range(classes):
            y[i, j] = math.exp(logarithms[j])


def softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    """Compute dx_j = y_j * (dy_j - sum_k dy_k * y_k)."""
    rows, classes = y.shape
    for i in range(rows):
        inner = sum(dy[i, k] * y[i, k] for k in range(classes))
        for j in range(classes):
            dx[i, j] = y[i, j] * (dy[i, j] - inner)


def log_softmax(x: ndarray, y: ndarray) -> None:
    """Compute y_j = x_j - log(sum_k exp(x_k))."""
    rows, classes = x.shape
    for i in range(rows):
        logarithms = _log_probabilities(x[i])
        for j in range(classes):
            y[i, j] = logarithms[j]


def log_softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    """Compute dx_j = dy_j - exp(y_j) * sum_k dy_k."""
    rows, classes = y.shape
    for i in range(rows):
        total = sum(dy[i, k] for k in range(classes))
        for j in range(classes):
            dx[i, j] = dy[i, j] - math.exp(y[i, j]) * total


def cross_entropy(
    logits: ndarray, labels: ndarray, smoothing: float, probabilities: ndarray, loss: ndarray
) -> None:
    """Compute loss = mean over the rows of -sum_j target_j * log(probability_j), and probabilities = softmax(logits).

    loss (1,); labels (rows,) in [0, classes): any other label makes the loss, and its row of the gradient, NaN.
    target_j is smoothing / classes, plus 1 - smoothing if j is the label of the row (Szegedy et al. 2016; as in
    PyTorch).
    """
    rows, classes = logits.shape
    total = 0.0 if all(0 <= label < classes for label in labels) else math.nan
    for i in range(rows):
        logarithms = _log_probabilities(logits[i])
        for j in range(classes):
            probabilities[i, j] = math.exp(logarithms[j])
            target = _target(labels[i] == j, smoothing, classes)
            if target > 0:  # 0 times an infinite logarithm is defined as 0
                total -= target * logarithms[j]
    loss[0] = total / rows


def cross_entropy_backward(
    dloss: ndarray, probabilities: ndarray, labels: ndarray, smoothing: float, dlogits: ndarray
) -> None:
    """Compute dlogits_j = dloss * (probability_j - target_j) / rows; dloss (1,)."""
    rows, classes = probabilities.shape
    for i in range(rows):
        for j in range(classes):
            target = _target(labels[i] == j, smoothing, classes) if 0 <= labels[i] < classes else math.nan
            dlogits[i, j] = dloss[0] * (probabilities[i, j] - target) / rows


def _target(is_label: bool, smoothing: float, classes: int) -> float:
    return smoothing / classes + (1 - smoothing if is_label else 0)


def correct(logits: ndarray, labels: ndarray, count: ndarray) -> None:
    """Compute count (1,) int64, the number of rows of logits (N, classes) whose first maximum is at the label."""
    count[0] = 0
    for row, label in zip(logits, labels, strict=True):
        count[0] += int(row.argmax()) == label
