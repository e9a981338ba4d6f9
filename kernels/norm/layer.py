"""Layer norm: three passes over a few rows, which stay in the first-level cache. The rows are divided among threads.

    sum of x - x[0]          for the mean: if all numbers are equal, it is exact
    sum of (x - mean)^2      for the variance: no digits cancel, even if the mean is large
    y = (x - mean) * rstd * weight + bias

Each pass processes ROWS rows before the next pass begins. A square root and two divisions of a row take 50 cycles, one
after the other; meanwhile a core sums other rows. The sums are in vector registers (reduce/along_row.py).

In the backward pass, the gradients of weight and bias are sums over the rows: in float32 over ROWS rows, and in float64
over these sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper

from ..elementwise.stream import get, put
from ..matmul.emitter import Emitter, Value, instructions
from ..reduce.along_row import Load, along_row

ROWS = 8  # rows that a pass processes before the next pass: so the waits of one row overlap the work on others


@instructions
def _sum_distances(e: Emitter, x: Value, at: Value, count: Value, origin: Value, squared: Value, to: Value) -> None:
    """Compute to[0] = the sum of x - origin[0] over `count` numbers from x[at] on, or, if `squared`, of its squares."""
    row, center = e.at(x, at), e.broadcast(e.number(origin, 0))

    def distance(load: Load) -> Value:
        return e.builder.fsub(load(row), center)

    def square(load: Load) -> Value:
        return e.builder.fmul(distance(load), distance(load))

    with e.builder.if_else(squared) as (squares, distances):
        with squares:
            along_row(e, e, count, 1, lambda load: [square(load)], to)
        with distances:
            along_row(e, e, count, 1, lambda load: [distance(load)], to)


@instructions
def _sum_gradients(
    e: Emitter, dy: Value, x: Value, at: Value, count: Value, weight: Value, mean: Value, rstd: Value, to: Value
) -> None:
    """Compute to[0] = the sum of dz over a row, to[1] = the sum of dz * z.

    dz = dy * weight, z = (x - mean[0]) * rstd[0].
    """
    b, dys, row = e.builder, e.at(dy, at), e.at(x, at)
    center, scale = (e.broadcast(e.number(array, 0)) for array in (mean, rstd))

    def terms(load: Load) -> Sequence[Value]:
        dz = b.fmul(load(dys), load(weight))
        return dz, b.fmul(dz, b.fmul(b.fsub(load(row), center), scale))

    along_row(e, e, count, 2, terms, to)


@helper
def normalize_each(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    """Normalise the rows of x (rows, C): y = (x - mean) * rstd * weight + bias."""
    channels, sums = x.shape[1], np.empty(1, x.dtype)
    numbers, results = x.reshape(x.size), y.reshape(y.size)
    for start in range(0, x.shape[0] if channels else 0, ROWS):
        rows = range(start, min(start + ROWS, x.shape[0]))
        for r in rows:
            _sum_distances(numbers, r * channels, channels, numbers[r * channels :], False, sums)
            mean[r] = numbers[r * channels] + np.float64(sums[0]) / channels
        for r in rows:
            _sum_distances(numbers, r * channels, channels, mean[r:], True, sums)
            rstd[r] = 1 / math.sqrt(np.float64(sums[0]) / channels + eps)
        for r in rows:
            shift, scale = mean[r], rstd[r]
            row, result = numbers[r * channels : (r + 1) * channels], results[r * channels : (r + 1) * channels]
            for c in range(channels):
                put(result, c, (get(row, c) - shift) * scale * get(weight, c) + get(bias, c), False)


@helper
def gradients_of_rows(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, dx: ndarray, total: ndarray
) -> None:
    """Compute dx, and total (2, C) float64 = the sums of dy and dy * z over the rows, with z = (x - mean) * rstd."""
    rows, channels = x.shape
    few, sums = np.empty((2, channels), x.dtype), np.empty((ROWS, 2), x.dtype)
    dys, numbers, dxs = dy.reshape(dy.size), x.reshape(x.size), dx.reshape(dx.size)
    first, second = few[0], few[1]
    total[:] = 0
    for start in range(0, rows if channels else 0, ROWS):
        few[:] = 0
        end = min(start + ROWS, rows)
        for r in range(start, end):
            _sum_gradients(dys, numbers, r * channels, channels, weight, mean[r:], rstd[r:], sums[r - start])
        for r in range(start, end):
            shift, scale, here = mean[r], rstd[r], slice(r * channels, (r + 1) * channels)
            mean_dz = x.dtype.type(np.float64(sums[r - start, 0]) / channels)
            mean_dz_z = x.dtype.type(np.float64(sums[r - start, 1]) / channels)
            dy_row, row, dx_row = dys[here], numbers[here], dxs[here]
            for c in range(channels):
                gradient, z = get(dy_row, c), (get(row, c) - shift) * scale
                put(dx_row, c, scale * (gradient * get(weight, c) - mean_dz - z * mean_dz_z), False)
                put(first, c, first[c] + gradient, False)  # not `get`: what it reads must not be written by `put`
                put(second, c, second[c] + gradient * z, False)
        for k in range(2):
            for c in range(channels):
                total[k, c] += few[k, c]
