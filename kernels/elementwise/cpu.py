"""Elementwise arithmetic, compiled: a loop for each operation. LLVM vectorises these loops, except general powers.

Numbers (scale, shift, exponent) arrive as float64 and are converted to the arrays' type before the loop: a single
float64 would make the compiler compute everything in float64, with half as many numbers in a vector. stream.py divides
vectors into parts, and loads and stores their elements.
"""

from __future__ import annotations

import math

from minidl.engine.jit import Part, helper

from ..activation import functions
from .broadcast import add_broadcast as add_broadcast
from .broadcast import divide_broadcast as divide_broadcast
from .broadcast import multiply_broadcast as multiply_broadcast
from .broadcast import subtract_broadcast as subtract_broadcast
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


@streamed
def maximum_backward(dy: Part, a: Part, b: Part, da: Part, db: Part) -> None:
    one, half, zero = dy.dtype.type(1), dy.dtype.type(0.5), dy.dtype.type(0)
    for i in range(dy.size):
        v, w, gradient = get(a, i), get(b, i), get(dy, i)
        to_a = one if v > w else half if v == w else zero
        put(da, i, gradient * to_a, False)
        put(db, i, gradient * (one - to_a), False)


@helper
def _is_simple(exponent: float) -> bool:
    """Return whether _simple_power computes this power."""
    return abs(exponent) == 0.5 or (-2 <= exponent <= 3 and exponent == math.floor(exponent))


@helper
def _simple_power(x: float, exponent: float, one: float) -> float:
    """Return x ** exponent without a call of `pow`. LLVM makes a vector loop for each exponent. one: 1 in x's type."""
    if abs(exponent) == 0.5:
        root = math.sqrt(x)
        return root if exponent > 0 else one / root
    if exponent < 0:
        return one / (x if exponent == -1 else x * x)
    if exponent == 0:
        return one
    return x if exponent == 1 else x * x if exponent == 2 else x * x * x


@streamed
def power(x: Part, exponent: float, out: Part, past: bool) -> None:
    one, exponent = x.dtype.type(1), x.dtype.type(exponent)
    if _is_simple(exponent):
        for i in range(out.size):
            put(out, i, _simple_power(get(x, i), exponent, one), past)
    else:
        for i in range(out.size):
            put(out, i, get(x, i) ** exponent, past)


@streamed
def power_backward(dy: Part, x: Part, exponent: float, dx: Part, past: bool) -> None:
    one, factor = x.dtype.type(1), x.dtype.type(exponent)
    less = factor - one
    if exponent == 0:
        dx[:] = 0
    elif _is_simple(less):
        for i in range(dx.size):
            put(dx, i, get(dy, i) * factor * _simple_power(get(x, i), less, one), past)
    else:
        for i in range(dx.size):
            put(dx, i, get(dy, i) * factor * get(x, i) ** less, past)


@streamed
def absolute(x: Part, out: Part, past: bool) -> None:
    for i in range(out.size):
        put(out, i, abs(get(x, i)), past)


@streamed
def absolute_backward(dy: Part, x: Part, dx: Part, past: bool) -> None:
    zero = x.dtype.type(0)
    for i in range(dx.size):
        v, gradient = get(x, i), get(dy, i)
        put(dx, i, gradient if v > zero else -gradient if v < zero else gradient * zero, past)
