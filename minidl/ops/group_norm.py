"""Group normalisation: statistics of each sample alone, over groups of neighbouring channels."""

from __future__ import annotations

import math

import numpy as np

from minidl.checked import whole
from minidl.engine.autograd import Function
from minidl.engine.device import Device
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import NUMBERS


def _pixels(x: np.ndarray) -> np.ndarray:
    """Return x (N, ..., C) as (N, P, C)."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _constant(device: Device, value: float, like: np.ndarray) -> np.ndarray:
    """Return a vector (C,) for x (N, ..., C) with this value everywhere."""
    vector = device.empty(like.shape[-1:], like.dtype)
    device.elementwise.fill(value, vector)
    return vector


class GroupNorm(Function):
    """The parameters are weight and bias, as far as `scaled` and `shifted` say so."""

    def forward(
        self, x: np.ndarray, *parameters: np.ndarray, groups: int, eps: float, scaled: bool, shifted: bool
    ) -> np.ndarray:
        self.x, self.given = x, (scaled, shifted)
        self.weight = parameters[0] if scaled else _constant(self.device, 1.0, x)
        self.bias = parameters[-1] if shifted else _constant(self.device, 0.0, x)
        images, statistics = _pixels(x), (x.shape[0], groups)
        self.mean, self.rstd = self.device.empty(statistics, x.dtype), self.device.empty(statistics, x.dtype)
        y, none = self.device.empty(x.shape, x.dtype), self.device.empty((0, *images.shape[1:]), x.dtype)
        self.device.group_norm.group_norm(
            images, self.weight, self.bias, eps, none, False, self.mean, self.rstd, _pixels(y)
        )
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        channels = self.weight.shape
        dx, dweight, dbias = (self.device.empty(shape, dy.dtype) for shape in (dy.shape, channels, channels))
        images = _pixels(self.x)
        # The number of partial sums depends only on the shape, so the bits do not depend on the number of threads.
        parts = max(1, min(self.device.sum_parts, images.shape[0], images.size // NUMBERS))
        partial = self.device.empty((parts, 2, *channels), np.dtype(np.float64))
        self.device.group_norm.group_norm_backward(
            _pixels(dy), images, self.weight, self.bias, self.mean, self.rstd, False, partial,
            _pixels(dx), dweight, dbias,
        )  # fmt: skip
        return dx, *(gradient for gradient, given in zip((dweight, dbias), self.given) if given)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias for x (N, ..., C), channels last (Wu and He 2018).

    The C channels divide into num_groups groups of neighbours. mean and var are those of all numbers of a group in one
    sample, so a sample's result does not depend on the other samples. weight, bias (C,): None means ones and zeros.
    Raises ShapeError if the shapes do not fit, or the groups do not divide the channels.
    """
    groups = whole("group_norm", "num_groups", num_groups, 1)
    if x.ndim < 2:
        raise ShapeError(f"group_norm: input {x.shape}; expected (N, ..., channels)")
    channels = x.shape[-1]
    divisible("group_norm", groups, channels)
    for parameter in (weight, bias):
        if parameter is not None and parameter.shape != (channels,):
            raise ShapeError(f"group_norm: input {x.shape} for {parameter.shape} channels; "
                             "expected the last axis to be equal")  # fmt: skip
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    return GroupNorm.apply(
        x, *parameters, groups=groups, eps=eps, scaled=weight is not None, shifted=bias is not None
    )


def divisible(where: str, groups: int, channels: int) -> None:
    """Raise ShapeError unless the channels divide into groups of equal size. where: the beginning of the message."""
    if channels % groups:
        near = [g for g in range(1, channels + 1) if channels % g == 0]
        fits = sorted(sorted(near, key=lambda g: abs(g - groups))[:3])
        raise ShapeError(f"{where}: {channels} channels do not divide into {groups} groups; expected a divisor of "
                         f"{channels}, such as {', '.join(map(str, fits))}")  # fmt: skip
