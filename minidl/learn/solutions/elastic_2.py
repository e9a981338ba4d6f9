"""Elastic 2: the matrix of a step, and when it converges: a solution."""

import numpy as np
from numpy import ndarray


def matrix(replicas: int, s: float, a: float) -> ndarray:
    """Return the matrix (P + 1, P + 1) of a step."""
    m = np.zeros((replicas + 1, replicas + 1))
    for i in range(replicas):
        m[i, i] = 1 - s - a
        m[i, replicas] = m[replicas, i] = a
    m[replicas, replicas] = 1 - replicas * a
    return m


def converges(replicas: int, s: float, a: float) -> bool:
    """Return whether replicas and center converge to the minimum, from any start."""
    return bool(abs(np.linalg.eigvals(matrix(replicas, s, a))).max() < 1)
