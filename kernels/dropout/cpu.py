"""Dropout on all cores: the random number of an element depends on no other element (see reference.py)."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, helper

from ..elementwise.stream import chunked, get, put
from .reference import GOLDEN as GOLDEN_NUMBER
from .reference import __all__ as __all__

# Typed, because Numba converts a sum of signed and unsigned integers to float64.
GOLDEN = np.uint64(GOLDEN_NUMBER)
FACTOR1, FACTOR2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT27, SHIFT30, SHIFT31, SHIFT32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
MASK32 = np.uint64(2**32 - 1)


@helper
def _mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> SHIFT30)) * FACTOR1
    z = (z ^ (z >> SHIFT27)) * FACTOR2
    return z ^ (z >> SHIFT31)


@helper
def _mix32(z: np.uint32, key: np.uint32) -> np.uint32:
    """Convert to uint32 after each step. Otherwise Numba continues in 64 bits, with half as many numbers per vector."""
    u = np.uint32
    z = u(u(z ^ (z >> u(17))) * u(0xED5AD4BB))
    z = u(u(z ^ (z >> u(11))) + key)
    z = u(z * u(0xAC4C1B51))
    z = u(u(z ^ (z >> u(15))) * u(0x31848BAB))
    return u(z ^ (z >> u(14)))


@helper
def _dropout(x: ndarray, p: float, seed: np.uint64, position: np.uint64, y: ndarray, past: bool) -> None:
    """Use random numbers `position`, `position` + 1, ... All must be in one block: 2^32 numbers with the same keys."""
    zero, factor = x.dtype.type(0), x.dtype.type(1 / (1 - p))
    # The 31 random bits of an element are >= threshold if and only if `uniform` of reference.py is >= p.
    threshold = np.uint32(math.ceil(p * 2.0**31))
    keys = _mix64(_mix64(seed + GOLDEN) + (position >> SHIFT32) * GOLDEN)
    first, key = np.uint32((position + keys) & MASK32), np.uint32(keys >> SHIFT32)
    for i in range(y.size):
        kept = np.uint32(_mix32(np.uint32(first + np.uint32(i)), key) >> np.uint32(1)) >= threshold
        v = factor * get(x, i)
        put(y, i, v if kept else zero, past)


@helper
def _across_blocks(x: ndarray, p: float, seed: int, position: np.uint64, y: ndarray, past: bool) -> None:
    """Do the same as _dropout for random numbers from one or two blocks."""
    room = np.int64(MASK32 - (position & MASK32)) + 1
    if y.size <= room:
        _dropout(x, p, np.uint64(seed), position, y, past)
    else:
        _dropout(x[:room], p, np.uint64(seed), position, y[:room], False)
        _dropout(x[room:], p, np.uint64(seed), position + np.uint64(room), y[room:], False)


@chunked
def dropout(x: Part, p: float, seed: int, offset: int, y: Part, begin: int, past: bool) -> None:
    _across_blocks(x, p, seed, np.uint64(offset) + np.uint64(begin), y, past)
