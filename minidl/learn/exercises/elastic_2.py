"""Elastic 2: the matrix of a step, and when it converges.

On the parabola h/2 * x^2 a step of elastic averaging is linear. With s = eta * h and a = eta * rho, it is

    x_i <- x_i - s * x_i - a * (x_i - c)         c <- c + sum_i a * (x_i - c)

So a step multiplies the vector (x_1, ..., x_P, c) by a matrix, and the method converges if and only if all eigenvalues
of this matrix have moduli below 1. Fill the hole: build the matrix. Then `converges` tells for which a the method is
stable: try it with 8 replicas, and look at the weight that the center keeps of itself.

Read: "Why a constant rho fails as P grows" in docs/elastic.md.
Hint: collect the factors of x_i and of c in both equations. The last row and the last column belong to the center.
"""

import numpy as np
from numpy import ndarray


def matrix(replicas: int, s: float, a: float) -> ndarray:
    """Return the matrix (P + 1, P + 1) of a step."""
    m = np.zeros((replicas + 1, replicas + 1))
    raise NotImplementedError  # HOLE: fill m
    return m


def converges(replicas: int, s: float, a: float) -> bool:
    """Return whether replicas and center converge to the minimum, from any start."""
    return bool(abs(np.linalg.eigvals(matrix(replicas, s, a))).max() < 1)
