"""Activation functions on a GPU: each thread computes four neighbouring elements (../elementwise/quads.py).

`math` stands for NVIDIA's library here. Its functions are compiled into the kernels, as branches are rare in them and a
GPU waits for memory meanwhile. So this file needs none of the polynomials of functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_numbers import like

from ..elementwise.cuda import binary, unary
from ..elementwise.quads import QUAD, blocks, first, load, store, whole
from .reference import __all__ as __all__


def forward(name: str, function: Callable[[Any], Any]) -> Any:
    """Return y[i] = function(x[i]) as a function of (x, y)."""
    compute = unary(name, function)

    def run(x: ndarray, y: ndarray) -> None:
        compute(x, y)

    return run


def backward(name: str, function: Callable[[Any, Any], Any]) -> Any:
    """Return dx[i] = function(dy[i], x[i]) as a function of (dy, x, dx)."""
    compute = binary(name, function)

    def run(dy: ndarray, x: ndarray, dx: ndarray) -> None:
        compute(dy, x, dx)

    return run


def backward_of_output(name: str, function: Callable[[Any, Any], Any]) -> Any:
    """Return dx[i] = function(dy[i], y[i]) as a function of (dy, y, dx)."""
    compute = binary(name, function)

    def run(dy: ndarray, y: ndarray, dx: ndarray) -> None:
        compute(dy, y, dx)

    return run


@device
def _logistic(v: Any) -> Any:
    """1 / (1 + e^-v): where e^-v is infinite, this is 0."""
    return like(v, 1) / (like(v, 1) + math.exp(-v))


@device
def _normal_distribution(v: Any) -> Any:
    return like(v, 0.5) * math.erfc(-v * like(v, math.sqrt(0.5)))


@device
def _normal_density(v: Any) -> Any:
    return like(v, 1 / math.sqrt(2 * math.pi)) * math.exp(like(v, -0.5) * v * v)


@device
def _silu_slope(v: Any) -> Any:
    s = _logistic(v)
    return s * (like(v, 1) + v * (like(v, 1) - s))


relu = forward("relu", lambda v: like(v, 0) if v < 0 else v)
gelu = forward("gelu", lambda v: v * _normal_distribution(v))
silu = forward("silu", lambda v: v * _logistic(v))
tanh = forward("tanh", lambda v: math.tanh(v))
sigmoid = forward("sigmoid", lambda v: _logistic(v))

relu_backward = backward_of_output("relu_backward", lambda d, y: like(d, 0) if y <= 0 else d)
tanh_backward = backward_of_output("tanh_backward", lambda d, y: d * (like(y, 1) - y * y))
sigmoid_backward = backward_of_output("sigmoid_backward", lambda d, y: d * (y * (like(y, 1) - y)))
gelu_backward = backward("gelu_backward", lambda d, v: d * (_normal_distribution(v) + v * _normal_density(v)))
silu_backward = backward("silu_backward", lambda d, v: d * _silu_slope(v))


@kernel()
def _leaky_relu(x: ndarray, slope: float, y: ndarray, whole: int) -> None:
    i, n = first(), int32(y.size)
    v = cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        v[j] = v[j] if v[j] > 0 else slope * v[j]
    store(y, i, n, whole, v)


def leaky_relu(x: ndarray, slope: float, y: ndarray) -> None:
    launch(_leaky_relu, blocks(y.size), x, x.dtype.type(slope), y, whole(y, x))


@kernel()
def _leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray, whole: int) -> None:
    i, n = first(), int32(dx.size)
    d, v = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load(dy, i, n, whole, d)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        d[j] = d[j] if v[j] > 0 else slope * d[j]
    store(dx, i, n, whole, d)


def leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray) -> None:
    launch(_leaky_relu_backward, blocks(dx.size), dy, x, x.dtype.type(slope), dx, whole(dx, dy, x))
