"""Parts of CUDA kernels that wait for memory: each thread computes a quad, four neighbouring elements.

A quad of float32 is loaded and stored by one instruction of 16 bytes. This needs addresses that are multiples of 16
bytes, so the caller passes `whole`: the number of elements that quads may access so, from `whole(...)`. The elements of
the last quad, and of arrays that begin at other addresses, are loaded and stored one by one.
"""

from __future__ import annotations

from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import get, load4, put, store4
from minidl.engine.device import address

QUAD = 4  # elements
THREADS = 256  # per block


def blocks(size: int) -> int:
    """Return the number of blocks for so many elements."""
    return -(-size // (QUAD * THREADS))


def whole(*arrays: ndarray) -> int:
    """Return how many elements the arrays have if all begin at multiples of 16 bytes, else 0."""
    return arrays[0].size if all(address(a) % 16 == 0 for a in arrays) else 0


@device
def first() -> Any:
    """Return the index of this thread's quad."""
    return int32((cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * QUAD)


@device
def load(array: ndarray, i: int, size: int, whole: int, quad: ndarray) -> None:
    """quad = array[i : i + 4]; elements from `size` on are 0."""
    if i + QUAD <= whole:
        quad[0], quad[1], quad[2], quad[3] = load4(array, i)
    else:
        for j in range(QUAD):
            quad[j] = get(array, i + j) if i + j < size else 0


@device
def store(array: ndarray, i: int, size: int, whole: int, quad: ndarray) -> None:
    """array[i : i + 4] = quad, without elements from `size` on"""
    if i + QUAD <= whole:
        store4(array, i, (quad[0], quad[1], quad[2], quad[3]))
    else:
        for j in range(QUAD):
            if i + j < size:
                put(array, i + j, quad[j])
