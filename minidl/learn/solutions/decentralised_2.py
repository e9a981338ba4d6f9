"""Decentralised 2: a step of D-PSGD: a solution."""

from collections.abc import Callable

import numpy as np
from numpy import ndarray


def step(x: ndarray, gradient: Callable[[int, ndarray], ndarray], w: ndarray, eta: float) -> ndarray:
    """Return the next weights (P, n) of the replicas; x (P, n), w (P, P); gradient(j, x_j) is g_j(x_j)."""
    stepped = np.array([x[j] - eta * gradient(j, x[j]) for j in range(len(x))])
    mixed: ndarray = w @ stepped
    return mixed
