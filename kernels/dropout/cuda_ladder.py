"""The steps of README.md for a GPU: dropout of vectors of float32.

../elementwise/cuda_ladder.py explains the steps. `python tests/cuda/facts.py dropout` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, uint32, uint64
from numpy import ndarray

from minidl.engine.cuda import Kernel, device, kernel
from minidl.engine.cuda_memory import get, put

from ..elementwise.cuda_ladder import launch_coalesced, launch_naive, neighbours, own
from . import cuda as fast
from .cuda import GOLDEN, _mix32, _mix64
from .reference import MASK64


@device
def _kept(threshold: int, seed: int, position: int) -> bool:
    """Return whether the element at this position of the random stream is kept. Each element computes its keys."""
    keys = _mix64(_mix64(seed + GOLDEN) + (position >> uint64(32)) * GOLDEN)
    bits = _mix32(uint32(uint32(position) + uint32(keys)), uint32(keys >> uint64(32)))
    return uint32(bits >> uint32(1)) >= threshold


@kernel()
def _naive(x: ndarray, factor: float, threshold: int, seed: int, offset: int, y: ndarray) -> None:
    first, end = neighbours(int32(y.size))
    for i in range(first, end):
        put(y, i, get(x, i) * factor if _kept(threshold, seed, uint64(offset + uint64(i))) else float32(0))


def naive(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """A thread computes 32 neighbours."""
    _launch(launch_naive, _naive, x, p, seed, offset, y)


@kernel()
def _coalesced(x: ndarray, factor: float, threshold: int, seed: int, offset: int, y: ndarray) -> None:
    i = own()
    if i < y.size:
        put(y, i, get(x, i) * factor if _kept(threshold, seed, uint64(offset + uint64(i))) else float32(0))


def coalesced(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """A thread for each element."""
    _launch(launch_coalesced, _coalesced, x, p, seed, offset, y)


def _launch(
    launch: Callable[..., None], compute: Kernel, x: ndarray, p: float, seed: int, offset: int, y: ndarray
) -> None:
    numbers: tuple[Any, ...] = np.uint32(math.ceil(p * 2**31)), np.uint64(seed & MASK64), np.uint64(offset)
    launch(compute, y.size, x, np.float32(1 / (1 - p)), *numbers, y)


RUNGS: dict[str, Callable[..., None]] = {"1 naive": naive, "2 coalesced": coalesced, "3 16 bytes": fast.dropout}
