"""Updates of the parameters: each is one pass over memory, shared out among the threads.

The whole vector is split into CHUNKS parts, always the same number, whatever the segments: a model may have one
large segment and many small ones. Each part is updated segment by segment. Factors are computed in float64 and
turned into the arrays' type once, before the loop.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__

CHUNKS = 32


@jit
def _overlap(start: int, stop: int, size: int, chunk: int) -> slice:
    """What of the segment [start, stop) lies in this chunk of a vector of `size` elements; often nothing."""
    low = max(start, size * chunk // CHUNKS)
    high = min(stop, size * (chunk + 1) // CHUNKS)
    return slice(low, max(low, high))


@jit
def _decay(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """(factor on theta itself, factor on theta that is added to the gradient)"""
    return (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


@jit
def _sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, weight_decay: float,
    momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    shrink, pull = _decay(lr, weight_decay, decoupled)
    shrink_, pull_, lr_, momentum_, scale_ = number(shrink), number(pull), number(lr), number(momentum), number(scale)
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        velocity[i] = momentum_ * velocity[i] + g
        direction = g + momentum_ * velocity[i] if nesterov else velocity[i]
        theta[i] = shrink_ * theta[i] - lr_ * direction


@parallel_jit
def sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    for chunk in prange(CHUNKS):
        for s in range(starts.size):
            part = _overlap(starts[s], stops[s], theta.size, chunk)
            _sgd(
                theta[part], grad[part], velocity[part], lr[s], weight_decay[s],
                momentum, nesterov, decoupled, scale,
            )  # fmt: skip


@jit
def _adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, lr: float, weight_decay: float,
    beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    shrink, pull = _decay(lr, weight_decay, decoupled)
    shrink_, pull_, scale_, eps_ = number(shrink), number(pull), number(scale), number(eps)
    keep1, add1, keep2, add2 = number(beta1), number(1 - beta1), number(beta2), number(1 - beta2)
    # The corrections of the bias, one in the learning rate and one under the root.
    rate = number(lr / (1 - beta1**step))
    correction = number(1 / math.sqrt(1 - beta2**step))
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        first[i] = keep1 * first[i] + add1 * g
        second[i] = keep2 * second[i] + add2 * g * g
        theta[i] = shrink_ * theta[i] - rate * first[i] / (math.sqrt(second[i]) * correction + eps_)


@parallel_jit
def adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    for chunk in prange(CHUNKS):
        for s in range(starts.size):
            part = _overlap(starts[s], stops[s], theta.size, chunk)
            _adam(
                theta[part], grad[part], first[part], second[part], lr[s], weight_decay[s],
                beta1, beta2, eps, step, decoupled, scale,
            )  # fmt: skip


@jit
def _sum_of_squares(x: ndarray) -> float:
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@parallel_jit
def norms(x: ndarray, starts: ndarray, stops: ndarray, squares: ndarray) -> None:
    partial = np.empty((CHUNKS, starts.size))
    for chunk in prange(CHUNKS):
        for s in range(starts.size):
            partial[chunk, s] = _sum_of_squares(x[_overlap(starts[s], stops[s], x.size, chunk)])
    for s in range(starts.size):
        total = 0.0
        for chunk in range(CHUNKS):
            total += partial[chunk, s]
        squares[s] = total


@jit
def _local_rate(weight_decay: float, trust: float, theta_square: float, grad_square: float) -> float:
    if theta_square == 0 or grad_square == 0:
        return 1.0
    theta_norm, grad_norm = math.sqrt(theta_square), math.sqrt(grad_square)
    return trust * theta_norm / (grad_norm + weight_decay * theta_norm)


@jit
def _lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, rate: float, weight_decay: float, momentum: float, scale: float
) -> None:
    number = theta.dtype.type
    rate_, pull_, momentum_, scale_ = number(rate), number(weight_decay), number(momentum), number(scale)
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        velocity[i] = momentum_ * velocity[i] + rate_ * g
        theta[i] -= velocity[i]


@parallel_jit
def lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float,
) -> None:  # fmt: skip
    for chunk in prange(CHUNKS):
        for s in range(starts.size):
            part = _overlap(starts[s], stops[s], theta.size, chunk)
            local = _local_rate(weight_decay[s], trust, theta_squares[s], scale**2 * grad_squares[s])
            rate = lr[s] * (local if adapt[s] else 1.0)
            _lars(theta[part], grad[part], velocity[part], rate, weight_decay[s], momentum, scale)
