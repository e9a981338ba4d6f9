"""The first two steps of README.md: batch norm and relu, x (rows, C). bench/bench_norm.py prints the table."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit


@jit
def channel_by_channel(x: ndarray, weight: ndarray, bias: ndarray, y: ndarray) -> None:
    """Process channel by channel, as in the formula: three passes over memory, each with a stride of one row."""
    rows, channels = x.shape
    for c in range(channels):
        mean, variance = 0.0, 0.0
        for r in range(rows):
            mean += x[r, c] / rows
        for r in range(rows):
            variance += (x[r, c] - mean) ** 2 / rows
        for r in range(rows):
            value = (x[r, c] - mean) / np.sqrt(variance + 1e-5) * weight[c] + bias[c]
            y[r, c] = max(value, 0.0)


@jit
def row_by_row(x: ndarray, weight: ndarray, bias: ndarray, y: ndarray) -> None:
    """Process row by row, channels innermost: two passes in the order of memory, float64 sums in an array."""
    rows, channels = x.shape
    first, second = np.zeros(channels), np.zeros(channels)
    for r in range(rows):
        row = x[r]
        for c in range(channels):
            distance = np.float64(row[c] - x[0, c])
            first[c] += distance
            second[c] += distance * distance
    scale = (weight / np.sqrt(second / rows - (first / rows) ** 2 + 1e-5)).astype(x.dtype)
    mean = (x[0] + first / rows).astype(x.dtype)
    zero = x.dtype.type(0)
    for r in range(rows):
        row, result = x[r], y[r]
        for c in range(channels):
            value = (row[c] - mean[c]) * scale[c] + bias[c]
            result[c] = zero if value < zero else value


RUNGS = {"1 as the formula is read": channel_by_channel, "2 row by row": row_by_row}
