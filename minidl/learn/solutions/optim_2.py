"""Optim 2: decoupled weight decay, for each segment of the vector: a solution."""

from collections.abc import Sequence

from numpy import ndarray


def step(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: Sequence[int], stops: Sequence[int],
    lr: Sequence[float], weight_decay: Sequence[float], momentum: float,
) -> None:  # fmt: skip
    """Update theta (n,) and velocity (n,) in place."""
    for s in range(len(starts)):
        for i in range(starts[s], stops[s]):
            theta[i] *= 1 - lr[s] * weight_decay[s]
            velocity[i] = momentum * velocity[i] + grad[i]
            theta[i] -= lr[s] * velocity[i]
