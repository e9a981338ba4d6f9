"""Mixing two models: the definition and the oracle of the tests."""

from __future__ import annotations

from numpy import ndarray

__all__ = ["mix"]


def mix(theta: ndarray, other: ndarray, weight: float) -> None:
    """theta += weight (other - theta); theta, other (n,). weight 0 leaves theta, 1/2 is the mean of both, 1 is other.

    This is all that gossip does to a replica: every averaging method is a choice of `other` and of `weight`.
    """
    for i in range(theta.size):
        theta[i] += weight * (other[i] - theta[i])
