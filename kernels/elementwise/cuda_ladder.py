"""The steps of README.md for a GPU: out = scale * x + shift for vectors of float32.

`python tests/cuda/facts.py elementwise` prints the table. Ladders of other vectors use `neighbours` and `own`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from . import cuda as fast
from .quads import THREADS

RUN = 32  # elements of a thread in the first step


@device
def neighbours(size: int) -> tuple[int, int]:
    """Return (first, end) of the neighbouring elements that this thread computes in the first step."""
    first = int32((cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * RUN)
    return first, int32(min(first + RUN, size))


@device
def own() -> int:
    """Return the index of the element that this thread computes in the second step."""
    return int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)


def launch_naive(compute: Kernel, size: int, *arguments: Any) -> None:
    launch(compute, -(-size // (RUN * THREADS)), *arguments)


def launch_coalesced(compute: Kernel, size: int, *arguments: Any) -> None:
    launch(compute, -(-size // THREADS), *arguments)


@kernel()
def _naive(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    first, end = neighbours(int32(out.size))
    for i in range(first, end):
        put(out, i, scale * get(x, i) + shift)


def naive(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """Divide the vector as among CPU cores: a thread computes 32 neighbours. A warp touches 32 distant sectors."""
    launch_naive(_naive, out.size, x, np.float32(scale), np.float32(shift), out)


@kernel()
def _coalesced(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    i = own()
    if i < out.size:
        put(out, i, scale * get(x, i) + shift)


def coalesced(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """A thread for each element: a warp reads and writes 128 successive bytes."""
    launch_coalesced(_coalesced, out.size, x, np.float32(scale), np.float32(shift), out)


RUNGS: dict[str, Callable[..., None]] = {"1 naive": naive, "2 coalesced": coalesced, "3 16 bytes": fast.affine}
