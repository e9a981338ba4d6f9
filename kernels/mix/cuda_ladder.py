"""The steps of README.md for a GPU: theta += weight * (other - theta) for vectors of float32.

../elementwise/cuda_ladder.py explains the steps. `python tests/cuda/facts.py mix` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import int32
from numpy import ndarray

from minidl.engine.cuda import kernel
from minidl.engine.cuda_memory import get, put

from ..elementwise.cuda_ladder import launch_coalesced, launch_naive, neighbours, own
from . import cuda as fast


@kernel()
def _naive(theta: ndarray, other: ndarray, weight: float) -> None:
    first, end = neighbours(int32(theta.size))
    for i in range(first, end):
        t = get(theta, i)
        put(theta, i, t + weight * (get(other, i) - t))


def naive(theta: ndarray, other: ndarray, weight: float) -> None:
    """A thread computes 32 neighbours."""
    launch_naive(_naive, theta.size, theta, other, np.float32(weight))


@kernel()
def _coalesced(theta: ndarray, other: ndarray, weight: float) -> None:
    i = own()
    if i < theta.size:
        t = get(theta, i)
        put(theta, i, t + weight * (get(other, i) - t))


def coalesced(theta: ndarray, other: ndarray, weight: float) -> None:
    """A thread for each element."""
    launch_coalesced(_coalesced, theta.size, theta, other, np.float32(weight))


RUNGS: dict[str, Callable[[ndarray, ndarray, float], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes": fast.mix,
}
