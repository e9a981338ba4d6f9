"""Elementwise arithmetic, compiled: plain loops, which LLVM turns into vector instructions by itself.

Numbers (scale, shift, exponent) arrive as float64 and are brought to the arrays' type before the loop: one float64 in
it would make the whole loop float64, at half the lanes.
"""

from __future__ import annotations

import numpy as np

from minidl.jit import jit

from .reference import __all__ as __all__


@jit
def add(a, b, out):
    for i in range(out.size):
        out[i] = a[i] + b[i]


@jit
def subtract(a, b, out):
    for i in range(out.size):
        out[i] = a[i] - b[i]


@jit
def multiply(a, b, out):
    for i in range(out.size):
        out[i] = a[i] * b[i]


@jit
def divide(a, b, out):
    for i in range(out.size):
        out[i] = a[i] / b[i]


@jit
def maximum(a, b, out):
    for i in range(out.size):
        out[i] = a[i] if a[i] >= b[i] or a[i] != a[i] else b[i]


@jit
def maximum_backward(dy, a, b, da, db):
    one, half, zero = dy.dtype.type(1), dy.dtype.type(0.5), dy.dtype.type(0)
    for i in range(dy.size):
        to_a = one if a[i] > b[i] else half if a[i] == b[i] else zero
        da[i] = dy[i] * to_a
        db[i] = dy[i] * (one - to_a)


@jit
def affine(x, scale, shift, out):
    scale, shift = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        out[i] = scale * x[i] + shift


@jit
def accumulate(x, out):
    for i in range(out.size):
        out[i] += x[i]


@jit
def add_bias(bias, out):
    for row in range(out.shape[0]):
        y = out[row]
        for c in range(y.size):
            y[c] += bias[c]


@jit
def exp(x, out):
    for i in range(out.size):
        out[i] = np.exp(x[i])


@jit
def log(x, out):
    for i in range(out.size):
        out[i] = np.log(x[i])


@jit
def sqrt(x, out):
    for i in range(out.size):
        out[i] = np.sqrt(x[i])


@jit
def power(x, exponent, out):
    exponent = x.dtype.type(exponent)
    for i in range(out.size):
        out[i] = x[i] ** exponent


@jit
def power_backward(dy, x, exponent, dx):
    exponent, one = x.dtype.type(exponent), x.dtype.type(1)
    for i in range(dx.size):
        dx[i] = dy[i] * exponent * x[i] ** (exponent - one) if exponent else 0


@jit
def absolute(x, out):
    for i in range(out.size):
        out[i] = abs(x[i])


@jit
def absolute_backward(dy, x, dx):
    for i in range(dx.size):
        dx[i] = dy[i] if x[i] > 0 else -dy[i] if x[i] < 0 else dy[i] * 0
