"""The steps of README.md as code: out (M, N) = a (M, K) @ b (K, N) on one thread.

README.md explains what each step changes, and what the change gains or costs. bench/bench_matmul.py prints the table.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from .pack import pack_rows
from .tile import panel, panel_width

KC, NC = 64, 128  # a block of b: KC x NC numbers


@jit
def naive(a: ndarray, b: ndarray, out: ndarray) -> None:
    """For each m and n, sum over k. b is read down a column, so each number needs a new cache line."""
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = out.dtype.type(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            out[m, n] = total


@jit
def rows_inside(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Loop over n innermost, along rows of b and out: LLVM vectorises it. Each sum is loaded and stored K times."""
    for m in range(out.shape[0]):
        row = out[m]
        row[:] = 0
        for k in range(a.shape[1]):
            number, line = a[m, k], b[k]
            for n in range(row.size):
                row[n] += number * line[n]


@jit
def blocked(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Loop as in `rows_inside`, but over one block of b at a time. The block stays in L1 while all rows of a use it."""
    out[:] = 0
    for k0 in range(0, a.shape[1], KC):
        for n0 in range(0, out.shape[1], NC):
            for m in range(out.shape[0]):
                row = out[m, n0 : n0 + NC]
                for k in range(k0, min(k0 + KC, a.shape[1])):
                    number, line = a[m, k], b[k, n0 : n0 + NC]
                    for n in range(row.size):
                        row[n] += number * line[n]


@jit
def tiles(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Run the micro-kernel on packed panels of b: the sums stay in registers from the first to the last k."""
    rows, columns = out.shape
    depth, width = a.shape[1], panel_width(a)
    packed = np.empty(depth * width, a.dtype)
    steps, a_rows, out_rows = np.arange(depth), np.arange(rows) * depth, np.arange(rows) * columns
    for n in range(0, columns, width):
        wide = min(width, columns - n)
        pack_rows(b.reshape(b.size), n, columns, depth, wide, packed, width)
        panel(rows, depth, False, a.reshape(a.size), steps, a_rows, 0, packed, 0, width,
              out.reshape(out.size), out_rows, n, wide, False, packed, 0, packed)  # fmt: skip


@jit
def _split(x: ndarray) -> ndarray:
    """Return three parts whose sum is x (float32). Each has the 8 significant bits of a bfloat16 (amx.py)."""
    parts, rest = np.empty((3, *x.shape), np.float32), x.copy()
    for i in range(3):
        bits = (rest.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)  # rounds to bfloat16
        parts[i] = bits.view(np.float32)
        rest -= parts[i]
    return parts


@jit
def parts(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Compute a float32 product from six products of bfloat16 parts, as AMX does; loops as in `rows_inside`."""
    left, right = _split(a), _split(b)
    out[:] = 0
    for i, j in ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)):
        for m in range(out.shape[0]):
            for k in range(a.shape[1]):
                number, line = left[i, m, k], right[j, k]
                for n in range(out.shape[1]):
                    out[m, n] += number * line[n]


RUNGS = {
    "1 naive": naive,
    "2 rows inside": rows_inside,
    "3 blocked": blocked,
    "4 tiles on packed panels": tiles,
    "9 bfloat16 parts, without AMX": parts,
}
