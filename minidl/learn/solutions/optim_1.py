"""Optim 1: SGD with momentum in one pass: a solution."""

from numpy import ndarray


def step(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    """Update theta (n,) and velocity (n,) in place."""
    for i in range(theta.size):
        velocity[i] = momentum * velocity[i] + grad[i]
        theta[i] -= lr * velocity[i]
