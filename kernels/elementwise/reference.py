"""Elementwise arithmetic on vectors of equal length (n,): the definition and the oracle of the tests.

The kernels `..._broadcast` have a second operand w with fewer numbers: x and out are (outer, n, inner), w is (outer,
inner), each stored as a vector. The numbers of w belong to all n rows of x. Other broadcasts are an operation of
kernels/movement.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = [
    "absolute",
    "absolute_backward",
    "accumulate",
    "add",
    "add_broadcast",
    "affine",
    "copy",
    "divide",
    "divide_broadcast",
    "exp",
    "fill",
    "log",
    "maximum",
    "maximum_backward",
    "multiply",
    "multiply_broadcast",
    "power",
    "power_backward",
    "sqrt",
    "subtract",
    "subtract_broadcast",
]


def add(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a + b"""
    for i in range(out.size):
        out[i] = a[i] + b[i]


def subtract(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a - b"""
    for i in range(out.size):
        out[i] = a[i] - b[i]


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a * b"""
    for i in range(out.size):
        out[i] = a[i] * b[i]


def divide(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = a / b"""
    for i in range(out.size):
        out[i] = a[i] / b[i]


def _belonging(w: np.ndarray, inner: int, i: int, size: int) -> np.floating:
    """Return the number of w that belongs to element i of x. size: of x"""
    each = size // (w.size // inner)  # n * inner
    return w[i // each * inner + i % inner]


def add_broadcast(x: np.ndarray, w: np.ndarray, inner: int, out: np.ndarray) -> None:
    """out = x + w, for each row of x"""
    for i in range(out.size):
        out[i] = x[i] + _belonging(w, inner, i, out.size)


def subtract_broadcast(x: np.ndarray, w: np.ndarray, inner: int, out: np.ndarray) -> None:
    """out = x - w, for each row of x"""
    for i in range(out.size):
        out[i] = x[i] - _belonging(w, inner, i, out.size)


def multiply_broadcast(x: np.ndarray, w: np.ndarray, inner: int, out: np.ndarray) -> None:
    """out = x * w, for each row of x"""
    for i in range(out.size):
        out[i] = x[i] * _belonging(w, inner, i, out.size)


def divide_broadcast(x: np.ndarray, w: np.ndarray, inner: int, out: np.ndarray) -> None:
    """out = x / w, for each row of x"""
    for i in range(out.size):
        out[i] = x[i] / _belonging(w, inner, i, out.size)


def maximum(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out = max(a, b); NaN if either is NaN"""
    for i in range(out.size):
        out[i] = a[i] if a[i] >= b[i] or a[i] != a[i] else b[i]


def maximum_backward(dy: np.ndarray, a: np.ndarray, b: np.ndarray, da: np.ndarray, db: np.ndarray) -> None:
    """da = dy and db = 0 where a > b, da = 0 and db = dy where a < b, half of dy each where a = b, as in PyTorch"""
    for i in range(dy.size):
        to_a = 1.0 if a[i] > b[i] else 0.5 if a[i] == b[i] else 0.0
        da[i] = dy[i] * to_a
        db[i] = dy[i] * (1.0 - to_a)


def affine(x: np.ndarray, scale: float, shift: float, out: np.ndarray) -> None:
    """out = scale * x + shift with numbers scale and shift: computes tensor + number, tensor * number, and the like"""
    for i in range(out.size):
        out[i] = scale * x[i] + shift


def accumulate(x: np.ndarray, out: np.ndarray) -> None:
    """out += x"""
    for i in range(out.size):
        out[i] += x[i]


def copy(x: np.ndarray, out: np.ndarray) -> None:
    """out = x"""
    for i in range(out.size):
        out[i] = x[i]


def fill(value: float, out: np.ndarray) -> None:
    """out = value, a number"""
    for i in range(out.size):
        out[i] = value


def exp(x: np.ndarray, out: np.ndarray) -> None:
    """out = e^x"""
    for i in range(out.size):
        out[i] = np.exp(x[i])


def log(x: np.ndarray, out: np.ndarray) -> None:
    """out = ln x; NaN below 0"""
    for i in range(out.size):
        out[i] = np.log(x[i])


def sqrt(x: np.ndarray, out: np.ndarray) -> None:
    """out = sqrt(x); NaN below 0"""
    for i in range(out.size):
        out[i] = np.sqrt(x[i])


def power(x: np.ndarray, exponent: float, out: np.ndarray) -> None:
    """out = x^exponent"""
    for i in range(out.size):
        out[i] = x[i] ** exponent


def power_backward(dy: np.ndarray, x: np.ndarray, exponent: float, dx: np.ndarray) -> None:
    """dx = dy * exponent * x^(exponent - 1); 0 for exponent 0, even where x = 0"""
    for i in range(dx.size):
        dx[i] = 0.0 if exponent == 0 else dy[i] * exponent * x[i] ** (exponent - 1)


def absolute(x: np.ndarray, out: np.ndarray) -> None:
    """out = |x|"""
    for i in range(out.size):
        out[i] = abs(x[i])


def absolute_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy * sign(x), with sign(0) = 0"""
    for i in range(dx.size):
        dx[i] = 0.0 if x[i] == 0 else math.copysign(1.0, x[i]) * dy[i]
