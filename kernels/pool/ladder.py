"""The steps of README.md as code: the largest of 2 x 2 pixels, stride 2. bench/bench_pool.py prints the tables."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper, jit, parallel_jit, prange

from . import cpu

TWO, NONE = (2, 2), (0, 0)


@jit
def _image(x: ndarray, y: ndarray, place: ndarray) -> None:
    for h, w, c in np.ndindex(y.shape):
        best, where = x[2 * h, 2 * w, c], 0
        for tap in range(1, 4):
            value = x[2 * h + tap // 2, 2 * w + tap % 2, c]
            if value > best or value != value:
                best, where = value, tap
        y[h, w, c], place[h, w, c] = best, where


@jit
def naive(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Process number by number: no vectors, and a branch with random outcomes, which the CPU often mispredicts."""
    for n in range(x.shape[0]):
        _image(x[n], y[n], place[n])


@parallel_jit
def all_threads(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Divide the images among the threads."""
    for n in prange(x.shape[0]):
        _image(x[n], y[n], place[n])


@helper
def _keep_largest(x: ndarray, tap: int, y: ndarray, place: ndarray) -> None:
    """Where pixel x (C,) is larger than y (C,), or is NaN, set y to x and place (C,) to tap. `|` replaces `or`, because
    LLVM vectorises only loops without branches."""
    here = np.uint8(tap)
    for c in range(x.size):
        wins = (x[c] > y[c]) | (x[c] != x[c])
        y[c] = x[c] if wins else y[c]
        place[c] = here if wins else place[c]


@parallel_jit
def tap_by_tap(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Take the channels innermost, without branches. This loads and stores y and place for each tap (position in the
    window)."""
    for n in prange(x.shape[0]):
        for h in range(y.shape[1]):
            for w in range(y.shape[2]):
                y[n, h, w] = x[n, 2 * h, 2 * w]
                place[n, h, w] = 0
                for tap in range(1, 4):
                    _keep_largest(x[n, 2 * h + tap // 2, 2 * w + tap % 2], tap, y[n, h, w], place[n, h, w])


@helper
def _first_largest(a: float, b: float, c: float, d: float) -> tuple[float, np.uint8]:
    """Return the largest of four numbers, and its index; among equal numbers, the first index."""
    best, where = a, np.uint8(0)
    wins = (b > best) | (b != b)
    best, where = (b if wins else best), (np.uint8(1) if wins else where)
    wins = (c > best) | (c != c)
    best, where = (c if wins else best), (np.uint8(2) if wins else where)
    wins = (d > best) | (d != d)
    return (d if wins else best), (np.uint8(3) if wins else where)


@helper
def _largest(a: ndarray, b: ndarray, c: ndarray, d: ndarray, y: ndarray, place: ndarray) -> None:
    """Compute y (C,) = the largest of the four pixels a, b, c, d (C,) of a window, and place (C,) = its index."""
    for i in range(y.size):
        y[i], place[i] = _first_largest(a[i], b[i], c[i], d[i])


@parallel_jit
def in_registers(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Compare the four pixels of a window in registers: y and place are stored once."""
    for n in prange(x.shape[0]):
        for h in range(y.shape[1]):
            top, bottom = x[n, 2 * h], x[n, 2 * h + 1]
            for w in range(y.shape[2]):
                _largest(top[2 * w], top[2 * w + 1], bottom[2 * w], bottom[2 * w + 1], y[n, h, w], place[n, h, w])


def in_vectors(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Write out the vector instructions, for any window: no test at the beginning of each loop over channels."""
    cpu.max_pool(x, TWO, TWO, NONE, y, place)


@helper
def _spread(dy: ndarray, place: ndarray, a: ndarray, b: ndarray, c: ndarray, d: ndarray) -> None:
    """Write the pixels a, b, c, d (C,) of a window: dy (C,) at the place (C,), else 0."""
    zero = dy.dtype.type(0)
    for i in range(dy.size):
        gradient, where = dy[i], place[i]
        a[i] = gradient if where == np.uint8(0) else zero
        b[i] = gradient if where == np.uint8(1) else zero
        c[i] = gradient if where == np.uint8(2) else zero
        d[i] = gradient if where == np.uint8(3) else zero


@parallel_jit
def zeros_first(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    """Fill dx with zeros, then add each gradient at its place, number by number."""
    for n in prange(dx.shape[0]):
        dx[n] = 0
        for h in range(dy.shape[1]):
            for w in range(dy.shape[2]):
                for c in range(dy.shape[3]):
                    tap = np.int64(place[n, h, w, c])
                    dx[n, 2 * h + tap // 2, 2 * w + tap % 2, c] += dy[n, h, w, c]


@parallel_jit
def written_once(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    """Write each pixel once, a gradient or a zero: windows do not overlap."""
    height, width = dy.shape[1:3]
    for n in prange(dx.shape[0]):
        for h in range(height):
            top, bottom = dx[n, 2 * h], dx[n, 2 * h + 1]
            for w in range(width):
                _spread(dy[n, h, w], place[n, h, w], top[2 * w], top[2 * w + 1], bottom[2 * w], bottom[2 * w + 1])
            top[2 * width :] = 0  # if the width or height is odd, the last pixels are in no window
            bottom[2 * width :] = 0
        dx[n, 2 * height :] = 0


def gradients_in_vectors(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    """Write out the vector instructions, for adjacent windows of any size."""
    cpu.max_pool_backward(dy, place, TWO, TWO, NONE, dx)


RUNGS = {
    "1 number by number": naive,
    "2 the same on all threads": all_threads,
    "3 tap by tap": tap_by_tap,
    "4 in registers": in_registers,
    "5 vector instructions": in_vectors,
}
BACKWARD = {
    "1 zeros, then at each place": zeros_first,
    "2 written once": written_once,
    "3 vector instructions": gradients_in_vectors,
}
