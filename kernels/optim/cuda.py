"""Updates of the parameters on a GPU: one pass over memory, four neighbouring elements per thread (quads.py).

A thread loads its elements once, applies the segments that contain them, and stores the elements once. Each thread
looks at all segments: a model has few, since a segment contains all neighbouring tensors with equal rates. The factors
of a segment are computed in float64 and rounded once, as on the CPU. lr and weight_decay are read from device memory.
"""

from __future__ import annotations

import math

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..elementwise.quads import QUAD, blocks, first, load, store, whole
from ..reduce.block_sum import THREADS, WARPS, add_blocks, block_sum
from .reference import __all__ as __all__

NORM_BLOCKS = THREADS  # the same number on each GPU: it decides the order of sums. `add_blocks` has a thread for each


@device
def _within(start: int, stop: int, i: int) -> tuple[int, int]:
    """Return the part [low, high) of the quad at i that is in the segment [start, stop). It may be empty."""
    return int32(min(max(start - i, 0), QUAD)), int32(min(max(stop - i, 0), QUAD))


@device
def _decay(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """Return (shrink, pull): theta is multiplied by shrink, and pull * theta is added to the gradient."""
    return (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


@kernel()
def _sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float, whole: int,
) -> None:  # fmt: skip
    i, n, number = first(), int32(theta.size), theta.dtype.type
    t, g, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
    load(theta, i, n, whole, t)
    load(grad, i, n, whole, g)
    load(velocity, i, n, whole, v)
    for s in range(int32(starts.size)):
        low, high = _within(get(starts, s), get(stops, s), i)
        if low < high:
            shrink, pull = _decay(get(lr, s), get(weight_decay, s), decoupled)
            shrink_, pull_, lr_ = number(shrink), number(pull), number(get(lr, s))
            for j in range(QUAD):
                if low <= j and j < high:
                    gradient = scale * g[j] + pull_ * t[j]
                    v[j] = momentum * v[j] + gradient
                    direction = gradient + momentum * v[j] if nesterov else v[j]
                    t[j] = shrink_ * t[j] - lr_ * direction
    store(velocity, i, n, whole, v)
    store(theta, i, n, whole, t)


def sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    launch(
        _sgd, blocks(theta.size), theta, grad, velocity, starts, stops, lr, weight_decay,
        number(momentum), nesterov, decoupled, number(scale), whole(theta, grad, velocity),
    )  # fmt: skip


@kernel()
def _adam(
    theta: ndarray, grad: ndarray, first_: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, keep1: float, add1: float, keep2: float, add2: float, eps: float, rate_factor: float,
    correction: float, decoupled: bool, scale: float, whole: int,
) -> None:  # fmt: skip
    i, n, number = first(), int32(theta.size), theta.dtype.type
    t, g = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
    m, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
    load(theta, i, n, whole, t)
    load(grad, i, n, whole, g)
    load(first_, i, n, whole, m)
    load(second, i, n, whole, v)
    for s in range(int32(starts.size)):
        low, high = _within(get(starts, s), get(stops, s), i)
        if low < high:
            shrink, pull = _decay(get(lr, s), get(weight_decay, s), decoupled)
            shrink_, pull_, rate = number(shrink), number(pull), number(get(lr, s) * rate_factor)
            for j in range(QUAD):
                if low <= j and j < high:
                    gradient = scale * g[j] + pull_ * t[j]
                    m[j] = keep1 * m[j] + add1 * gradient
                    v[j] = keep2 * v[j] + add2 * gradient * gradient
                    t[j] = shrink_ * t[j] - rate * m[j] / (math.sqrt(v[j]) * correction + eps)
    store(first_, i, n, whole, m)
    store(second, i, n, whole, v)
    store(theta, i, n, whole, t)


def adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    launch(
        _adam, blocks(theta.size), theta, grad, first, second, starts, stops, lr, weight_decay,
        number(beta1), number(1 - beta1), number(beta2), number(1 - beta2), number(eps),
        1 / (1 - beta1**step), number(1 / math.sqrt(1 - beta2**step)), decoupled, number(scale),
        whole(theta, grad, first, second),
    )  # fmt: skip


def norms_partial(segments: int) -> int:
    """Return how many float64 numbers `norms` needs: one sum per segment, for each block."""
    return NORM_BLOCKS * segments


@kernel(threads=THREADS)
def _norms_of_blocks(x: ndarray, starts: ndarray, stops: ndarray, each: int, partial: ndarray) -> None:
    """partial[block, s] = sum of the squares of segment s within the block's `each` elements"""
    sums = cuda.shared.array(WARPS, float64)
    begin = int32(cuda.blockIdx.x) * each
    for s in range(int32(starts.size)):
        low = max(get(starts, s), begin)
        high = min(min(get(stops, s), begin + each), x.size)
        total = float64(0)
        for i in range(low + cuda.threadIdx.x, high, THREADS):
            v = float64(get(x, i))
            total += v * v
        total = block_sum(total, sums)
        if cuda.threadIdx.x == 0:
            put(partial, int32(cuda.blockIdx.x) * int32(starts.size) + s, total)


def norms(x: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    segments = starts.size
    each = -(-x.size // NORM_BLOCKS)
    launch(_norms_of_blocks, NORM_BLOCKS, x, starts, stops, each, partial)
    launch(add_blocks, segments, partial, segments, squares)


@device
def _local_rate(weight_decay: float, trust: float, theta_square: float, grad_square: float) -> float:
    if theta_square == 0 or grad_square == 0:
        return 1.0
    theta_norm, grad_norm = math.sqrt(theta_square), math.sqrt(grad_square)
    return trust * theta_norm / (grad_norm + weight_decay * theta_norm)


@kernel()
def _lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, square_scale: float, scale: float, whole: int,
) -> None:  # fmt: skip
    i, n, number = first(), int32(theta.size), theta.dtype.type
    t, g, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
    load(theta, i, n, whole, t)
    load(grad, i, n, whole, g)
    load(velocity, i, n, whole, v)
    for s in range(int32(starts.size)):
        low, high = _within(get(starts, s), get(stops, s), i)
        if low < high:
            decay, rate = get(weight_decay, s), get(lr, s)
            if adapt[s]:
                rate *= _local_rate(decay, trust, get(theta_squares, s), square_scale * get(grad_squares, s))
            pull_, rate_ = number(decay), number(rate)
            for j in range(QUAD):
                if low <= j and j < high:
                    v[j] = momentum * v[j] + rate_ * (scale * g[j] + pull_ * t[j])
                    t[j] -= v[j]
    store(velocity, i, n, whole, v)
    store(theta, i, n, whole, t)


def lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    launch(
        _lars, blocks(theta.size), theta, grad, velocity, starts, stops, lr, weight_decay, adapt, number(momentum),
        trust, theta_squares, grad_squares, scale**2, number(scale), whole(theta, grad, velocity),
    )  # fmt: skip
