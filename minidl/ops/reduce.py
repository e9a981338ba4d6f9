"""Reductions over one, several or all axes."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import middle, reduce_sum, runs, strided_copy
from minidl.ops.movement import transpose

Axes = int | Sequence[int] | None


def _without(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    return tuple(1 if axis in axes else n for axis, n in enumerate(shape) if keepdims or axis not in axes)


class Sum(Function):
    def forward(self, x: np.ndarray, axes: tuple[int, ...], keepdims: bool) -> np.ndarray:
        self.shape, self.axes = x.shape, axes
        return reduce_sum(self.device, x, axes).reshape(_without(x.shape, axes, keepdims))

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """Copy the gradient of each sum to all its terms: along the summed axes, the source has stride 0."""
        dy = dy.reshape(_without(self.shape, self.axes, keepdims=True))
        return strided_copy(self.device, dy, np.broadcast_to(dy, self.shape))


class Max(Function):
    """The largest element over adjacent axes."""

    def forward(self, x: np.ndarray, axes: tuple[int, ...], keepdims: bool) -> np.ndarray:
        self.shape, self.axes = x.shape, axes
        x = middle(x, axes)
        out = self.device.empty((x.shape[0], x.shape[2]), x.dtype)
        self.winner = self.device.empty(out.shape, np.int64)
        self.device.reduce.maximum(x, out, self.winner)
        return out.reshape(_without(self.shape, axes, keepdims))

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(self.shape, dy.dtype)
        self.device.reduce.maximum_backward(dy.reshape(self.winner.shape), self.winner, middle(dx, self.axes))
        return dx


def _axes(name: str, x: Tensor, axis: Axes) -> tuple[int, ...]:
    """Return the axes to reduce, sorted and not negative. Raises ShapeError if one is out of range or repeated."""
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int | np.integer) else axis
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        raise ShapeError(f"{name}: axis {axis} for a tensor of shape {x.shape}; expected distinct axes of the tensor")
    return tuple(sorted(a % x.ndim for a in axes))


def sum(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Return the sum over one axis, several axes, or all (None)."""
    axes = _axes("sum", x, axis)
    return Sum.apply(x, axes=axes, keepdims=keepdims) if axes else x


def mean(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Return the mean over one axis, several axes, or all (None). Raises ShapeError if there are no elements."""
    count = math.prod(x.shape[a] for a in _axes("mean", x, axis))
    if not count:
        raise ShapeError(f"mean: no elements along axis {axis} of shape {x.shape}")
    return sum(x, axis, keepdims) * (1 / count)


def max(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Return the maximum over one axis, several axes, or all (None). Of equal maxima, the first gets the gradient.

    Raises ShapeError if there are no elements.
    """
    axes = _axes("max", x, axis)
    if not axes:
        return x
    if not math.prod(x.shape[a] for a in axes):
        raise ShapeError(f"max: no elements along axis {axis} of shape {x.shape}")
    shape = _without(x.shape, axes, keepdims)
    if len(runs(axes)) > 1:  # first make the axes adjacent
        rest = tuple(a for a in builtins.range(x.ndim) if a not in axes)
        x, axes = transpose(x, rest + axes), tuple(builtins.range(len(rest), x.ndim))
    return Max.apply(x, axes=axes, keepdims=False).reshape(*shape)
