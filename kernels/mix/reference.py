"""Arithmetic on whole models: the definition and the oracle of the tests."""

from __future__ import annotations

from numpy import ndarray

__all__ = ["axpy", "elastic", "mix", "pull"]


def mix(theta: ndarray, other: ndarray, weight: float) -> None:
    """theta += weight * (other - theta); theta, other (n,).

    Weight 0 keeps theta, weight 1/2 gives the mean of theta and other, weight 1 gives other. Averaging methods such as
    gossip apply this operation to the parameters of a replica, and differ in their choice of `other` and `weight`.
    """
    for i in range(theta.size):
        theta[i] += weight * (other[i] - theta[i])


def axpy(factor: float, x: ndarray, y: ndarray) -> None:
    """y += factor * x; x, y (n,)."""
    for i in range(y.size):
        y[i] += factor * x[i]


def pull(x: ndarray, center: ndarray, weight: float, out: ndarray) -> None:
    """out = weight * (x - center); x, center, out (n,)."""
    for i in range(out.size):
        out[i] = weight * (x[i] - center[i])


def elastic(x: ndarray, center: ndarray, weight: float) -> None:
    """d = weight * (x - center), x -= d, center += d; x, center (n,)."""
    for i in range(x.size):
        d = weight * (x[i] - center[i])
        x[i] -= d
        center[i] += d
