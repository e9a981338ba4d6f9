"""Dropout on all cores: every element draws its own random number, in any order (see reference.py)."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

from ..elementwise.stream import CHUNK, SERIAL, chunks, finish, get, part, passes_caches, put
from .reference import GOLDEN as GOLDEN_NUMBER
from .reference import __all__ as __all__

# Typed, because Numba turns a sum of signed and unsigned integers into float64.
GOLDEN = np.uint64(GOLDEN_NUMBER)
FACTOR1, FACTOR2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT27, SHIFT30, SHIFT31, SHIFT32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
MASK32 = np.uint64(2**32 - 1)


@jit
def _mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> SHIFT30)) * FACTOR1
    z = (z ^ (z >> SHIFT27)) * FACTOR2
    return z ^ (z >> SHIFT31)


@jit
def _mix32(z: np.uint32, key: np.uint32) -> np.uint32:
    """In uint32 after every step: Numba would go on in 64 bits, where a CPU has half the lanes and slow products."""
    u = np.uint32
    z = u(u(z ^ (z >> u(17))) * u(0xED5AD4BB))
    z = u(u(z ^ (z >> u(11))) + key)
    z = u(z * u(0xAC4C1B51))
    z = u(u(z ^ (z >> u(15))) * u(0x31848BAB))
    return u(z ^ (z >> u(14)))


@jit
def _dropout(x: ndarray, p: float, seed: np.uint64, position: np.uint64, y: ndarray, past: bool) -> None:
    """Draws the numbers `position`, position + 1, ...: of one block, for which the keys are the same."""
    zero, factor = x.dtype.type(0), x.dtype.type(1 / (1 - p))
    threshold = np.uint32(math.ceil(p * 2.0**31))  # integers compare as the reference's fractions do
    keys = _mix64(_mix64(seed + GOLDEN) + (position >> SHIFT32) * GOLDEN)
    first, key = np.uint32((position + keys) & MASK32), np.uint32(keys >> SHIFT32)
    for i in range(y.size):
        kept = np.uint32(_mix32(np.uint32(first + np.uint32(i)), key) >> np.uint32(1)) >= threshold
        v = factor * get(x, i)
        put(y, i, v if kept else zero, past)
    finish(past)


@jit
def _across_blocks(x: ndarray, p: float, seed: int, position: np.uint64, y: ndarray, past: bool) -> None:
    """The same for any numbers: those up to the end of the first one's block, and the others."""
    room = np.int64(MASK32 - (position & MASK32)) + 1
    if y.size <= room:
        _dropout(x, p, np.uint64(seed), position, y, past)
    else:
        _dropout(x[:room], p, np.uint64(seed), position, y[:room], False)
        _dropout(x[room:], p, np.uint64(seed), position + np.uint64(room), y[room:], False)


@parallel_jit
def dropout(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    if y.size <= SERIAL:
        _across_blocks(x, p, seed, np.uint64(offset), y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        position = np.uint64(offset) + np.uint64(chunk) * np.uint64(CHUNK)
        _across_blocks(part(x, chunk), p, seed, position, part(y, chunk), past)
