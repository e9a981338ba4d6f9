"""Activation functions on all cores.

The threads share out chunks of CHUNK elements, so that small arrays stay on one core. A chunk is sliced
first and then walked from 0: LLVM vectorises that loop, and not one with an offset in every index.
Constants carry the arrays' type: a bare 0.5 would turn float32 into float64 and halve the vectors' width.
"""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__

CHUNK = 16384


@jit
def _chunks(x: ndarray) -> int:
    return (x.size + CHUNK - 1) // CHUNK


@jit
def _part(x: ndarray, chunk: int) -> ndarray:
    return x[chunk * CHUNK : (chunk + 1) * CHUNK]


@parallel_jit
def relu(x: ndarray, y: ndarray) -> None:
    zero = x.dtype.type(0)
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = zero if x_part[i] < zero else x_part[i]


@parallel_jit
def relu_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    zero = y.dtype.type(0)
    for chunk in prange(_chunks(dy)):
        dy_part, y_part, dx_part = _part(dy, chunk), _part(y, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            dx_part[i] = zero if y_part[i] <= zero else dy_part[i]


@parallel_jit
def leaky_relu(x: ndarray, slope: float, y: ndarray) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = x_part[i] if x_part[i] > zero else factor * x_part[i]


@parallel_jit
def leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for chunk in prange(_chunks(dy)):
        dy_part, x_part, dx_part = _part(dy, chunk), _part(x, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            dx_part[i] = dy_part[i] if x_part[i] > zero else factor * dy_part[i]


@jit
def _normal_distribution(x: float) -> float:
    one, half, root_half = type(x)(1), type(x)(0.5), type(x)(math.sqrt(0.5))
    return half * (one + math.erf(x * root_half))


@jit
def _normal_density(x: float) -> float:
    half, peak = type(x)(0.5), type(x)(1 / math.sqrt(2 * math.pi))
    return peak * math.exp(-half * x * x)


@jit
def _logistic(x: float) -> float:
    one = type(x)(1)
    return one / (one + math.exp(-x))  # exp may overflow to infinity here, which gives the right 0


@parallel_jit
def gelu(x: ndarray, y: ndarray) -> None:
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = x_part[i] * _normal_distribution(x_part[i])


@parallel_jit
def gelu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    for chunk in prange(_chunks(dy)):
        dy_part, x_part, dx_part = _part(dy, chunk), _part(x, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            v = x_part[i]
            dx_part[i] = dy_part[i] * (_normal_distribution(v) + v * _normal_density(v))


@parallel_jit
def silu(x: ndarray, y: ndarray) -> None:
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = x_part[i] * _logistic(x_part[i])


@parallel_jit
def silu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    one = x.dtype.type(1)
    for chunk in prange(_chunks(dy)):
        dy_part, x_part, dx_part = _part(dy, chunk), _part(x, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            v = x_part[i]
            s = _logistic(v)
            dx_part[i] = dy_part[i] * s * (one + v * (one - s))


@parallel_jit
def tanh(x: ndarray, y: ndarray) -> None:
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = math.tanh(x_part[i])


@parallel_jit
def tanh_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    one = y.dtype.type(1)
    for chunk in prange(_chunks(dy)):
        dy_part, y_part, dx_part = _part(dy, chunk), _part(y, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            dx_part[i] = dy_part[i] * (one - y_part[i] * y_part[i])


@parallel_jit
def sigmoid(x: ndarray, y: ndarray) -> None:
    for chunk in prange(_chunks(x)):
        x_part, y_part = _part(x, chunk), _part(y, chunk)
        for i in range(x_part.size):
            y_part[i] = _logistic(x_part[i])


@parallel_jit
def sigmoid_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    one = y.dtype.type(1)
    for chunk in prange(_chunks(dy)):
        dy_part, y_part, dx_part = _part(dy, chunk), _part(y, chunk), _part(dx, chunk)
        for i in range(dy_part.size):
            dx_part[i] = dy_part[i] * y_part[i] * (one - y_part[i])
