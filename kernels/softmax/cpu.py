"""Softmax and cross-entropy on one core: a batch of class scores is too small to be worth threads.

A row of ten classes fills no vector register. So what needs no look at the row's other elements, exp above all, goes
over a block of rows as over one vector; a block stays in the first-level cache. Sums are kept in float64.
"""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.jit import jit

from ..activation import functions
from .reference import __all__ as __all__

BLOCK = 4096  # elements
SHORT = 16  # elements: of so many, the largest is found one by one


@jit
def _block_rows(x: ndarray) -> int:
    return max(1, BLOCK // max(1, x.shape[1]))


@jit
def _fold(x: ndarray, y: ndarray) -> int:
    """y = the larger of each element in x's first half and its counterpart in the second; returns their number."""
    half = (x.size + 1) // 2
    low, high = x[: x.size - half], x[half:]
    for j in range(low.size):
        y[j] = high[j] if high[j] > low[j] else low[j]
    if low.size < half:
        y[low.size] = x[low.size]
    return half


@jit
def _largest(x: ndarray, scratch: ndarray) -> float:
    """The largest element. A NaN may or may not count: whatever it is subtracted from, the row's sum becomes NaN."""
    n = x.size
    if n > SHORT:
        n = _fold(x, scratch)
        while n > SHORT:
            n = _fold(scratch[:n], scratch)
        x = scratch
    largest = x[0]
    for j in range(1, n):
        largest = x[j] if x[j] > largest else largest
    return largest


@jit
def _sum(x: ndarray) -> float:
    """In four sums: an addition waits for the one before it."""
    a = b = c = d = 0.0
    whole = x.size - x.size % 4
    for j in range(0, whole, 4):
        a += x[j]
        b += x[j + 1]
        c += x[j + 2]
        d += x[j + 3]
    for j in range(whole, x.size):
        a += x[j]
    return (a + b) + (c + d)


@jit
def _center(x: ndarray, y: ndarray) -> float:
    """y = x - max(x): its softmax is that of x, and exp cannot overflow. Returns max(x)."""
    largest = _largest(x, y)
    for j in range(x.size):
        y[j] = x[j] - largest
    return largest


@jit
def _exp(x: ndarray) -> None:
    for j in range(x.size):
        x[j] = functions.exp(x[j])


@jit
def _normalize(y: ndarray) -> float:
    """y /= sum(y); returns the sum."""
    total = _sum(y)
    inverse = y.dtype.type(1 / total)
    for j in range(y.size):
        y[j] *= inverse
    return total


@jit
def softmax(x: ndarray, y: ndarray) -> None:
    step = _block_rows(x)
    for first in range(0, x.shape[0], step):
        x_block, y_block = x[first : first + step], y[first : first + step]
        for i in range(x_block.shape[0]):
            _center(x_block[i], y_block[i])
        _exp(y_block.reshape(-1))
        for i in range(x_block.shape[0]):
            _normalize(y_block[i])


@jit
def softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        for j in range(y_row.size):
            dx_row[j] = dy_row[j] * y_row[j]
        inner = y.dtype.type(_sum(dx_row))
        for j in range(y_row.size):
            dx_row[j] = y_row[j] * (dy_row[j] - inner)


@jit
def log_softmax(x: ndarray, y: ndarray) -> None:
    """(x_j - max(x)) - log(sum), with the difference rounded first: x_j - (max(x) + log(sum)) would lose the digits of
    the logarithm beside a large maximum."""
    for i in range(x.shape[0]):
        x_row, y_row = x[i], y[i]
        largest = _center(x_row, y_row)
        _exp(y_row)
        log_sum = y.dtype.type(math.log(_sum(y_row)))
        for j in range(y_row.size):
            y_row[j] = (x_row[j] - largest) - log_sum


@jit
def log_softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    for i in range(y.shape[0]):
        dy_row, y_row, dx_row = dy[i], y[i], dx[i]
        total = y.dtype.type(_sum(dy_row))
        for j in range(y_row.size):
            dx_row[j] = dy_row[j] - functions.exp(y_row[j]) * total


@jit
def _expected(row: ndarray, label: int, smoothing: float) -> float:
    """The sum of target times centered logit. NaN for a label that there is not: it shows in the loss."""
    if label < 0 or label >= row.size:
        return math.nan
    expected = (1 - smoothing) * row[label]
    return expected + smoothing / row.size * _sum(row) if smoothing > 0 else expected


@jit
def cross_entropy(
    logits: ndarray, labels: ndarray, smoothing: float, probabilities: ndarray, loss: ndarray
) -> None:
    """The logarithm of a probability is centered logit - log(sum), and the targets sum to 1."""
    rows = logits.shape[0]
    step = _block_rows(logits)
    total = 0.0
    for first in range(0, rows, step):
        block = probabilities[first : first + step]
        for i in range(block.shape[0]):
            _center(logits[first + i], block[i])
            total -= _expected(block[i], labels[first + i], smoothing)
        _exp(block.reshape(-1))
        for i in range(block.shape[0]):
            total += math.log(_normalize(block[i]))
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
        row, label = logits[i], labels[i]
        best = 0
        for j in range(1, row.size):  # (NaN counts as the largest)
            if row[j] > row[best] or (row[j] != row[j] and row[best] == row[best]):
                best = j
        found += best == label
    count[0] = found
