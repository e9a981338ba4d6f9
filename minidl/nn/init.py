"""Initial weights. Arrays are (in, out) or (kh, kw, in, out); fan_in is the number of inputs that one output sums.

Each function writes into a parameter and draws from the generator that `minidl.seed` sets.
"""

from __future__ import annotations

import math

import numpy as np

from minidl.engine.parameter import Parameter
from minidl.engine.random import generator
from minidl.errors import ShapeError


def fans(parameter: Parameter) -> tuple[int, int]:
    """(fan_in, fan_out). Raises ShapeError for a parameter with fewer than two axes."""
    if parameter.ndim < 2:
        raise ShapeError(f"init: a parameter of shape {parameter.shape} has no fan_in and fan_out; initialise biases "
                         "with constant, normal or uniform")  # fmt: skip
    *kernel, inputs, outputs = parameter.shape
    area = math.prod(kernel)
    return inputs * area, outputs * area


def constant(parameter: Parameter, value: float) -> None:
    parameter.copy_(np.full(parameter.shape, value))


def normal(parameter: Parameter, std: float = 1.0) -> None:
    parameter.copy_(generator().normal(0.0, std, parameter.shape))


def uniform(parameter: Parameter, bound: float) -> None:
    """Uniform between -bound and bound."""
    parameter.copy_(generator().uniform(-bound, bound, parameter.shape))


def kaiming_normal(parameter: Parameter, gain: float = math.sqrt(2), fan_out: bool = False) -> None:
    """Normal with std = gain / sqrt(fan): preserves the size of activations through ReLU layers (He et al. 2015).

    fan_out: use fan_out in place of fan_in.
    """
    inputs, outputs = fans(parameter)
    normal(parameter, gain / math.sqrt(outputs if fan_out else inputs))


def kaiming_uniform(parameter: Parameter, gain: float = math.sqrt(2)) -> None:
    """Uniform, with the variance of `kaiming_normal`."""
    uniform(parameter, gain * math.sqrt(3 / fans(parameter)[0]))


def xavier_uniform(parameter: Parameter, gain: float = 1.0) -> None:
    """Uniform with bound = gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    uniform(parameter, gain * math.sqrt(6 / sum(fans(parameter))))


def xavier_normal(parameter: Parameter, gain: float = 1.0) -> None:
    """Normal, with the variance of `xavier_uniform`."""
    normal(parameter, gain * math.sqrt(2 / sum(fans(parameter))))


def torch_default(weight: Parameter, bias: Parameter | None) -> None:
    """The initial values of PyTorch's Linear and Conv2d: both uniform with bound = 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(max(1, fans(weight)[0]))
    uniform(weight, bound)
    if bias is not None:
        uniform(bias, bound)
