"""Updates of the parameters: each is one pass over memory, shared out among the threads.

The whole vector is split into CHUNKS parts, always the same number, whatever the segments: a model may have one
large segment and many small ones. Each part is updated segment by segment. Factors are computed in float64 and
turned into the arrays' type once, before the loop. A small vector is updated by one thread.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, jit, parallel_jit, prange

from ..elementwise.stream import SERIAL
from .reference import __all__ as __all__

CHUNKS = 32
LINE = 16  # elements: a chunk begins on a cache line of float32, so that no two threads write to one line
LANES = 128  # sums of squares that are kept side by side


@jit
def _parts(x: ndarray) -> int:
    return CHUNKS if x.size > SERIAL else 1


@jit
def _overlap(start: int, stop: int, size: int, part: int, parts: int) -> slice:
    """What of the segment [start, stop) lies in this part of a vector of `size` elements; often nothing."""
    lines = size // LINE
    low = max(start, lines * part // parts * LINE)
    high = min(stop, lines * (part + 1) // parts * LINE if part + 1 < parts else size)
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
        v = momentum_ * velocity[i] + g
        velocity[i] = v
        direction = g + momentum_ * v if nesterov else v
        theta[i] = shrink_ * theta[i] - lr_ * direction


@apart_jit
def _sgd_part(
    part: int, parts: int,
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], theta.size, part, parts)
        _sgd(theta[at], grad[at], velocity[at], lr[s], weight_decay[s], momentum, nesterov, decoupled, scale)


@parallel_jit
def sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    if _parts(theta) == 1:
        _sgd_part(
            0, 1, theta, grad, velocity, starts, stops, lr, weight_decay, momentum, nesterov, decoupled, scale
        )  # fmt: skip
        return
    for part in prange(CHUNKS):
        _sgd_part(
            part, CHUNKS,
            theta, grad, velocity, starts, stops, lr, weight_decay, momentum, nesterov, decoupled, scale,
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
        m = keep1 * first[i] + add1 * g
        v = keep2 * second[i] + add2 * g * g
        first[i] = m
        second[i] = v
        theta[i] = shrink_ * theta[i] - rate * m / (math.sqrt(v) * correction + eps_)


@apart_jit
def _adam_part(
    part: int, parts: int,
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], theta.size, part, parts)
        _adam(
            theta[at], grad[at], first[at], second[at], lr[s], weight_decay[s],
            beta1, beta2, eps, step, decoupled, scale,
        )  # fmt: skip


@parallel_jit
def adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    if _parts(theta) == 1:
        _adam_part(
            0, 1, theta, grad, first, second, starts, stops, lr, weight_decay,
            beta1, beta2, eps, step, decoupled, scale,
        )  # fmt: skip
        return
    for part in prange(CHUNKS):
        _adam_part(
            part, CHUNKS, theta, grad, first, second, starts, stops, lr, weight_decay,
            beta1, beta2, eps, step, decoupled, scale,
        )  # fmt: skip


def norms_partial(segments: int) -> int:
    """How many float64 `norms` needs: for each chunk LANES sums, and one sum of each segment."""
    return CHUNKS * (LANES + segments)


@jit
def _sum_of_squares(x: ndarray, lanes: ndarray) -> float:
    """Element i is added to lane i % LANES: that many sums which do not wait for each other, in vector registers."""
    lanes[:] = 0
    whole = x.size - x.size % LANES
    for first in range(0, whole, LANES):
        row = x[first : first + LANES]
        for lane in range(LANES):
            v = np.float64(row[lane])
            lanes[lane] += v * v
    total = 0.0
    for i in range(whole, x.size):
        v = np.float64(x[i])
        total += v * v
    for lane in range(LANES):
        total += lanes[lane]
    return total


@apart_jit
def _norms_chunk(chunk: int, x: ndarray, starts: ndarray, stops: ndarray, partial: ndarray) -> None:
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], x.size, chunk, CHUNKS)
        partial[LANES + s] = _sum_of_squares(x[at], partial[:LANES]) if at.start < at.stop else 0.0


@parallel_jit
def norms(x: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    width = LANES + starts.size
    if _parts(x) == 1:
        for chunk in range(CHUNKS):
            _norms_chunk(chunk, x, starts, stops, partial[chunk * width : (chunk + 1) * width])
    else:
        for chunk in prange(CHUNKS):
            _norms_chunk(chunk, x, starts, stops, partial[chunk * width : (chunk + 1) * width])
    for s in range(starts.size):
        total = 0.0
        for chunk in range(CHUNKS):
            total += partial[chunk * width + LANES + s]
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
        v = momentum_ * velocity[i] + rate_ * g
        velocity[i] = v
        theta[i] -= v


@apart_jit
def _lars_part(
    part: int, parts: int,
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], theta.size, part, parts)
        local = _local_rate(weight_decay[s], trust, theta_squares[s], scale**2 * grad_squares[s])
        rate = lr[s] * (local if adapt[s] else 1.0)
        _lars(theta[at], grad[at], velocity[at], rate, weight_decay[s], momentum, scale)


@parallel_jit
def lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float,
) -> None:  # fmt: skip
    if _parts(theta) == 1:
        _lars_part(
            0, 1, theta, grad, velocity, starts, stops, lr, weight_decay, adapt,
            momentum, trust, theta_squares, grad_squares, scale,
        )  # fmt: skip
        return
    for part in prange(CHUNKS):
        _lars_part(
            part, CHUNKS, theta, grad, velocity, starts, stops, lr, weight_decay, adapt,
            momentum, trust, theta_squares, grad_squares, scale,
        )  # fmt: skip
