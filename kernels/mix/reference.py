"""Mixing two models: the definition and the oracle of the tests."""

from __future__ import annotations

from numpy import ndarray

__all__ = ["mix"]


def mix(theta: ndarray, other: ndarray, weight: float) -> None:
    """theta += weight * (other - theta); theta, other (n,).

    Weight 0 keeps theta, weight 1/2 gives the mean of theta and other, weight 1 gives other. Averaging methods such as
    gossip apply this operation to the parameters of a replica, and differ in their choice of `other` and `weight`.
    """
    for i in range(theta.size):
        theta[i] += weight * (other[i] - theta[i])
