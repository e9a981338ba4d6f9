"""Elementwise arithmetic on a GPU: each thread computes four neighbouring elements (quads.py).

`binary`, `broadcast` and `unary` make a kernel of a function of numbers. The numbers scale, shift, value and exponent
arrive as float64, and are rounded once to the type of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get

from .quads import QUAD, blocks, first, load, store, whole
from .reference import __all__ as __all__


def binary(name: str, function: Callable[[Any, Any], Any]) -> Any:
    """Return out[i] = function(a[i], b[i]) as a function of (a, b, out)."""
    of_numbers = device(function)

    def _kernel(a: ndarray, b: ndarray, out: ndarray, whole: int) -> None:
        i, n = first(), int32(out.size)
        x, y = cuda.local.array(QUAD, a.dtype), cuda.local.array(QUAD, a.dtype)
        load(a, i, n, whole, x)
        load(b, i, n, whole, y)
        for j in range(QUAD):
            x[j] = of_numbers(x[j], y[j])
        store(out, i, n, whole, x)

    _kernel.__name__ = name
    compute = kernel()(_kernel)

    def run(a: ndarray, b: ndarray, out: ndarray) -> None:
        launch(compute, blocks(out.size), a, b, out, whole(out, a, b))

    return run


def broadcast(name: str, function: Callable[[Any, Any], Any]) -> Any:
    """Return out[o, k, i] = function(x[o, k, i], w[o, i]) as a function of (x, w, inner, out)."""
    of_numbers = device(function)

    def _kernel(x: ndarray, w: ndarray, inner: int, each: int, out: ndarray, whole: int) -> None:
        i, n, inside, length = first(), int32(out.size), int32(inner), int32(each)
        v = cuda.local.array(QUAD, x.dtype)
        load(x, i, n, whole, v)
        for j in range(QUAD):
            if i + j < n:
                at = int32(i + j)
                v[j] = of_numbers(v[j], get(w, at // length * inside + at % inside))
        store(out, i, n, whole, v)

    _kernel.__name__ = name
    compute = kernel()(_kernel)

    def run(x: ndarray, w: ndarray, inner: int, out: ndarray) -> None:
        if out.size:
            launch(compute, blocks(out.size), x, w, inner, out.size // (w.size // inner), out, whole(out, x))

    return run


def unary(name: str, function: Callable[[Any], Any]) -> Any:
    """Return out[i] = function(x[i]) as a function of (x, out)."""
    of_number = device(function)

    def _kernel(x: ndarray, out: ndarray, whole: int) -> None:
        i, n = first(), int32(out.size)
        v = cuda.local.array(QUAD, x.dtype)
        load(x, i, n, whole, v)
        for j in range(QUAD):
            v[j] = of_number(v[j])
        store(out, i, n, whole, v)

    _kernel.__name__ = name
    compute = kernel()(_kernel)

    def run(x: ndarray, out: ndarray) -> None:
        launch(compute, blocks(out.size), x, out, whole(out, x))

    return run


add = binary("add", lambda v, w: v + w)
subtract = binary("subtract", lambda v, w: v - w)
multiply = binary("multiply", lambda v, w: v * w)
divide = binary("divide", lambda v, w: v / w)
maximum = binary("maximum", lambda v, w: v if v >= w or v != v else w)

add_broadcast = broadcast("add_broadcast", lambda v, w: v + w)
subtract_broadcast = broadcast("subtract_broadcast", lambda v, w: v - w)
multiply_broadcast = broadcast("multiply_broadcast", lambda v, w: v * w)
divide_broadcast = broadcast("divide_broadcast", lambda v, w: v / w)

copy = unary("copy", lambda v: v)
exp = unary("exp", lambda v: math.exp(v))
log = unary("log", lambda v: math.log(v))
sqrt = unary("sqrt", lambda v: math.sqrt(v))
absolute = unary("absolute", lambda v: abs(v))


@kernel()
def _affine(x: ndarray, scale: float, shift: float, out: ndarray, whole: int) -> None:
    i, n = first(), int32(out.size)
    v = cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        v[j] = scale * v[j] + shift
    store(out, i, n, whole, v)


def affine(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    number = x.dtype.type
    launch(_affine, blocks(out.size), x, number(scale), number(shift), out, whole(out, x))


@kernel()
def _fill(value: float, out: ndarray, whole: int) -> None:
    v = cuda.local.array(QUAD, out.dtype)
    for j in range(QUAD):
        v[j] = value
    store(out, first(), int32(out.size), whole, v)


def fill(value: float, out: ndarray) -> None:
    launch(_fill, blocks(out.size), out.dtype.type(value), out, whole(out))


@kernel()
def _accumulate(x: ndarray, out: ndarray, whole: int) -> None:
    i, n = first(), int32(out.size)
    v, w = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    load(out, i, n, whole, w)
    for j in range(QUAD):
        w[j] += v[j]
    store(out, i, n, whole, w)


def accumulate(x: ndarray, out: ndarray) -> None:
    launch(_accumulate, blocks(out.size), x, out, whole(out, x))


@kernel()
def _maximum_backward(dy: ndarray, a: ndarray, b: ndarray, da: ndarray, db: ndarray, whole: int) -> None:
    i, n = first(), int32(dy.size)
    one, half, zero = dy.dtype.type(1), dy.dtype.type(0.5), dy.dtype.type(0)
    d, x, y = (cuda.local.array(QUAD, dy.dtype), cuda.local.array(QUAD, dy.dtype), cuda.local.array(QUAD, dy.dtype))
    load(dy, i, n, whole, d)
    load(a, i, n, whole, x)
    load(b, i, n, whole, y)
    for j in range(QUAD):
        to_a = one if x[j] > y[j] else half if x[j] == y[j] else zero
        x[j] = d[j] * to_a
        y[j] = d[j] * (one - to_a)
    store(da, i, n, whole, x)
    store(db, i, n, whole, y)


def maximum_backward(dy: ndarray, a: ndarray, b: ndarray, da: ndarray, db: ndarray) -> None:
    launch(_maximum_backward, blocks(dy.size), dy, a, b, da, db, whole(dy, a, b, da, db))


@kernel()
def _power(x: ndarray, exponent: float, out: ndarray, whole: int) -> None:
    i, n = first(), int32(out.size)
    v = cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        v[j] = v[j] ** exponent
    store(out, i, n, whole, v)


def power(x: ndarray, exponent: float, out: ndarray) -> None:
    launch(_power, blocks(out.size), x, x.dtype.type(exponent), out, whole(out, x))


@kernel()
def _power_backward(dy: ndarray, x: ndarray, exponent: float, dx: ndarray, whole: int) -> None:
    i, n, one = first(), int32(dx.size), x.dtype.type(1)
    d, v = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load(dy, i, n, whole, d)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        v[j] = d[j] * exponent * v[j] ** (exponent - one) if exponent else 0
    store(dx, i, n, whole, v)


def power_backward(dy: ndarray, x: ndarray, exponent: float, dx: ndarray) -> None:
    launch(_power_backward, blocks(dx.size), dy, x, x.dtype.type(exponent), dx, whole(dx, dy, x))


@kernel()
def _absolute_backward(dy: ndarray, x: ndarray, dx: ndarray, whole: int) -> None:
    i, n = first(), int32(dx.size)
    d, v = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load(dy, i, n, whole, d)
    load(x, i, n, whole, v)
    for j in range(QUAD):
        v[j] = d[j] if v[j] > 0 else -d[j] if v[j] < 0 else d[j] * 0
    store(dx, i, n, whole, v)


def absolute_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    launch(_absolute_backward, blocks(dx.size), dy, x, dx, whole(dx, dy, x))
