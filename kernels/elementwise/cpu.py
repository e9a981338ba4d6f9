"""Elementwise arithmetic, compiled: one loop each, which LLVM turns into vector instructions.

Numbers (scale, shift, exponent) arrive as float64 and are brought to the arrays' type before the loop: one float64 in
it would make the whole loop float64, at half the lanes. How a vector is cut, read and stored is in stream.py; what no
training step contains is left as a plain loop on one thread.
"""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

from ..activation import functions
from .reference import __all__ as __all__
from .stream import SERIAL, chunks, finish, get, part, passes_caches, put


@jit
def _add(a: ndarray, b: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) + get(b, i), past)
    finish(past)


@parallel_jit
def add(a: ndarray, b: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _add(a, b, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _add(part(a, chunk), part(b, chunk), part(out, chunk), past)


@jit
def _subtract(a: ndarray, b: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) - get(b, i), past)
    finish(past)


@parallel_jit
def subtract(a: ndarray, b: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _subtract(a, b, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _subtract(part(a, chunk), part(b, chunk), part(out, chunk), past)


@jit
def _multiply(a: ndarray, b: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) * get(b, i), past)
    finish(past)


@parallel_jit
def multiply(a: ndarray, b: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _multiply(a, b, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _multiply(part(a, chunk), part(b, chunk), part(out, chunk), past)


@jit
def _divide(a: ndarray, b: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(a, i) / get(b, i), past)
    finish(past)


@parallel_jit
def divide(a: ndarray, b: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _divide(a, b, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _divide(part(a, chunk), part(b, chunk), part(out, chunk), past)


@jit
def _maximum(a: ndarray, b: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        v, w = get(a, i), get(b, i)
        put(out, i, v if v >= w or v != v else w, past)
    finish(past)


@parallel_jit
def maximum(a: ndarray, b: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _maximum(a, b, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _maximum(part(a, chunk), part(b, chunk), part(out, chunk), past)


@jit
def _affine(x: ndarray, scale: float, shift: float, out: ndarray, past: bool) -> None:
    factor, summand = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        put(out, i, factor * get(x, i) + summand, past)
    finish(past)


@parallel_jit
def affine(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    if out.size <= SERIAL:
        _affine(x, scale, shift, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _affine(part(x, chunk), scale, shift, part(out, chunk), past)


@jit
def _copy(x: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, get(x, i), past)
    finish(past)


@parallel_jit
def copy(x: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _copy(x, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _copy(part(x, chunk), part(out, chunk), past)


@jit
def _exp(x: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, functions.exp(get(x, i)), past)
    finish(past)


@parallel_jit
def exp(x: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _exp(x, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _exp(part(x, chunk), part(out, chunk), past)


@jit
def _log(x: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, functions.log(get(x, i)), past)
    finish(past)


@parallel_jit
def log(x: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _log(x, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _log(part(x, chunk), part(out, chunk), past)


@jit
def _sqrt(x: ndarray, out: ndarray, past: bool) -> None:
    for i in range(out.size):
        put(out, i, math.sqrt(get(x, i)), past)
    finish(past)


@parallel_jit
def sqrt(x: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _sqrt(x, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _sqrt(part(x, chunk), part(out, chunk), past)


@jit
def _fill(value: float, out: ndarray, past: bool) -> None:
    number = out.dtype.type(value)
    for i in range(out.size):
        put(out, i, number, past)
    finish(past)


@parallel_jit
def fill(value: float, out: ndarray) -> None:
    if out.size <= SERIAL:
        _fill(value, out, False)
        return
    past = passes_caches(out)
    for chunk in prange(chunks(out)):
        _fill(value, part(out, chunk), past)


@jit
def _accumulate(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        put(out, i, get(out, i) + get(x, i), False)


@parallel_jit
def accumulate(x: ndarray, out: ndarray) -> None:
    if out.size <= SERIAL:
        _accumulate(x, out)
        return
    for chunk in prange(chunks(out)):
        _accumulate(part(x, chunk), part(out, chunk))


@jit
def add_bias(bias: ndarray, out: ndarray) -> None:
    for row in range(out.shape[0]):
        y = out[row]
        for c in range(y.size):
            y[c] += bias[c]


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
