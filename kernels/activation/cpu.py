"""Activation functions: for each function, a loop over one part of the vectors. The threads process different parts.

functions.py computes exp, tanh and the like. elementwise/stream.py divides vectors, prefetches, and stores results.
"""

from __future__ import annotations

from minidl.engine.jit import Part

from ..elementwise.stream import get, put, streamed
from . import functions
from .reference import __all__ as __all__


@streamed
def relu(x: Part, y: Part, past: bool) -> None:
    zero = x.dtype.type(0)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, zero if v < zero else v, past)


@streamed
def relu_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    zero = y.dtype.type(0)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, zero if get(y, i) <= zero else v, past)


@streamed
def leaky_relu(x: Part, slope: float, y: Part, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v if v > zero else factor * v, past)


@streamed
def leaky_relu_backward(dy: Part, x: Part, slope: float, dx: Part, past: bool) -> None:
    zero, factor = x.dtype.type(0), x.dtype.type(slope)
    for i in range(dx.size):
        v = get(dy, i)
        put(dx, i, v if get(x, i) > zero else factor * v, past)


@streamed
def gelu(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.normal_distribution(v), past)


@streamed
def gelu_backward(dy: Part, x: Part, dx: Part, past: bool) -> None:
    for i in range(dx.size):
        put(dx, i, get(dy, i) * functions.gelu_slope(get(x, i)), past)


@streamed
def silu(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        v = get(x, i)
        put(y, i, v * functions.logistic(v), past)


@streamed
def silu_backward(dy: Part, x: Part, dx: Part, past: bool) -> None:
    one = x.dtype.type(1)
    for i in range(dx.size):
        v = get(x, i)
        s = functions.logistic(v)
        put(dx, i, get(dy, i) * (s * (one + v * (one - s))), past)


@streamed
def tanh(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.tanh(get(x, i)), past)


@streamed
def tanh_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (one - v * v), past)


@streamed
def sigmoid(x: Part, y: Part, past: bool) -> None:
    for i in range(y.size):
        put(y, i, functions.logistic(get(x, i)), past)


@streamed
def sigmoid_backward(dy: Part, y: Part, dx: Part, past: bool) -> None:
    one = y.dtype.type(1)
    for i in range(dx.size):
        v = get(y, i)
        put(dx, i, get(dy, i) * (v * (one - v)), past)
