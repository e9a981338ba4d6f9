"""Updates of the parameters: each is one pass over memory, divided among the threads.

A segment is a range with one learning rate (reference.py). A model may have one large segment and many small ones, so
the vector of all parameters is divided into chunks regardless of segments. Chunks begin on cache lines, so no two
threads write to the same line. Each chunk is updated segment by segment. Factors are computed in float64 and converted
to the type of the arrays before each loop. A very small vector is updated by one thread.

If the vectors may stay in the caches, two threads take alternate chunks. So each has half of every large layer in its
caches. If one thread updated all of a layer, the other would wait for it in the next step (MLP, batch 8 and 32, Intel
Xeon: steps were 8 and 5% longer).

The velocity of a parameter whose gradient stays 0, as behind a ReLU that is never active, shrinks by a factor of 0.9 in
each step. After 800 steps it is below the smallest normal number, 1e-38, and an Intel CPU needs about 150 cycles to
multiply such a number. Since 0.9 times the smallest of them all is rounded to itself, this would never end: 2.5% of
such velocities made a step of SGD four times as long. So `_normal` replaces them by 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, apart_jit, helper, in_parts, parallel_jit, prange

from ..elementwise.stream import CHUNK, IN_CACHE, SERIAL, chunk, chunks
from .reference import __all__ as __all__

NORM_CHUNKS = 32  # chunks of `norms`: always the same number, so that sums do not depend on the number of threads
LINE = 16  # elements: the chunks of `norms` begin on a cache line of float32
LANES = 128  # independent sums of squares
SINGLE, DOUBLE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float64).tiny)


@helper
def _number(k: int, chunks: int) -> int:
    """Return the number of the chunk that is part k of an update: of a small vector, first the even, then the odd."""
    even = (chunks + 1) // 2
    return k if chunks > IN_CACHE else 2 * k if k < even else 2 * (k - even) + 1


@helper
def _cut(x: ndarray, k: int, chunks: int) -> ndarray:
    return chunk(x, _number(k, chunks), chunks)


@helper
def _begin(x: ndarray, k: int, chunks: int) -> int:
    return _number(k, chunks) * CHUNK


_in_chunks = in_parts(chunks, _cut, begin=_begin)


@helper
def _overlap(start: int, stop: int, begin: int, size: int) -> slice:
    """Return the slice, often empty, of the chunk [begin, begin + size) that is in the segment [start, stop)."""
    low = max(start - begin, 0)
    return slice(low, max(low, min(stop - begin, size)))


@helper
def _decay(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """Return (shrink, pull): theta is multiplied by shrink, and pull * theta is added to the gradient."""
    return (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


@helper
def _smallest(theta: ndarray) -> float:
    """Return the smallest normal number of theta's type. With np.finfo here, each process would load SciPy (0.2 s)."""
    return theta.dtype.type(SINGLE if theta.itemsize == 4 else DOUBLE)


@helper
def _normal(x: float, smallest: float) -> float:
    """Return x, or 0 if it is below the smallest normal number."""
    return smallest - smallest if abs(x) < smallest else x


@helper
def _sgd(
    theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, weight_decay: float,
    momentum: float, nesterov: bool, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    shrink, pull = _decay(lr, weight_decay, decoupled)
    shrink_, pull_, lr_, momentum_, scale_ = number(shrink), number(pull), number(lr), number(momentum), number(scale)
    smallest = _smallest(theta)
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        v = _normal(momentum_ * velocity[i] + g, smallest)
        velocity[i] = v
        direction = g + momentum_ * v if nesterov else v
        theta[i] = shrink_ * theta[i] - lr_ * direction


@_in_chunks
def sgd(
    theta: Part, grad: Part, velocity: Part, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, momentum: float, nesterov: bool, decoupled: bool, scale: float, begin: int,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], begin, theta.size)
        if at.start < at.stop:
            _sgd(theta[at], grad[at], velocity[at], lr[s], weight_decay[s], momentum, nesterov, decoupled, scale)


