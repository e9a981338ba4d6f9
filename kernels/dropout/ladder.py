"""The steps of README.md as code. bench/bench_dropout.py prints the table.

Each step drops a fraction p of x, but not the same elements: only the last two use the numbers of reference.py.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from . import cpu


def in_numpy(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """Use a generator with a state: one number after the other, on one thread. The backward pass would read `kept`."""
    kept = np.random.default_rng(seed).random(x.size, np.float32) >= p
    y[:] = np.where(kept, x / (1 - p), 0)


@jit
def in_64_bits(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """Use SplitMix64 of a counter. It has no state, but a vector holds only 8 integers of 64 bits."""
    zero, factor = x.dtype.type(0), x.dtype.type(1 / (1 - p))
    threshold = np.uint64(math.ceil(p * 2.0**53))
    first = np.uint64(seed) + np.uint64(offset) * cpu.GOLDEN
    for i in range(y.size):
        kept = (cpu._mix64(first + np.uint64(i) * cpu.GOLDEN) >> np.uint64(11)) >= threshold
        y[i] = factor * x[i] if kept else zero


@jit
def in_32_bits(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """Use the random numbers of cpu.py, on one thread."""
    cpu._across_blocks(x, p, seed, np.uint64(offset), y, False)


RUNGS = {
    "1 NumPy's generator": in_numpy,
    "2 SplitMix64, one thread": in_64_bits,
    "3 32 bits, one thread": in_32_bits,
    "4 32 bits, all threads": cpu.dropout,
}
