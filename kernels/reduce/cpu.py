"""Reductions, compiled. Sums stream over rows, with the contiguous inner axis in the innermost loop.

A long sum is split into partial sums, as many as the caller gives room for, whatever the number of threads, and these
are added in their order: the result has the same bits on 1 thread and on 64.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__


@jit
def _sum_rows(x: ndarray, total: ndarray) -> None:
    """total (inner,) float64 = sum of the rows of x (rows, inner)"""
    for i in range(total.size):
        total[i] = 0
    if total.size == 1:
        for k in range(x.shape[0]):
            total[0] += x[k, 0]
        return
    for k in range(x.shape[0]):
        row = x[k]
        for i in range(total.size):
            total[i] += row[i]


@parallel_jit
def sum(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """partial (chunks, outer, inner) float64: the sums of each chunk of n"""
    outer, n, inner = x.shape
    chunks = partial.shape[0]
    for task in prange(chunks * outer):
        chunk, o = task // outer, task % outer
        _sum_rows(x[o, chunk * n // chunks : (chunk + 1) * n // chunks], partial[chunk, o])
    for o in range(outer):
        for i in range(inner):
            total = 0.0
            for chunk in range(chunks):
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
