"""Reductions, compiled. Sums stream over rows, with the contiguous inner axis in the innermost loop.

A long sum is split into CHUNKS partial sums, always the same number and always added in the same order: the result
has the same bits on 1 thread and on 64.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__

CHUNKS = 16


@jit
def _add_rows(x: ndarray, total: ndarray) -> None:
    """total (inner,) float64 += sum of the rows of x (rows, inner)"""
    if total.size == 1:
        for k in range(x.shape[0]):
            total[0] += x[k, 0]
        return
    for k in range(x.shape[0]):
        row = x[k]
        for i in range(total.size):
            total[i] += row[i]


@parallel_jit
def sum(x: ndarray, out: ndarray) -> None:
    outer, n, inner = x.shape
    partial = np.zeros((CHUNKS, outer, inner), np.float64)
    for chunk in prange(CHUNKS):
        for o in range(outer):
            _add_rows(x[o, chunk * n // CHUNKS : (chunk + 1) * n // CHUNKS], partial[chunk, o])
    for o in range(outer):
        for i in range(inner):
            total = 0.0
            for chunk in range(CHUNKS):
                total += partial[chunk, o, i]
            out[o, i] = total


@jit
def maximum(x: ndarray, out: ndarray, winner: ndarray) -> None:
    outer, n, inner = x.shape
    for o in range(outer):
        best, where = out[o], winner[o]
        best[:] = x[o, 0]
        where[:] = 0
        for k in range(1, n):
            row = x[o, k]
            for i in range(inner):
                if best[i] == best[i] and not row[i] <= best[i]:
                    best[i], where[i] = row[i], k


@jit
def maximum_backward(dy: ndarray, winner: ndarray, dx: ndarray) -> None:
    dx[:] = 0
    for o in range(dx.shape[0]):
        for i in range(dx.shape[2]):
            dx[o, winner[o, i], i] = dy[o, i]
