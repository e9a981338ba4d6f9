"""The norms of a vector, of an earlier one and of their difference: one pass over memory, 8 bytes for each float32.

A block is ROWS rows of WIDTH elements. The squares of each column are added in a vector register, as numbers of the
arrays' type; only their sum is added in float64. A sum of positive numbers has a relative error of at most one rounding
for each of its additions and products. So |x|^2 has ROWS of them, and |x - before|^2 two more: in float32 at most
34 * 2^-24 = 2.0e-6, and half of this for the norm.

The order of all additions depends on the segments, and not on the number of threads: the number of chunks is constant.
Products and sums are not contracted, so all CPUs compute the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, parallel_jit, prange

from ..elementwise.stream import SERIAL
from ..matmul.emitter import Emitter, Sums, instructions
from .reference import __all__ as __all__

CHUNKS = 32
LINE = 16  # elements: chunks begin on a cache line of float32
ROWS, WIDTH = 32, 32
SUMS = 3  # for each segment: the squares of x - before, of before and of x


def drift_partial(segments: int) -> int:
    """Return how many float64 numbers `drift` needs: for each chunk, WIDTH lanes and the result of each segment."""
    return CHUNKS * SUMS * (WIDTH + segments)


@instructions
def _add_block(e: Emitter, x: Any, y: Any, first: Any, rows: Any, lanes: Any) -> None:
    """lanes (SUMS * WIDTH,) += the sums of the squares of x - y, y and x, for each column of `rows` rows from `first`.

    rows: at least 1. So many columns are summed together that three sums of each fit into the registers.
    """
    b, vectors = e.builder, WIDTH // e.lanes
    together, wide = min(vectors, REGISTERS // 4), ir.VectorType(ir.DoubleType(), e.lanes)
    for begin in range(0, vectors, together):

        def add_row(sums: Sums, _: Any, row: Any, begin: int = begin) -> Sums:
            added = {}
            for v in range(begin, begin + together):
                new, old = (e.load(array, b.add(row, e.integer(v * e.lanes))) for array in (x, y))
                for kind, number in enumerate((b.fsub(new, old), old, new)):
                    added[kind, v] = b.fadd(sums[kind, v], b.fmul(number, number))
            return added

        zeros = {(kind, v): e.filled(0.0) for kind in range(SUMS) for v in range(begin, begin + together)}
        for (kind, v), total in e.loop(rows, [(first, WIDTH)], zeros, add_row).items():
            place = b.bitcast(e.at(lanes, kind * WIDTH + v * e.lanes), wide.as_pointer())
            total = total if total.type == wide else b.fpext(total, wide)
            b.store(b.fadd(b.load(place, align=8), total), place, align=8)


@apart_jit
def sums_of_squares(x: ndarray, y: ndarray, lanes: ndarray, sums: ndarray) -> None:
    """sums (SUMS,) = the sums of the squares of x - y, y and x, each (n,). lanes (SUMS * WIDTH,) float64: scratch."""
    lanes[:] = 0
    whole = x.size - x.size % WIDTH
    for first in range(0, whole, ROWS * WIDTH):
        _add_block(x, y, first, min(ROWS, (whole - first) // WIDTH), lanes)
    for i in range(whole, x.size):
        new, old = x[i], y[i]
        lanes[i - whole] += (new - old) * (new - old)
        lanes[WIDTH + i - whole] += old * old
        lanes[2 * WIDTH + i - whole] += new * new
    quarter = WIDTH // 4  # an addition waits for the one before
    for kind in range(SUMS):
        total, own = 0.0, lanes[kind * WIDTH : (kind + 1) * WIDTH]
        for i in range(quarter):
            total += (own[i] + own[i + quarter]) + (own[i + 2 * quarter] + own[i + 3 * quarter])
        sums[kind] = total


@apart_jit
def _chunk(
    chunk: int, chunks: int, x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray
) -> None:
    lines = x.size // LINE
    begin = lines * chunk // chunks * LINE
    end = lines * (chunk + 1) // chunks * LINE if chunk + 1 < chunks else x.size
    lanes, sums = partial[: SUMS * WIDTH], partial[SUMS * WIDTH :].reshape(starts.size, SUMS)
    for s in range(starts.size):
        low, high = max(begin, starts[s]), min(end, stops[s])
        if low < high:
            sums_of_squares(x[low:high], before[low:high], lanes, sums[s])
        else:
            sums[s] = 0


@parallel_jit
def drift(x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    width = SUMS * (WIDTH + starts.size)
    chunks = CHUNKS if x.size > SERIAL else 1
    if chunks == 1:
        _chunk(0, 1, x, before, starts, stops, partial[:width])
    else:
        for chunk in prange(chunks):
            _chunk(chunk, chunks, x, before, starts, stops, partial[chunk * width : (chunk + 1) * width])
    for s in range(starts.size):  # Numba would distribute `squares += ...` over the threads: slower than all the rest
        for kind in range(SUMS):
            total = 0.0
            for chunk in range(chunks):
                total += partial[chunk * width + SUMS * (WIDTH + s) + kind]
            squares[s, kind] = total
