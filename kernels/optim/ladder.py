"""The steps of README.md as code: SGD with momentum on one vector. bench/bench_optim.py prints the table."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from . import cpu

LR, MOMENTUM = 1e-3, 0.9


def in_numpy(theta: ndarray, grad: ndarray, velocity: ndarray) -> None:
    """Update with NumPy: each operation is a pass over memory, and one of them makes a new vector."""
    velocity *= MOMENTUM
    velocity += grad
    theta -= LR * velocity


@jit
def with_float64(theta: ndarray, grad: ndarray, velocity: ndarray) -> None:
    """Update in one pass, with float64 factors: each number is converted, and a vector register holds half as many."""
    for i in range(theta.size):
        velocity[i] = MOMENTUM * velocity[i] + grad[i]
        theta[i] -= LR * velocity[i]


@jit
def with_float32(theta: ndarray, grad: ndarray, velocity: ndarray) -> None:
    """Convert the factors to float32 before the loop."""
    lr, momentum = theta.dtype.type(LR), theta.dtype.type(MOMENTUM)
    for i in range(theta.size):
        v = momentum * velocity[i] + grad[i]
        velocity[i] = v
        theta[i] -= lr * v


def all_threads(theta: ndarray, grad: ndarray, velocity: ndarray) -> None:
    """Call cpu.py: different threads update different chunks of 16,384 elements, segment by segment."""
    starts, stops, lr, weight_decay = np.array([0]), np.array([theta.size]), np.array([LR]), np.zeros(1)
    cpu.sgd(theta, grad, velocity, starts, stops, lr, weight_decay, MOMENTUM, False, False, 1.0)


RUNGS = {
    "1 NumPy": in_numpy,
    "2 one pass, float64 factors": with_float64,
    "3 one pass, float32 factors": with_float32,
    "4 one pass, all threads": all_threads,
}
