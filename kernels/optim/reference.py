"""Updates of the parameters: the definition and the oracle of the tests.

theta (the parameters), grad and the state (velocity, first, second) are flat vectors (n,) of equal layout. Segment s is
the range [starts[s], stops[s]): one or several parameter tensors with the learning rate lr[s] and the weight decay
weight_decay[s]. Elements outside all segments do not change. g is scale * grad; `scale` is for clipping. A fast kernel
may replace state below the smallest normal number by 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from numpy import ndarray

__all__ = ["adam", "lars", "norms", "sgd"]


def _elements(starts: ndarray, stops: ndarray) -> Iterator[tuple[int, int]]:
    """Yield each (segment s, element i of this segment)."""
    for s in range(len(starts)):
        for i in range(starts[s], stops[s]):
            yield s, i


def sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    """Compute velocity = momentum * velocity + g, theta -= lr * velocity, as in PyTorch; velocity is 0 at first.

    nesterov: theta -= lr * (g + momentum * velocity) instead (Sutskever et al. 2013). Weight decay adds
    weight_decay * theta to g; if decoupled, it multiplies theta by 1 - lr * weight_decay instead
    (Loshchilov, Hutter 2019).
    """
    for s, i in _elements(starts, stops):
        g = scale * grad[i]
        if decoupled:
            theta[i] *= 1 - lr[s] * weight_decay[s]
        else:
            g += weight_decay[s] * theta[i]
        velocity[i] = momentum * velocity[i] + g
        theta[i] -= lr[s] * (g + momentum * velocity[i] if nesterov else velocity[i])


def adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    """Update as in Kingma, Ba 2015, algorithm 1; `first` and `second` are running moments of g, `step` counts from 1.

    theta -= lr * (first / (1 - beta1^step)) / (sqrt(second / (1 - beta2^step)) + eps).
    Weight decay works as in `sgd`; if decoupled, this is AdamW (Loshchilov, Hutter 2019).
    """
    for s, i in _elements(starts, stops):
        g = scale * grad[i]
        if decoupled:
            theta[i] *= 1 - lr[s] * weight_decay[s]
        else:
            g += weight_decay[s] * theta[i]
        first[i] = beta1 * first[i] + (1 - beta1) * g
        second[i] = beta2 * second[i] + (1 - beta2) * g * g
        mean = first[i] / (1 - beta1**step)
        square = second[i] / (1 - beta2**step)
        theta[i] -= lr[s] * mean / (math.sqrt(square) + eps)


def norms_partial(segments: int) -> int:
    """Return how many float64 numbers `norms` needs as `partial`."""
    return 0


def norms(x: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    """Compute squares[s] (float64) = sum of the squares of segment s of x; partial: float64 scratch."""
    squares[...] = 0
    for s, i in _elements(starts, stops):
        squares[s] += float(x[i]) ** 2


def lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float,
) -> None:  # fmt: skip
    """Update as in You, Gitman, Ginsburg 2017, algorithm 1. The learning rate of segment s is lr[s] * local, with

    local = trust * |theta| / (|g| + weight_decay * |theta|), or 1 if a norm is 0 or adapt[s] is false (as for biases).
    velocity = momentum * velocity + lr * local * (g + weight_decay * theta), theta -= velocity.
    theta_squares and grad_squares are results of `norms`, the latter for grad without `scale`.
    """
    for s, i in _elements(starts, stops):
        local = _local_rate(weight_decay[s], trust, theta_squares[s], scale**2 * grad_squares[s]) if adapt[s] else 1.0
        g = scale * grad[i] + weight_decay[s] * theta[i]
        velocity[i] = momentum * velocity[i] + lr[s] * local * g
        theta[i] -= velocity[i]


def _local_rate(weight_decay: float, trust: float, theta_square: float, grad_square: float) -> float:
    """Return the factor by which LARS multiplies the learning rate of a segment."""
    if theta_square == 0 or grad_square == 0:
        return 1.0
    theta_norm, grad_norm = math.sqrt(theta_square), math.sqrt(grad_square)
    return trust * theta_norm / (grad_norm + weight_decay * theta_norm)
