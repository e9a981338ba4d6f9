"""The steps of README.md as code: softmax of each row. bench/bench_softmax.py prints the table."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from ..activation import functions
from . import cpu


def in_numpy(x: ndarray, y: ndarray) -> None:
    """Compute one operation in each pass; three of the passes write to a new array of the size of x."""
    e = np.exp(x - x.max(1, keepdims=True))
    y[:] = e / e.sum(1, keepdims=True)


@jit
def calls_of_exp(x: ndarray, y: ndarray) -> None:
    """Process one row after the other, in the cache; exp is a call of the mathematics library for each number."""
    rows, classes = x.shape
    for i in range(rows):
        largest, total = x[i, 0], 0.0
        for j in range(1, classes):
            largest = max(largest, x[i, j])
        for j in range(classes):
            y[i, j] = math.exp(x[i, j] - largest)
            total += y[i, j]
        for j in range(classes):
            y[i, j] /= total


@jit
def polynomial(x: ndarray, y: ndarray) -> None:
    """Compute exp without calls. LLVM vectorises along the row, but ten classes are too few for a vector."""
    rows, classes = x.shape
    for i in range(rows):
        largest, total = x[i, 0], 0.0
        for j in range(1, classes):
            largest = max(largest, x[i, j])
        for j in range(classes):
            y[i, j] = functions.exp(x[i, j] - largest)
        for j in range(classes):
            total += y[i, j]
        factor = y.dtype.type(1 / total)
        for j in range(classes):
            y[i, j] *= factor


RUNGS = {
    "1 NumPy": in_numpy,
    "2 row by row, calls of exp": calls_of_exp,
    "3 row by row, a polynomial": polynomial,
    "4 blocks of rows": cpu.softmax,
}
