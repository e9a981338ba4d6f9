"""Softmax, with the rows divided among threads, and cross-entropy on one core, since class scores are few numbers.

A row of ten classes does not fill a vector register. So exp, which does not depend on the row's other elements,
processes all numbers of a block of rows in one loop. A block stays in the first-level cache. Sums are in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, helper, jit

from ..activation import functions
from ..elementwise.stream import get, put
from ..reduce.along_row import first_largest, largest, sum_in_float64
from ..reduce.rows import by_blocks
from .reference import __all__ as __all__

BLOCK_SIZE = 4096  # a block of rows has at most this many elements, unless a single row has more


@helper
def _block_rows(x: ndarray) -> int:
    return max(1, BLOCK_SIZE // max(1, x.shape[1]))


@helper
def _subtract(x: ndarray, number: float, y: ndarray) -> None:
    for j in range(x.size):
        put(y, j, get(x, j) - number, False)


@helper
def _center(x: ndarray, y: ndarray) -> None:
    """Compute y = x - max(x) in each row: the softmax does not change, and exp cannot overflow.

    A NaN does not count as the largest; the row's sum becomes NaN.
    """
    maximum = np.empty(1, x.dtype)
    for i in range(x.shape[0]):
        largest(x[i], 0, x.shape[1], maximum)
        _subtract(x[i], maximum[0], y[i])


@helper
def _sum(x: ndarray, total: ndarray) -> float:
    """Return the sum of x; total (1,) float64: scratch."""
    sum_in_float64(x, 0, x.size, total, 0)
    return total[0]


@helper
def _exp(x: ndarray) -> None:
    for j in range(x.size):
        x[j] = functions.exp(x[j])


@helper
def _scale(y: ndarray, factor: float) -> None:
    for j in range(y.size):
        y[j] *= factor


@by_blocks
def softmax(x: Part, y: Part) -> None:
    step, total = _block_rows(x), np.empty(1)
    for first in range(0, x.shape[0], step):
        block = y[first : first + step]
        _center(x[first : first + step], block)
        _exp(block.reshape(-1))
        for i in range(block.shape[0]):
            _scale(block[i], y.dtype.type(1 / _sum(block[i], total)))


@by_blocks
def softmax_backward(dy: Part, y: Part, dx: Part) -> None:
    total = np.empty(1)
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        for j in range(y_row.size):
            put(dx_row, j, get(dy_row, j) * get(y_row, j), False)
        inner = y.dtype.type(_sum(dx_row, total))
        for j in range(y_row.size):
            put(dx_row, j, get(y_row, j) * (get(dy_row, j) - inner), False)


@by_blocks
def log_softmax(x: Part, y: Part) -> None:
    """Compute (x_j - max(x)) - log(sum), in this order: if the maximum is large, max(x) + log(sum) would lose digits of
    the logarithm."""
    total, maximum = np.empty(1), np.empty(1, x.dtype)
    for i in range(x.shape[0]):
        x_row, y_row = x[i], y[i]
        largest(x_row, 0, x_row.size, maximum)
        top = maximum[0]
        _subtract(x_row, top, y_row)
        _exp(y_row)
        log_sum = y.dtype.type(math.log(_sum(y_row, total)))
        for j in range(y_row.size):
            put(y_row, j, (get(x_row, j) - top) - log_sum, False)


@by_blocks
def log_softmax_backward(dy: Part, y: Part, dx: Part) -> None:
    scratch = np.empty(1)
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        total = y.dtype.type(_sum(dy_row, scratch))
        for j in range(y_row.size):
            put(dx_row, j, get(dy_row, j) - functions.exp(get(y_row, j)) * total, False)


@helper
def _expected(row: ndarray, label: int, smoothing: float, scratch: ndarray) -> float:
    """Return the sum of target * centered logit; NaN for an invalid label, so that the loss becomes NaN."""
    if label < 0 or label >= row.size:
        return math.nan
    expected = (1 - smoothing) * row[label]
    return expected + smoothing / row.size * _sum(row, scratch) if smoothing > 0 else expected


@jit
def cross_entropy(
    logits: ndarray, labels: ndarray, smoothing: float, probabilities: ndarray, loss: ndarray
) -> None:
    """Compute the loss from log(probability) = centered logit - log(sum of the row's exp(centered logit)).

    The targets of a row sum to 1, so the logarithm of the sum is added once for each row.
    """
    rows = logits.shape[0]
    step, scratch = _block_rows(logits), np.empty(1)
    total = 0.0
    for first in range(0, rows, step):
        block = probabilities[first : first + step]
        _center(logits[first : first + step], block)
        for i in range(block.shape[0]):
            total -= _expected(block[i], labels[first + i], smoothing, scratch)
        _exp(block.reshape(-1))
        for i in range(block.shape[0]):
            row_sum = _sum(block[i], scratch)
            total += math.log(row_sum)
            _scale(block[i], block.dtype.type(1 / row_sum))
    loss[0] = total / rows


@jit
def cross_entropy_backward(
    dloss: ndarray, probabilities: ndarray, labels: ndarray, smoothing: float, dlogits: ndarray
) -> None:
    rows, classes = probabilities.shape
    number = dlogits.dtype.type
    scale, off_label = number(dloss[0] / rows), number(smoothing / classes)
    on_label = scale * number(1 - smoothing)
    p, d = probabilities.reshape(-1), dlogits.reshape(-1)
    for i in range(p.size):
        d[i] = scale * (p[i] - off_label)
    for i in range(rows):
        if 0 <= labels[i] < classes:
            dlogits[i, labels[i]] -= on_label
        else:
            dlogits[i] = number(math.nan)


@jit
def correct(logits: ndarray, labels: ndarray, count: ndarray) -> None:
    found = 0
    for i in range(logits.shape[0]):
        found += first_largest(logits[i]) == labels[i]
    count[0] = found
