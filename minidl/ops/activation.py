"""Activations. Each keeps its input or its output for backward, whichever makes the derivative cheaper."""

from __future__ import annotations

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor


class Activation(Function):
    """The base class. An activation has two kernels: name(x, *options, y) and name_backward(dy, kept, *options, dx).

    kept: y if keeps_output is set, else x.
    """

    name: str
    keeps_output = False

    def forward(self, x: np.ndarray, **options: float) -> np.ndarray:
        y = self.device.empty(x.shape, x.dtype)
        self.options = tuple(options.values())
        getattr(self.device.activation, self.name)(x.ravel(), *self.options, y.ravel())
        self.kept = y if self.keeps_output else x
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(dy.shape, dy.dtype)
        kernel = getattr(self.device.activation, f"{self.name}_backward")
        kernel(dy.ravel(), self.kept.ravel(), *self.options, dx.ravel())
        return dx


class ReLU(Activation):
    name, keeps_output = "relu", True


class LeakyReLU(Activation):
    name = "leaky_relu"


class GELU(Activation):
    name = "gelu"


class SiLU(Activation):
    name = "silu"


class Tanh(Activation):
    name, keeps_output = "tanh", True


class Sigmoid(Activation):
    name, keeps_output = "sigmoid", True


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return ReLU.apply(x)


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """Return x if x > 0, else slope * x."""
    return LeakyReLU.apply(x, slope=float(slope))


def gelu(x: Tensor) -> Tensor:
    """Return x * Phi(x) with the exact normal distribution function Phi, not by tanh (Hendrycks, Gimpel 2016)."""
    return GELU.apply(x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), also called swish."""
    return SiLU.apply(x)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of x."""
    return Tanh.apply(x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x)."""
    return Sigmoid.apply(x)
