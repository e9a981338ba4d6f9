"""Dropout on all cores: every element draws its own random number, in any order (see reference.py)."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import GOLDEN as GOLDEN_NUMBER
from .reference import __all__ as __all__

CHUNK = 16384
# Typed, because Numba turns a sum of signed and unsigned integers into float64.
GOLDEN = np.uint64(GOLDEN_NUMBER)
FACTOR1, FACTOR2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT11, SHIFT27, SHIFT30, SHIFT31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)


@jit
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> SHIFT30)) * FACTOR1
    z = (z ^ (z >> SHIFT27)) * FACTOR2
    return z ^ (z >> SHIFT31)


@jit
def _dropout(x: ndarray, p: float, key: np.uint64, y: ndarray) -> None:
    """`key` is the generator's state at the first element."""
    zero, factor = x.dtype.type(0), x.dtype.type(1 / (1 - p))
    threshold = np.uint64(math.ceil(p * 2.0**53))  # integers compare as the reference's fractions do
    for i in range(x.size):
        kept = (_mix(key + np.uint64(i) * GOLDEN) >> SHIFT11) >= threshold
        y[i] = factor * x[i] if kept else zero


@parallel_jit
def dropout(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    for chunk in prange((x.size + CHUNK - 1) // CHUNK):
        start = chunk * CHUNK
        key = _mix(np.uint64(seed) + GOLDEN) + (np.uint64(offset) + np.uint64(start)) * GOLDEN
        _dropout(x[start : start + CHUNK], p, key, y[start : start + CHUNK])
