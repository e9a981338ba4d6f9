"""Activation functions: one loop each, over vectors of elements, shared out among the threads if there are many.

The functions themselves are in functions.py; how a vector is cut and stored is in elementwise/stream.py.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

from ..elementwise.stream import SERIAL, chunks, finish, get, part, passes_caches, put
from . import functions
from .reference import __all__ as __all__


@jit
def _relu(x: ndarray, y: ndarray, past: bool) -> None:
    zero = x.dtype.type(0)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, zero if v < zero else v, past)
    finish(past)


@parallel_jit
def relu(x: ndarray, y: ndarray) -> None:
    if y.size <= SERIAL:
        _relu(x, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _relu(part(x, chunk), part(y, chunk), past)


@jit
def _relu_backward(dy: ndarray, y: ndarray, dx: ndarray, past: bool) -> None:
    zero = y.dtype.type(0)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, zero if get(y, i) <= zero else v, past)
    finish(past)


@parallel_jit
def relu_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _relu_backward(dy, y, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _relu_backward(part(dy, chunk), part(y, chunk), part(dx, chunk), past)


@jit
def _leaky_relu(x: ndarray, slope: float, y: ndarray, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v if v > zero else factor * v, past)
    finish(past)


@parallel_jit
def leaky_relu(x: ndarray, slope: float, y: ndarray) -> None:
    if y.size <= SERIAL:
        _leaky_relu(x, slope, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _leaky_relu(part(x, chunk), slope, part(y, chunk), past)


@jit
def _leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, v if get(x, i) > zero else factor * v, past)
    finish(past)


@parallel_jit
def leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _leaky_relu_backward(dy, x, slope, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _leaky_relu_backward(part(dy, chunk), part(x, chunk), slope, part(dx, chunk), past)


@jit
def _gelu(x: ndarray, y: ndarray, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.normal_distribution(v), past)
    finish(past)


@parallel_jit
def gelu(x: ndarray, y: ndarray) -> None:
    if y.size <= SERIAL:
        _gelu(x, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _gelu(part(x, chunk), part(y, chunk), past)


@jit
def _gelu_backward(dy: ndarray, x: ndarray, dx: ndarray, past: bool) -> None:
    for i in range(dx.size):
        put(dx, i, get(dy, i) * functions.gelu_slope(get(x, i)), past)
    finish(past)


@parallel_jit
def gelu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _gelu_backward(dy, x, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _gelu_backward(part(dy, chunk), part(x, chunk), part(dx, chunk), past)


@jit
def _silu(x: ndarray, y: ndarray, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.logistic(v), past)
    finish(past)


@parallel_jit
def silu(x: ndarray, y: ndarray) -> None:
    if y.size <= SERIAL:
        _silu(x, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _silu(part(x, chunk), part(y, chunk), past)


@jit
def _silu_backward(dy: ndarray, x: ndarray, dx: ndarray, past: bool) -> None:
    one = x.dtype.type(1)
    for i in range(dx.size):
        v = get(x, i)
        s = functions.logistic(v)
        put(dx, i, get(dy, i) * (s * (one + v * (one - s))), past)
    finish(past)


@parallel_jit
def silu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _silu_backward(dy, x, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _silu_backward(part(dy, chunk), part(x, chunk), part(dx, chunk), past)


@jit
def _tanh(x: ndarray, y: ndarray, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.tanh(get(x, i)), past)
    finish(past)


@parallel_jit
def tanh(x: ndarray, y: ndarray) -> None:
    if y.size <= SERIAL:
        _tanh(x, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _tanh(part(x, chunk), part(y, chunk), past)


@jit
def _tanh_backward(dy: ndarray, y: ndarray, dx: ndarray, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (one - v * v), past)
    finish(past)


@parallel_jit
def tanh_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _tanh_backward(dy, y, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _tanh_backward(part(dy, chunk), part(y, chunk), part(dx, chunk), past)


@jit
def _sigmoid(x: ndarray, y: ndarray, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.logistic(get(x, i)), past)
    finish(past)


@parallel_jit
def sigmoid(x: ndarray, y: ndarray) -> None:
    if y.size <= SERIAL:
        _sigmoid(x, y, False)
        return
    past = passes_caches(y)
    for chunk in prange(chunks(y)):
        _sigmoid(part(x, chunk), part(y, chunk), past)


@jit
def _sigmoid_backward(dy: ndarray, y: ndarray, dx: ndarray, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (v * (one - v)), past)
    finish(past)


@parallel_jit
def sigmoid_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    if dx.size <= SERIAL:
        _sigmoid_backward(dy, y, dx, False)
        return
    past = passes_caches(dx)
    for chunk in prange(chunks(dx)):
        _sigmoid_backward(part(dy, chunk), part(y, chunk), part(dx, chunk), past)
