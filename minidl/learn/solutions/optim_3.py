"""Optim 3: Adam's bias correction: a solution."""

import numpy as np
from numpy import ndarray

EPS = 1e-8


def update(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, lr: float, beta1: float, beta2: float, step: int
) -> None:
    """Update theta, first and second (n,) in place: theta -= lr * mean / (sqrt(square) + EPS), corrected."""
    first[:] = beta1 * first + (1 - beta1) * grad
    second[:] = beta2 * second + (1 - beta2) * grad**2
    mean = first / (1 - beta1**step)
    square = second / (1 - beta2**step)
    theta -= lr * mean / (np.sqrt(square) + EPS)
