"""The steps of README.md as code: how far a vector has moved. bench/bench_drift.py prints the table."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from . import cpu

LANES = 128
ROWS, WIDTH = 8, 64


def in_numpy(x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    """Make four passes over memory: one writes the difference to a new vector, and three compute dot products."""
    for s, (start, stop) in enumerate(zip(starts, stops)):
        a, b = x[start:stop], before[start:stop]
        d = a - b
        squares[s] = np.dot(d, d), np.dot(b, b), np.dot(a, a)


@jit
def float64_sums(
    x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray
) -> None:
    """Make one pass. Each element is converted to float64, and the sums are loaded and stored for each element."""
    for s in range(starts.size):
        a, b = x[starts[s] : stops[s]], before[starts[s] : stops[s]]
        lanes, whole = partial[: 3 * LANES], a.size - a.size % LANES
        lanes[:] = 0
        for first in range(0, whole, LANES):
            some_a, some_b = a[first : first + LANES], b[first : first + LANES]
            for i in range(LANES):
                u, v = np.float64(some_a[i]), np.float64(some_b[i])
                lanes[i] += (u - v) * (u - v)
                lanes[LANES + i] += v * v
                lanes[2 * LANES + i] += u * u
        for i in range(whole, a.size):
            u, v = np.float64(a[i]), np.float64(b[i])
            lanes[0] += (u - v) * (u - v)
            lanes[LANES] += v * v
            lanes[2 * LANES] += u * u
        for k in range(3):
            squares[s, k] = lanes[k * LANES : (k + 1) * LANES].sum()


@jit
def eight_rows(
    x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray
) -> None:
    """Add eight squares in float32, and only their sum in float64. The sums are loaded and stored for each block."""
    block = ROWS * WIDTH
    column = np.empty(3 * WIDTH, x.dtype)  # a loop in one type fills the vector registers
    for s in range(starts.size):
        a, b = x[starts[s] : stops[s]], before[starts[s] : stops[s]]
        lanes, whole = partial[: 3 * WIDTH], a.size - a.size % block
        lanes[:] = 0
        for first in range(0, whole, block):
            p, q = a[first : first + block].reshape(ROWS, WIDTH), b[first : first + block].reshape(ROWS, WIDTH)
            for i in range(WIDTH):
                c, d, e, f, g, h, j, k = p[0, i], p[1, i], p[2, i], p[3, i], p[4, i], p[5, i], p[6, i], p[7, i]
                column[2 * WIDTH + i] = ((c * c + d * d) + (e * e + f * f)) + ((g * g + h * h) + (j * j + k * k))
                l, m, n, o, t, u, v, w = q[0, i], q[1, i], q[2, i], q[3, i], q[4, i], q[5, i], q[6, i], q[7, i]
                column[WIDTH + i] = ((l * l + m * m) + (n * n + o * o)) + ((t * t + u * u) + (v * v + w * w))
                c, d, e, f, g, h, j, k = c - l, d - m, e - n, f - o, g - t, h - u, j - v, k - w
                column[i] = ((c * c + d * d) + (e * e + f * f)) + ((g * g + h * h) + (j * j + k * k))
            for i in range(3 * WIDTH):
                lanes[i] += column[i]
        for i in range(whole, a.size):
            lane, y, z = i % WIDTH, a[i], b[i]
            lanes[lane] += (y - z) * (y - z)
            lanes[WIDTH + lane] += z * z
            lanes[2 * WIDTH + lane] += y * y
        for k in range(3):
            squares[s, k] = lanes[k * WIDTH : (k + 1) * WIDTH].sum()


@jit
def in_registers(
    x: ndarray, before: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray
) -> None:
    """Keep the sums of 32 squares in registers, as written-out instructions."""
    for s in range(starts.size):
        a, b = x[starts[s] : stops[s]], before[starts[s] : stops[s]]
        cpu.sums_of_squares(a, b, partial[: cpu.SUMS * cpu.WIDTH], squares[s])


RUNGS = {
    "1 NumPy expressions": in_numpy,
    "2 one pass, float64": float64_sums,
    "3 one pass, eight rows": eight_rows,
    "4 one pass, sums in registers": in_registers,
    "5 one pass, all threads": cpu.drift,
}
