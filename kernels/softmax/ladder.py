"""The steps of README.md as code: softmax of each row, on one thread. bench/bench_softmax.py prints the table."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.jit import jit

from ..activation import functions
from . import cpu


def in_numpy(x: ndarray, y: ndarray) -> None:
    """A pass for each operation, most of them into a new array."""
    e = np.exp(x - x.max(1, keepdims=True))
    y[:] = e / e.sum(1, keepdims=True)


@jit
def calls_of_exp(x: ndarray, y: ndarray) -> None:
    """One row after the other, in the cache; exp is a call of the mathematics library for each number."""
    for i in range(x.shape[0]):
        largest, total = x[i].max(), 0.0
        for j in range(x.shape[1]):
            y[i, j] = math.exp(x[i, j] - largest)
            total += y[i, j]
        for j in range(x.shape[1]):
            y[i, j] /= total


@jit
def polynomial(x: ndarray, y: ndarray) -> None:
    """exp as a polynomial, but along the row: ten classes do not fill a vector of 16, and one sum waits for itself."""
    for i in range(x.shape[0]):
        largest, row = x[i].max(), y[i]
        for j in range(row.size):
            row[j] = functions.exp(x[i, j] - largest)
        total = 0.0
        for j in range(row.size):
            total += row[j]
        factor = y.dtype.type(1 / total)
        for j in range(row.size):
            row[j] *= factor


RUNGS = {
    "1 NumPy": in_numpy,
    "2 row by row, calls of exp": calls_of_exp,
    "3 row by row, a polynomial": polynomial,
    "4 blocks of rows": cpu.softmax,
}
