"""Elastic 1: a step of elastic averaging: a solution."""

from numpy import ndarray


def step(x: ndarray, c: ndarray, g: ndarray, eta: float, rho: float) -> tuple[ndarray, ndarray]:
    """Return the new (x, c); x (P, n): the replicas, c (n,): the center, g (P, n): the gradients."""
    d = eta * rho * (x - c)
    return x - eta * g - d, c + d.sum(axis=0)
