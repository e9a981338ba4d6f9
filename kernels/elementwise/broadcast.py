"""Arithmetic of a large vector x and a small one w, each number of which belongs to many numbers of x.

x is (outer, n, inner) and w (outer, inner), stored as vectors: w[o, i] belongs to x[o, k, i] for all k. This is how a
sum over adjacent axes is spread over them again. Examples for images (N, H, W, C):

    a number for each channel               outer = 1      n = N * H * W   inner = C
    ... for each channel of an image        outer = N      n = H * W       inner = C
    ... for each pixel                      outer = N*H*W  n = C           inner = 1

A copy of w as long as x would be one more large vector to write and to read. Here a thread writes a row of about ROW
numbers, which stays in the first-level cache. If the rows of w are shorter, it contains several. Then the next row is
often the same, and nothing is written.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, apart_jit, helper, jit

from ..matmul.emitter import Emitter, Sums, Value, instructions
from ..matmul.tile import lanes
from .stream import chunked, get, put

ADD, SUBTRACT, MULTIPLY, DIVIDE = range(4)
ROW = 1024  # numbers: of float32, an eighth of a first-level cache of 32 KB


@helper
def _row(w: ndarray, inner: int) -> ndarray:
    """Return memory for a row: the largest multiple of `inner` numbers up to ROW, or ROW. A vector may follow."""
    size = ROW // inner * inner if 0 < inner <= ROW else ROW
    return np.empty(size + lanes(w), w.dtype)[:size]


@instructions
def _fill(e: Emitter, w: Value, o: Value, row: Value, i: Value, vectors: Value) -> None:
    """Write w[o] into so many vectors, from row[i] on."""
    equal = e.broadcast(e.number(w, o))

    def write(sums: Sums, _: Value, i: Value) -> Sums:
        e.store(equal, row, i)
        return sums

    e.loop(vectors, [(i, e.lanes)], {}, write)


@apart_jit
def _spread(w: ndarray, inner: int, size: int, begin: int, row: ndarray, known: int) -> int:
    """Write into `row` the numbers of w for begin, begin + 1, ... of x. Return which these are, -1 if from several o.

    size: of x. known: what the last call returned; if the numbers are the same, nothing is written.
    """
    each, i = size // (w.size // inner), 0  # each: n * inner
    o = begin // each
    now = o * inner + begin % inner if begin % each + row.size <= each else -1
    if now == known and now >= 0:
        return now
    if inner == 1:  # equal numbers, perhaps few
        while i < row.size:
            end = min(row.size, (o + 1) * each - begin)
            _fill(w, o, row, i, (end - i + lanes(row) - 1) // lanes(row))
            i, o = end, o + 1
        return now
    while i < row.size:
        numbers, c = w[o * inner : (o + 1) * inner], (begin + i) % inner
        part = row[i : min(row.size, (o + 1) * each - begin)]
        first, period = min(part.size, inner - c), min(part.size, inner)
        for k in range(first):
            part[k] = numbers[c + k]
        for k in range(first, period):
            part[k] = numbers[k - first]
        while period < part.size:  # twice as many each time
            more = part[period : 2 * period]
            for k in range(more.size):
                more[k] = part[k]
            period += more.size
        i, o = i + part.size, o + 1
    return now


@chunked
def _combine(operation: int, x: Part, w: ndarray, inner: int, out: Part, begin: int, size: int) -> None:
    row, known = _row(w, inner), -1
    for start in range(0, out.size, row.size):
        some, numbers = out[start : start + row.size], x[start : start + row.size]
        known = _spread(w, inner, size, begin + start, row[: some.size], known)
        if operation == ADD:
            for i in range(some.size):
                put(some, i, get(numbers, i) + get(row, i), False)
        elif operation == SUBTRACT:
            for i in range(some.size):
                put(some, i, get(numbers, i) - get(row, i), False)
        elif operation == MULTIPLY:
            for i in range(some.size):
                put(some, i, get(numbers, i) * get(row, i), False)
        else:
            for i in range(some.size):
                put(some, i, get(numbers, i) / get(row, i), False)


@jit
def add_broadcast(x: ndarray, w: ndarray, inner: int, out: ndarray) -> None:
    _combine(ADD, x, w, inner, out)


@jit
def subtract_broadcast(x: ndarray, w: ndarray, inner: int, out: ndarray) -> None:
    _combine(SUBTRACT, x, w, inner, out)


@jit
def multiply_broadcast(x: ndarray, w: ndarray, inner: int, out: ndarray) -> None:
    _combine(MULTIPLY, x, w, inner, out)


@jit
def divide_broadcast(x: ndarray, w: ndarray, inner: int, out: ndarray) -> None:
    _combine(DIVIDE, x, w, inner, out)
