"""Activation functions, element by element: the definition and the oracle of the tests.

All arrays of a call are vectors of the same length (n,). A backward pass receives the output y instead of the input x
if the derivative is easier to compute from y. Where x is NaN, y is NaN.
"""

from __future__ import annotations

import math

from numpy import ndarray

__all__ = [
    "gelu", "gelu_backward", "leaky_relu", "leaky_relu_backward", "relu", "relu_backward",
    "sigmoid", "sigmoid_backward", "silu", "silu_backward", "tanh", "tanh_backward",
]  # fmt: skip


def relu(x: ndarray, y: ndarray) -> None:
    """y = max(x, 0)."""
    for i in range(x.size):
        y[i] = 0 if x[i] < 0 else x[i]


def relu_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    """dx = dy where y > 0, else 0. At 0 the derivative is defined as 0, as in PyTorch."""
    for i in range(dy.size):
        dx[i] = 0 if y[i] <= 0 else dy[i]


def leaky_relu(x: ndarray, slope: float, y: ndarray) -> None:
    """y = x where x > 0, else slope * x (Maas, Hannun, Ng 2013)."""
    for i in range(x.size):
        y[i] = x[i] if x[i] > 0 else slope * x[i]


def leaky_relu_backward(dy: ndarray, x: ndarray, slope: float, dx: ndarray) -> None:
    """dx = dy where x > 0, else slope * dy."""
    for i in range(dy.size):
        dx[i] = dy[i] if x[i] > 0 else slope * dy[i]


def gelu(x: ndarray, y: ndarray) -> None:
    """y = x * P(x), P the distribution function of the standard normal distribution (Hendrycks, Gimpel 2016).

    This is the exact form, P(x) = erfc(-x / sqrt(2)) / 2: PyTorch's default, not its tanh approximation.
    """
    for i in range(x.size):
        y[i] = x[i] * math.erfc(-x[i] / math.sqrt(2)) / 2


def gelu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    """dx = dy * (P(x) + x * p(x)), p the density of the standard normal distribution: exp(-x^2 / 2) / sqrt(2 pi)."""
    for i in range(dy.size):
        distribution = math.erfc(-x[i] / math.sqrt(2)) / 2
        density = math.exp(-x[i] * x[i] / 2) / math.sqrt(2 * math.pi)
        dx[i] = dy[i] * (distribution + x[i] * density)


def _logistic(x: float) -> float:
    """Return 1 / (1 + exp(-x)), computed with an exponent that is never positive: exp(1000) would overflow."""
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def silu(x: ndarray, y: ndarray) -> None:
    """y = x * s(x), s the logistic function (Elfwing, Uchibe, Doya 2017; also called swish)."""
    for i in range(x.size):
        y[i] = x[i] * _logistic(x[i])


def silu_backward(dy: ndarray, x: ndarray, dx: ndarray) -> None:
    """dx = dy * s(x) * (1 + x * (1 - s(x)))."""
    for i in range(dy.size):
        s = _logistic(x[i])
        dx[i] = dy[i] * s * (1 + x[i] * (1 - s))


def tanh(x: ndarray, y: ndarray) -> None:
    """y = tanh(x)."""
    for i in range(x.size):
        y[i] = math.tanh(x[i])


def tanh_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    """dx = dy * (1 - y^2)."""
    for i in range(dy.size):
        dx[i] = dy[i] * (1 - y[i] * y[i])


def sigmoid(x: ndarray, y: ndarray) -> None:
    """y = s(x) = 1 / (1 + exp(-x))."""
    for i in range(x.size):
        y[i] = _logistic(x[i])


def sigmoid_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    """dx = dy * y * (1 - y)."""
    for i in range(dy.size):
        dx[i] = dy[i] * y[i] * (1 - y[i])
