"""Elementwise arithmetic, compiled: plain loops, which LLVM turns into vector instructions by itself.

Numbers (scale, shift, exponent) arrive as float64 and are brought to the arrays' type before the loop: one float64 in
it would make the whole loop float64, at half the lanes.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import jit

from .reference import __all__ as __all__


@jit
def add(a: ndarray, b: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i]


@jit
def subtract(a: ndarray, b: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] - b[i]


@jit
def multiply(a: ndarray, b: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] * b[i]


@jit
def divide(a: ndarray, b: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] / b[i]


@jit
def maximum(a: ndarray, b: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] if a[i] >= b[i] or a[i] != a[i] else b[i]


@jit
def maximum_backward(dy: ndarray, a: ndarray, b: ndarray, da: ndarray, db: ndarray) -> None:
    one, half, zero = dy.dtype.type(1), dy.dtype.type(0.5), dy.dtype.type(0)
    for i in range(dy.size):
        to_a = one if a[i] > b[i] else half if a[i] == b[i] else zero
        da[i] = dy[i] * to_a
        db[i] = dy[i] * (one - to_a)


@jit
def affine(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    scale, shift = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        out[i] = scale * x[i] + shift


@jit
def accumulate(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] += x[i]


@jit
def copy(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = x[i]


@jit
def fill(value: float, out: ndarray) -> None:
    number = out.dtype.type(value)
    for i in range(out.size):
        out[i] = number


@jit
def add_bias(bias: ndarray, out: ndarray) -> None:
    for row in range(out.shape[0]):
        y = out[row]
        for c in range(y.size):
            y[c] += bias[c]


@jit
def exp(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = np.exp(x[i])


@jit
def log(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = np.log(x[i])


@jit
def sqrt(x: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        out[i] = np.sqrt(x[i])


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
