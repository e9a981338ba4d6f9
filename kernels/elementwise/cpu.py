"""Elementwise arithmetic, compiled: a loop for each operation. LLVM vectorises most of these loops, but not powers.

Numbers (scale, shift, exponent) arrive as float64 and are converted to the arrays' type before the loop: a single
float64 would make the compiler compute everything in float64, with half as many numbers in a vector. stream.py divides
vectors into parts, and loads and stores their elements. Operations with @jit are rarely needed, and run on one thread.
"""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.engine.jit import Part, jit

from ..activation import functions
from .reference import __all__ as __all__
from .stream import get, put, streamed


@streamed
def add(a: Part, b: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) + get(b, i), past)


@streamed
def subtract(a: Part, b: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) - get(b, i), past)


@streamed
def multiply(a: Part, b: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) * get(b, i), past)


@streamed
def divide(a: Part, b: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) / get(b, i), past)


@streamed
def maximum(a: Part, b: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        v, w = get(a, i), get(b, i)
        put(out, i, v if v >= w or v != v else w, past)


@streamed
def affine(x: Part, scale: float, shift: float, out: Part, past: bool) -> None:
    factor, summand = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        put(out, i, factor * get(x, i) + summand, past)


@streamed
def copy(x: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(x, i), past)


@streamed
def exp(x: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, functions.exp(get(x, i)), past)


@streamed
def log(x: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, functions.log(get(x, i)), past)


@streamed
def sqrt(x: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, math.sqrt(get(x, i)), past)


@streamed
def fill(value: float, out: Part, past: bool) -> None:
    number = out.dtype.type(value)
    for i in range(out.size):
        put(out, i, number, past)


@streamed
def accumulate(x: Part, out: Part) -> None:
    for i in range(out.size):
        put(out, i, get(out, i) + get(x, i), False)


@jit
def maximum_backward(dy: ndarray, a: ndarray, b: ndarray, da: ndarray, db: ndarray) -> None:
    one, half, zero = dy.dtype.type(1), dy.dtype.type(0.5), dy.dtype.type(0)
    for i in range(dy.size):
        to_a = one if a[i] > b[i] else half if a[i] == b[i] else zero
        da[i] = dy[i] * to_a
        db[i] = dy[i] * (one - to_a)


@jit
def power(x: ndarray, exponent: float, out: ndarray) -> None:
    exponent = x.dtype.type(exponent)
    for i in range(out.size):
        out[i] = x[i] ** exponent


@jit
def power_backward(dy: ndarray, x: ndarray, exponent: float, dx: ndarray) -> None:
    exponent, one = x.dtype.type(exponent), x.dtype.type(1)
    for i in range(dx.size):
        dx[i] = dy[i] * exponent * x[i] ** (exponent - one) if exponent else 0


@jit
def absolute(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = abs(x[i])


@jit
def absolute_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    for i in range(dx.size):
        dx[i] = dy[i] if x[i] > 0 else -dy[i] if x[i] < 0 else dy[i] * 0
