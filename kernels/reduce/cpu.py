"""Reductions, compiled. Sums read memory once, several short rows at a time (rows.py), and add in float64.

A long sum is divided into partial sums, which are added in a fixed order. The shape of the scratch array `partial`, not
the number of threads, determines their number. So the result is bit-identical on 1 thread and on 64.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, jit, parallel_jit, prange

from ..elementwise.stream import fetch
from .along_row import first_largest, sum_in_float64
from .reference import __all__ as __all__
from .rows import narrow, wide

SERIAL = 32768  # one thread sums arrays with fewer numbers
TASKS = 64  # the sums of a larger array are divided into this many tasks for the threads


@helper
def _sum_rows(x: ndarray, total: ndarray) -> None:
    """Compute total (inner,) float64 = sum of the rows of x (rows, inner)."""
    width = wide(total.size)
    numbers = x.reshape(x.size)
    if numbers.size < 4 * width:
        total[:] = 0
        for k in range(x.shape[0]):
            row = x[k]
            for i in range(total.size):
                total[i] += row[i]
        return
    sums = np.zeros(width)
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
def _sum_parts(x: ndarray, first: int, last: int, partial: ndarray) -> None:
    """Compute the rows `first` to `last` - 1 of partial (chunks, outer, inner): sums of a chunk of axis 1 of x."""
    chunks, outer, inner = partial.shape
    n, numbers, sums = x.shape[1], x.reshape(x.size), partial.reshape(partial.size)
    row = first
    while row < last:
        chunk = row // outer
        begin, end, above = chunk * n // chunks, (chunk + 1) * n // chunks, chunk * outer
        for o in range(row - above, min(last - above, outer)):
            if inner == 1:
                sum_in_float64(numbers, o * n + begin, end - begin, sums, above + o)
            else:
                _sum_rows(x[o, begin:end], partial[chunk, o])
        row = above + outer


@parallel_jit
def _sum_in_tasks(x: ndarray, partial: ndarray) -> None:
    rows = partial.shape[0] * partial.shape[1]
    tasks = min(TASKS, rows)
    for number in prange(tasks):
        task = np.int64(number)  # an index of prange is unsigned: with signed integers, Numba would compute in float64
        _sum_parts(x, task * rows // tasks, (task + 1) * rows // tasks, partial)


@jit
def sum(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """Sum as in reference.py; partial (chunks, outer, inner) float64: scratch for the sums of each chunk of axis 1."""
    chunks, outer, inner = partial.shape
    if x.size < SERIAL:
        _sum_parts(x, 0, chunks * outer, partial)
    else:
        _sum_in_tasks(x, partial)
    for o in range(outer):
        for i in range(inner):
            total = partial[0, o, i]
            for chunk in range(1, chunks):
                total += partial[chunk, o, i]
            out[o, i] = total


@apart_jit
def _maximum_of(x: ndarray, first: int, last: int, out: ndarray, winner: ndarray) -> None:
    """Compute the rows `first` to `last` - 1 of out (outer, inner)."""
    n, inner = x.shape[1:]
    for o in range(first, last):
        best, where = out[o], winner[o]
        if inner == 1:
            where[0] = first_largest(x[o].reshape(n))
            best[0] = x[o, where[0], 0]
            continue
        for i in range(inner):
            best[i], where[i] = x[o, 0, i], 0
        for k in range(1, n):
            row = x[o, k]
            for i in range(inner):
                if best[i] == best[i] and not row[i] <= best[i]:
                    best[i], where[i] = row[i], k


@parallel_jit
def _maximum_in_tasks(x: ndarray, out: ndarray, winner: ndarray) -> None:
    tasks = min(TASKS, x.shape[0])
    for number in prange(tasks):
        task = np.int64(number)
        _maximum_of(x, task * x.shape[0] // tasks, (task + 1) * x.shape[0] // tasks, out, winner)


@jit
def maximum(x: ndarray, out: ndarray, winner: ndarray) -> None:
    if x.size < SERIAL:
        _maximum_of(x, 0, x.shape[0], out, winner)
    else:
        _maximum_in_tasks(x, out, winner)


@jit
def maximum_backward(dy: ndarray, winner: ndarray, dx: ndarray) -> None:
    dx[:] = 0
    for o in range(dx.shape[0]):
        for i in range(dx.shape[2]):
            dx[o, winner[o, i], i] = dy[o, i]