@helper
def _adam(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, lr: float, weight_decay: float,
    beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float,
) -> None:  # fmt: skip
    number = theta.dtype.type
    shrink, pull = _decay(lr, weight_decay, decoupled)
    shrink_, pull_, scale_, eps_ = number(shrink), number(pull), number(scale), number(eps)
    keep1, add1, keep2, add2 = number(beta1), number(1 - beta1), number(beta2), number(1 - beta2)
    # The rate includes the bias correction of `first`; the correction of `second` is applied after the square root.
    rate = number(lr / (1 - beta1**step))
    correction = number(1 / math.sqrt(1 - beta2**step))
    smallest = _smallest(theta)
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        m = _normal(keep1 * first[i] + add1 * g, smallest)
        v = _normal(keep2 * second[i] + add2 * g * g, smallest)
        first[i] = m
        second[i] = v
        theta[i] = shrink_ * theta[i] - rate * m / (math.sqrt(v) * correction + eps_)


@_in_chunks
def adam(
    theta: Part, grad: Part, first: Part, second: Part, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, beta1: float, beta2: float, eps: float, step: int, decoupled: bool, scale: float, begin: int,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], begin, theta.size)
        if at.start < at.stop:
            _adam(
                theta[at], grad[at], first[at], second[at], lr[s], weight_decay[s],
                beta1, beta2, eps, step, decoupled, scale,
            )  # fmt: skip


def norms_partial(segments: int) -> int:
    """Return how many float64 numbers `norms` needs: LANES sums and one sum per segment, for each chunk."""
    return NORM_CHUNKS * (LANES + segments)


@helper
def _sum_of_squares(x: ndarray, lanes: ndarray) -> float:
    """Return the sum of the squares of x, added up from LANES independent sums and one for the remainder."""
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
    lines = x.size // LINE
    begin = lines * chunk // NORM_CHUNKS * LINE
    x = x[begin : lines * (chunk + 1) // NORM_CHUNKS * LINE if chunk + 1 < NORM_CHUNKS else x.size]
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], begin, x.size)
        partial[LANES + s] = _sum_of_squares(x[at], partial[:LANES]) if at.start < at.stop else 0.0


@parallel_jit
def norms(x: ndarray, starts: ndarray, stops: ndarray, partial: ndarray, squares: ndarray) -> None:
    width = LANES + starts.size
    if x.size <= SERIAL:
        for chunk in range(NORM_CHUNKS):
            _norms_chunk(chunk, x, starts, stops, partial[chunk * width : (chunk + 1) * width])
    else:
        for chunk in prange(NORM_CHUNKS):
            _norms_chunk(chunk, x, starts, stops, partial[chunk * width : (chunk + 1) * width])
    for s in range(starts.size):
        total = 0.0
        for chunk in range(NORM_CHUNKS):
            total += partial[chunk * width + LANES + s]
        squares[s] = total


@helper
def _local_rate(weight_decay: float, trust: float, theta_square: float, grad_square: float) -> float:
    if theta_square == 0 or grad_square == 0:
        return 1.0
    theta_norm, grad_norm = math.sqrt(theta_square), math.sqrt(grad_square)
    return trust * theta_norm / (grad_norm + weight_decay * theta_norm)


@helper
def _lars(
    theta: ndarray, grad: ndarray, velocity: ndarray, rate: float, weight_decay: float, momentum: float, scale: float
) -> None:
    number = theta.dtype.type
    rate_, pull_, momentum_, scale_ = number(rate), number(weight_decay), number(momentum), number(scale)
    smallest = _smallest(theta)
    for i in range(theta.size):
        g = scale_ * grad[i] + pull_ * theta[i]
        v = _normal(momentum_ * velocity[i] + rate_ * g, smallest)
        velocity[i] = v
        theta[i] -= v


@_in_chunks
def lars(
    theta: Part, grad: Part, velocity: Part, starts: ndarray, stops: ndarray, lr: ndarray,
    weight_decay: ndarray, adapt: ndarray, momentum: float, trust: float, theta_squares: ndarray,
    grad_squares: ndarray, scale: float, begin: int,
) -> None:  # fmt: skip
    for s in range(starts.size):
        at = _overlap(starts[s], stops[s], begin, theta.size)
        if at.start < at.stop:
            local = _local_rate(weight_decay[s], trust, theta_squares[s], scale**2 * grad_squares[s])
            rate = lr[s] * (local if adapt[s] else 1.0)
            _lars(theta[at], grad[at], velocity[at], rate, weight_decay[s], momentum, scale)
