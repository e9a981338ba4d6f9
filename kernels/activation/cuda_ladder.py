"""The steps of README.md for a GPU: y = gelu(x) for vectors of float32.

../elementwise/cuda_ladder.py explains the steps. `python tests/cuda/facts.py activation` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import kernel
from minidl.engine.cuda_memory import get, put

from ..elementwise.cuda_ladder import launch_coalesced, launch_naive, neighbours, own
from . import cuda as fast
from .cuda import _normal_distribution


@kernel()
def _naive(x: ndarray, y: ndarray) -> None:
    first, end = neighbours(int32(y.size))
    for i in range(first, end):
        v = get(x, i)
        put(y, i, v * _normal_distribution(v))


def naive(x: ndarray, y: ndarray) -> None:
    """A thread computes 32 neighbours."""
    launch_naive(_naive, y.size, x, y)


@kernel()
def _coalesced(x: ndarray, y: ndarray) -> None:
    i = own()
    if i < y.size:
        v = get(x, i)
        put(y, i, v * _normal_distribution(v))


def coalesced(x: ndarray, y: ndarray) -> None:
    """A thread for each element."""
    launch_coalesced(_coalesced, y.size, x, y)


RUNGS: dict[str, Callable[[ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes": fast.gelu,
}
