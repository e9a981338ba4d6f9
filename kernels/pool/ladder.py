"""The steps of README.md as code: the largest of 2 x 2 pixels, stride 2. bench/bench_pool.py prints the tables."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

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


@parallel_jit
def tap_by_tap(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Call the loop for any window: channels innermost, no branches. It loads and stores y and place for each tap
    (position in the window)."""
    for n in prange(x.shape[0]):
        cpu._max_pool_image(x[n], TWO, TWO, NONE, y[n], place[n])


def in_registers(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Compare the four pixels of a window in registers: y and place are stored once."""
    cpu.max_pool(x, TWO, TWO, NONE, y, place)


@parallel_jit
def zeros_first(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    """Call the loop for any window: dx is filled with zeros, then read and written again at each place."""
    for n in prange(dx.shape[0]):
        cpu._max_pool_backward_image(dy[n], place[n], TWO, TWO, NONE, dx[n])


def written_once(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    """Write each pixel once, a gradient or a zero, with vector instructions: windows do not overlap."""
    cpu.max_pool_backward(dy, place, TWO, TWO, NONE, dx)


RUNGS = {
    "1 number by number": naive,
    "2 the same on all threads": all_threads,
    "3 tap by tap": tap_by_tap,
    "4 in registers": in_registers,
}
BACKWARD = {"1 zeros, then at each place": zeros_first, "2 written once": written_once}
