"""Dropout on a GPU: four neighbouring elements per thread, with the CPU's random numbers (see reference.py).

A number of the random stream depends only on the seed and its position. So each thread computes the keys of its block
of 2^32 numbers itself, and no mask is stored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import int32, uint32, uint64
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get

from ..elementwise.quads import QUAD, blocks, first, load, store, whole
from .reference import GOLDEN as GOLDEN_NUMBER
from .reference import MASK64
from .reference import __all__ as __all__

GOLDEN, FACTOR1, FACTOR2 = (np.uint64(n) for n in (GOLDEN_NUMBER, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@device
def _mix64(z: Any) -> Any:
    z = (z ^ (z >> uint64(30))) * FACTOR1
    z = (z ^ (z >> uint64(27))) * FACTOR2
    return z ^ (z >> uint64(31))


@device
def _mix32(z: Any, key: Any) -> Any:
    """Convert to uint32 after each step: otherwise Numba continues in 64 bits."""
    z = uint32(uint32(z ^ (z >> uint32(17))) * uint32(0xED5AD4BB))
    z = uint32(uint32(z ^ (z >> uint32(11))) + key)
    z = uint32(z * uint32(0xAC4C1B51))
    z = uint32(uint32(z ^ (z >> uint32(15))) * uint32(0x31848BAB))
    return uint32(z ^ (z >> uint32(14)))


@device
def _mask(x: ndarray, factor: float, threshold: int, seed: int, offset: int, y: ndarray, whole: int) -> None:
    """An element is kept if its 31 random bits are not below the threshold: if `uniform` of reference.py is >= p."""
    i, n = first(), int32(y.size)
    v = cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    position = uint64(offset + uint64(i))
    keys = _mix64(_mix64(seed + GOLDEN) + (position >> uint64(32)) * GOLDEN)
    for j in range(QUAD):
        if j > 0:
            position = uint64(position + uint64(1))
            if uint32(position) == uint32(0):  # the first number of the next block
                keys = _mix64(_mix64(seed + GOLDEN) + (position >> uint64(32)) * GOLDEN)
        bits = _mix32(uint32(uint32(position) + uint32(keys)), uint32(keys >> uint64(32)))
        v[j] = v[j] * factor if uint32(bits >> uint32(1)) >= threshold else x.dtype.type(0)
    store(y, i, n, whole, v)


@kernel()
def _dropout(x: ndarray, factor: float, threshold: int, seed: int, offset: int, y: ndarray, whole: int) -> None:
    _mask(x, factor, threshold, seed, offset, y, whole)


@kernel()
def _dropout_at(x: ndarray, factor: float, threshold: int, place: ndarray, offset: int, y: ndarray, whole: int) -> None:
    """place: (seed, start). The same launch draws other numbers when they change, as in a captured step."""
    _mask(x, factor, threshold, get(place, 0), uint64(get(place, 1) + offset), y, whole)


def dropout(x: ndarray, p: float, seed: int | ndarray, offset: int, y: ndarray) -> None:
    """seed: on a GPU also a vector of uint64, (seed, start); `offset` then counts from `start`."""
    factor = x.dtype.type(1 / (1 - p) if p < 1 else 0)
    threshold = np.uint32(math.ceil(p * 2**31))
    if isinstance(seed, ndarray):
        launch(_dropout_at, blocks(y.size), x, factor, threshold, seed, np.uint64(offset), y, whole(y, x))
        return
    positions = np.uint64(seed & MASK64), np.uint64(offset)
    launch(_dropout, blocks(y.size), x, factor, threshold, *positions, y, whole(y, x))
