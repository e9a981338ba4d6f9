"""Activation functions: for each function, a loop over one chunk of the vectors. The threads process different chunks.

functions.py computes exp, tanh and the like. elementwise/stream.py divides vectors into chunks and stores results.
"""

from __future__ import annotations

from minidl.engine.jit import Part

from ..elementwise.stream import chunked, finish, get, put
from . import functions
from .reference import __all__ as __all__


@chunked
def relu(x: Part, y: Part, past: bool) -> None:
    zero = x.dtype.type(0)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, zero if v < zero else v, past)
    finish(past)


@chunked
def relu_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    zero = y.dtype.type(0)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, zero if get(y, i) <= zero else v, past)
    finish(past)


@chunked
def leaky_relu(x: Part, slope: float, y: Part, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v if v > zero else factor * v, past)
    finish(past)


@chunked
def leaky_relu_backward(dy: Part, x: Part, slope: float, dx: Part, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, v if get(x, i) > zero else factor * v, past)
    finish(past)


@chunked
def gelu(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.normal_distribution(v), past)
    finish(past)


@chunked
def gelu_backward(dy: Part, x: Part, dx: Part, past: bool) -> None:
    for i in range(dx.size):
        put(dx, i, get(dy, i) * functions.gelu_slope(get(x, i)), past)
    finish(past)


@chunked
def silu(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.logistic(v), past)
    finish(past)


@chunked
def silu_backward(dy: Part, x: Part, dx: Part, past: bool) -> None:
    one = x.dtype.type(1)
    for i in range(dx.size):
        v = get(x, i)
        s = functions.logistic(v)
        put(dx, i, get(dy, i) * (s * (one + v * (one - s))), past)
    finish(past)


@chunked
def tanh(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.tanh(get(x, i)), past)
    finish(past)


@chunked
def tanh_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (one - v * v), past)
    finish(past)


@chunked
def sigmoid(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.logistic(get(x, i)), past)
    finish(past)


@chunked
def sigmoid_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (v * (one - v)), past)
    finish(past)
