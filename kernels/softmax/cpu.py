"""Softmax and cross-entropy on one core: a batch of class scores is too small to be worth threads.

Every pass goes along a row, which stays in the first-level cache. Sums are kept in float64.
"""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.jit import jit

from .reference import __all__ as __all__


@jit
def _largest(row: ndarray) -> float:
    largest = row[0]
    for j in range(1, row.size):
        largest = max(largest, row[j])
    return largest


@jit
def _center(x: ndarray, y: ndarray) -> None:
    """y = x - max(x): its softmax is that of x, and exp cannot overflow."""
    largest = _largest(x)
    for j in range(x.size):
        y[j] = x[j] - largest


@jit
def _softmax_row(y: ndarray) -> float:
    """y = softmax(y) for a centered row; returns s = log(sum_j exp(y_j)).

    The logarithm of a probability is y_j - s. That y was stored before s was known matters: x_j - (max(x) + s), which
    the compiler would be free to make of one expression, loses the digits of s beside a large maximum.
    """
    total = 0.0
    for j in range(y.size):
        y[j] = math.exp(y[j])
        total += y[j]
    inverse = y.dtype.type(1 / total)
    for j in range(y.size):
        y[j] *= inverse
    return math.log(total)


@jit
def softmax(x: ndarray, y: ndarray) -> None:
    for i in range(x.shape[0]):
        _center(x[i], y[i])
        _softmax_row(y[i])


@jit
def softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        total = 0.0
        for j in range(y_row.size):
            total += dy_row[j] * y_row[j]
        inner = y.dtype.type(total)
        for j in range(y_row.size):
            dx_row[j] = y_row[j] * (dy_row[j] - inner)


@jit
def log_softmax(x: ndarray, y: ndarray) -> None:
    for i in range(x.shape[0]):
        row = y[i]
        _center(x[i], row)
        total = 0.0
        for j in range(row.size):
            total += math.exp(row[j])
        log_sum = y.dtype.type(math.log(total))
        for j in range(row.size):
            row[j] -= log_sum


@jit
def log_softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        total = 0.0
        for j in range(y_row.size):
            total += dy_row[j]
        total_dy = y.dtype.type(total)
        for j in range(y_row.size):
            dx_row[j] = dy_row[j] - math.exp(y_row[j]) * total_dy


@jit
def cross_entropy(
    logits: ndarray, labels: ndarray, smoothing: float, probabilities: ndarray, loss: ndarray
) -> None:
    rows, classes = logits.shape
    total = 0.0
    for i in range(rows):
        row = probabilities[i]
        _center(logits[i], row)
        expected = (1 - smoothing) * row[labels[i]]  # sum of target times centered logit; the targets sum to 1
        if smoothing > 0:
            for j in range(classes):
                expected += smoothing / classes * row[j]
        total += _softmax_row(row) - expected
    loss[0] = total / rows


@jit
def cross_entropy_backward(
    dloss: ndarray, probabilities: ndarray, labels: ndarray, smoothing: float, dlogits: ndarray
) -> None:
    rows, classes = probabilities.shape
    scale = dlogits.dtype.type(dloss[0] / rows)
    off_label = dlogits.dtype.type(smoothing / classes)
    on_label = dlogits.dtype.type(1 - smoothing)
    for i in range(rows):
        p_row, d_row = probabilities[i], dlogits[i]
        for j in range(classes):
            d_row[j] = scale * (p_row[j] - off_label)
        d_row[labels[i]] -= scale * on_label


@jit
def correct(logits: ndarray, labels: ndarray, count: ndarray) -> None:
    count[0] = 0
    for i in range(logits.shape[0]):
        row, best = logits[i], 0
        for j in range(1, row.size):
            if row[best] == row[best] and not row[j] <= row[best]:  # NaN wins, as in argmax
                best = j
        count[0] += best == labels[i]
