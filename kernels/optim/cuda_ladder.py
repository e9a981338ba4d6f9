"""The steps of README.md for a GPU: SGD with momentum for vectors of float32, with one rate for all parameters.

../elementwise/cuda_ladder.py explains the steps. `python tests/cuda/facts.py optim` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import int32
from numpy import ndarray

from minidl.engine.cuda import device, kernel
from minidl.engine.cuda_memory import get, put

from ..elementwise.cuda_ladder import launch_coalesced, launch_naive, neighbours, own
from . import cuda as fast


@device
def _update(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float, i: int) -> None:
    v = momentum * get(velocity, i) + get(grad, i)
    put(velocity, i, v)
    put(theta, i, get(theta, i) - lr * v)


@kernel()
def _naive(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    first, end = neighbours(int32(theta.size))
    for i in range(first, end):
        _update(theta, grad, velocity, lr, momentum, i)


def naive(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    """A thread computes 32 neighbours."""
    launch_naive(_naive, theta.size, theta, grad, velocity, np.float32(lr), np.float32(momentum))


@kernel()
def _coalesced(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    i = own()
    if i < theta.size:
        _update(theta, grad, velocity, lr, momentum, i)


def coalesced(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    """A thread for each parameter."""
    launch_coalesced(_coalesced, theta.size, theta, grad, velocity, np.float32(lr), np.float32(momentum))


def sixteen_bytes(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    """Call cuda.py with one segment."""
    one = np.array([0]), np.array([theta.size]), np.array([lr]), np.array([0.0])
    fast.sgd(theta, grad, velocity, *one, momentum, False, False, 1.0)


RUNGS: dict[str, Callable[..., None]] = {"1 naive": naive, "2 coalesced": coalesced, "3 16 bytes": sixteen_bytes}
