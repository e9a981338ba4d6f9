"""The steps of README.md as code: sums over the middle axis of x (outer, n, inner).

bench/bench_reduce.py prints the table.
partial (chunks, outer, inner) float64 is scratch for partial sums, as in cpu.py.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import jit

from . import cpu, reference


@jit
def in_float32(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """Add to one sum in the type of x. Each addition waits for the one before, and rounds the growing sum."""
    for o in range(x.shape[0]):
        for i in range(x.shape[2]):
            total = x.dtype.type(0)
            for k in range(x.shape[1]):
                total += x[o, k, i]
            out[o, i] = total


@jit
def row_by_row(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """Keep one sum for each column, and load and store it for each row. For a plain vector, keep four sums."""
    for o in range(x.shape[0]):
        cpu._sum_few(x[o], partial[0, o])
        for i in range(x.shape[2]):
            out[o, i] = partial[0, o, i]


def wide_rows(x: ndarray, partial: ndarray, out: ndarray) -> None:
    """Add four wide rows at a time to about 256 independent sums. One thread computes each sum, in a single part."""
    cpu.sum(x, partial[:1], out)


RUNGS = {
    "1 a running float32 sum": in_float32,
    "2 a running float64 sum": jit(reference.sum),
    "3 row by row": row_by_row,
    "4 wide rows, one thread": wide_rows,
    "5 wide rows in parts, all threads": cpu.sum,
}
