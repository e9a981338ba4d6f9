"""Reductions, compiled. Sums read memory once, several short rows at a time (rows.py), and add in float64.

A long sum is divided into partial sums, which are added in a fixed order. The shape of the scratch array `partial`, not
the number of threads, determines their number. So the result is bit-identical on 1 thread and on 64.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, jit, parallel_jit, prange

from ..elementwise.stream import fetch
from .reference import __all__ as __all__
from .rows import narrow, wide

SERIAL = 32768  # one thread sums arrays with fewer numbers


@helper
def _sum_few(x: ndarray, total: ndarray) -> None:
    """Compute the same sums as _sum_rows, for few numbers."""
    total[:] = 0
    if total.size > 1:
        for k in range(x.shape[0]):
            row = x[k]
            for i in range(total.size):
                total[i] += row[i]
        return
    numbers = x.reshape(x.size)
    a, b, c, d = 0.0, 0.0, 0.0, 0.0  # an addition waits some cycles for the one before: four independent sums
    quads = numbers.size // 4 * 4
    for k in range(0, quads, 4):
        a, b, c, d = a + numbers[k], b + numbers[k + 1], c + numbers[k + 2], d + numbers[k + 3]
    for k in range(quads, numbers.size):
        a += numbers[k]
    total[0] = (a + b) + (c + d)


@helper
def _sum_rows(x: ndarray, total: ndarray) -> None:
    """Compute total (inner,) float64 = sum of the rows of x (rows, inner)."""
    width = wide(total.size)
    if x.size < 4 * width:
        _sum_few(x, total)
        return
    sums = np.zeros(width)
    numbers = x.reshape(x.size)
    begin = 0
    while begin + 4 * width <= numbers.size:  # four rows together: the sums are loaded and stored a quarter as often
        fetch(numbers, begin + 4 * width, 4 * width)
        four = numbers[begin : begin + 4 * width].reshape(4, width)
        a, b, c, d = four[0], four[1], four[2], four[3]
        for i in range(width):
            sums[i] += (np.float64(a[i]) + np.float64(b[i])) + (np.float64(c[i]) + np.float64(d[i]))
        begin += 4 * width
    while begin < numbers.size:
        row = numbers[begin : begin + width]
        for i in range(row.size):
            sums[i] += row[i]
        begin += width
    narrow(sums, total)


@apart_jit
def _sum_part(x: ndarray, task: int, partial: ndarray) -> None:
    chunks, outer = partial.shape[:2]
    n, chunk, o = x.shape[1], task // outer, task % outer
    _sum_rows(x[o, chunk * n // chunks : (chunk + 1) * n // chunks], partial[chunk, o])


@parallel_jit
def _sum_parts(x: ndarray, partial: ndarray) -> None:
    for task in prange(partial.shape[0] * partial.shape[1]):
        _sum_part(x, task, partial)


@jit
def sum(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """Sum as in reference.py; partial (chunks, outer, inner) float64: scratch for the sums of each chunk of axis 1."""
    chunks, outer, inner = partial.shape
    if x.size < SERIAL:
        for task in range(chunks * outer):
            _sum_part(x, task, partial)
    else:
        _sum_parts(x, partial)
    for o in range(outer):
        for i in range(inner):
            total = partial[0, o, i]
            for chunk in range(1, chunks):
                total += partial[chunk, o, i]
            out[o, i] = total


@jit
def maximum(x: ndarray, out: ndarray, winner: ndarray) -> None:
    outer, n, inner = x.shape
    for o in range(outer):
        best, where = out[o], winner[o]
        for i in range(inner):
            best[i], where[i] = x[o, 0, i], 0
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
