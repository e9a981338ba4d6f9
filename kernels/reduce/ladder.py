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
    rows, columns = x.shape[1:]
    quads = rows // 4 * 4 if columns == 1 else 0
    for o in range(x.shape[0]):
        total = partial[0, o]
        total[:] = 0
        if columns == 1:
            a, b, c, d = 0.0, 0.0, 0.0, 0.0
            for k in range(0, quads, 4):
                a, b, c, d = a + x[o, k, 0], b + x[o, k + 1, 0], c + x[o, k + 2, 0], d + x[o, k + 3, 0]
            total[0] = (a + b) + (c + d)
        for k in range(quads, rows):
            row = x[o, k]
            for i in range(columns):
                total[i] += row[i]
        for i in range(columns):
            out[o, i] = total[i]


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
