"""Ops that only move elements. Most of them are one strided copy (kernels/movement)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import reduce_sum, strided_copy


class Reshape(Function):
    """The same memory in another shape."""

    def forward(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        self.shape = x.shape
        return x.reshape(shape)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return dy.reshape(self.shape)


class Transpose(Function):
    def forward(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        self.axes = axes
        return self.permuted(x, axes)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.permuted(dy, tuple(np.argsort(self.axes)))

    def permuted(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        return strided_copy(self.device, x, x.transpose(axes))


class BroadcastTo(Function):
    def forward(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        self.shape = x.shape
        new = len(shape) - x.ndim  # leading axes that x lacks
        self.axes = tuple(axis for axis, n in enumerate(shape) if axis < new or n != x.shape[axis - new])
        return strided_copy(self.device, x, np.broadcast_to(x, shape))

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """Sum the gradients of all copies of each element."""
        return reduce_sum(self.device, dy, self.axes).reshape(self.shape)


class Slice(Function):
    """x[key] for a key of slices and integers."""

    def forward(self, x: np.ndarray, key: Any) -> np.ndarray:
        self.shape, self.key = x.shape, key
        return strided_copy(self.device, x, x[key])

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.zeros(self.shape, dy.dtype)
        strided_copy(self.device, dy, dy, dx, dx[self.key])
        return dx


class Pad(Function):
    def forward(self, x: np.ndarray, widths: tuple[tuple[int, int], ...], value: float) -> np.ndarray:
        self.inside = tuple(slice(before, before + n) for (before, _), n in zip(widths, x.shape, strict=True))
        shape = tuple(before + n + after for (before, after), n in zip(widths, x.shape, strict=True))
        out = self.device.empty(shape, x.dtype)
        self.device.elementwise.fill(value, out.reshape(-1))
        strided_copy(self.device, x, x, out, out[self.inside])
        return out

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return strided_copy(self.device, dy, dy[self.inside])


class Concat(Function):
    def forward(self, *arrays: np.ndarray, axis: int) -> np.ndarray:
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        out = self.device.empty(tuple(shape), arrays[0].dtype)
        self.parts, start = [], 0
        for array in arrays:
            self.parts.append((slice(None),) * axis + (slice(start, start + array.shape[axis]),))
            strided_copy(self.device, array, array, out, out[self.parts[-1]])
            start += array.shape[axis]
        return out

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(strided_copy(self.device, dy, dy[part]) for part in self.parts)


class Take(Function):
    """Rows of x, by index."""

    def forward(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self.shape, self.rows = x.shape, rows.ravel()
        out = self.device.empty((*rows.shape, *x.shape[1:]), x.dtype)
        self.device.movement.take(self.as_rows(x, len(x)), self.rows, self.as_rows(out, rows.size))
        return out

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(self.shape, dy.dtype)
        self.device.movement.take_backward(self.as_rows(dy, self.rows.size), self.rows, self.as_rows(dx, len(dx)))
        return dx

    def as_rows(self, array: np.ndarray, count: int) -> np.ndarray:
        return array.reshape(count, math.prod(self.shape[1:]))


def reshape(x: Tensor, shape: Sequence[int] | int) -> Tensor:
    """Return the same elements in another shape. One length may be -1: it is computed from the others.

    Raises ShapeError if the number of elements differs.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(shape) == 1 and isinstance(shape[0], tuple | list):  # x.reshape((2, 3)), as NumPy allows
        shape = tuple(shape[0])
    if any(n < -1 for n in shape):
        raise ShapeError(f"reshape: {shape} has a negative length; expected lengths of at least 0, and at most one -1")
    known = math.prod(n for n in shape if n != -1)
    unknown = shape.count(-1)
    if unknown > 1 or (unknown and (known == 0 or x.size % known)) or (not unknown and known != x.size):
        raise ShapeError(f"reshape: {x.shape} with {x.size} elements does not fit into {shape}")
    return Reshape.apply(x, shape=tuple(x.size // known if n == -1 else n for n in shape))


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """Merge the axes from `start` to the last into one.

    With start = 1, images (N, H, W, C) become (N, C * H * W), so that the weights of a following linear layer have the
    same order as in PyTorch.
    """
    if x.ndim == 4 and start == 1 and 1 not in (x.shape[3], x.shape[1] * x.shape[2]):  # else both layouts are equal
        x = transpose(x, (0, 3, 1, 2))
    return reshape(x, (*x.shape[:start], math.prod(x.shape[start:])))


def transpose(x: Tensor, axes: Sequence[int] = ()) -> Tensor:
    """Permute the axes: axis i of the result is axis axes[i] of x. Without `axes`, reverse their order."""
    axes = tuple(axes) or tuple(reversed(range(x.ndim)))
    if len(axes) == 1 and isinstance(axes[0], tuple | list):  # x.transpose((1, 0)), as NumPy allows
        axes = tuple(axes[0])
    if sorted(axis + x.ndim if axis < 0 else axis for axis in axes) != list(range(x.ndim)):
        raise ShapeError(f"transpose: axes {axes} are not a permutation of the axes of {x.shape}")
    return Transpose.apply(x, axes=tuple(axis % x.ndim for axis in axes))


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat x along axes of length 1 and along new leading axes, as in NumPy."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    try:
        fits = np.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"broadcast_to: {x.shape} does not broadcast to {shape}")
    return BroadcastTo.apply(x, shape=shape)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Surround x with `value`. widths: (before, after) for each axis, in elements."""
    widths = tuple((int(before), int(after)) for before, after in widths)
    if len(widths) != x.ndim or any(width < 0 for pair in widths for width in pair):
        raise ShapeError(f"pad: widths {widths} for shape {x.shape}; expected one (before, after) >= 0 for each axis")
    return Pad.apply(x, widths=widths, value=float(value))


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along an axis; all other axes must have equal lengths."""
    if not tensors:
        raise ShapeError("concat: no tensors; expected at least one")
    shapes = [tensor.shape for tensor in tensors]
    rank = len(shapes[0])
    if not -rank <= axis < rank or any(len(shape) != rank for shape in shapes):
        raise ShapeError(f"concat: shapes {shapes} along axis {axis}; expected a valid axis, and equal numbers of axes")
    axis %= rank
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise ShapeError(f"concat: shapes {shapes} differ in more than axis {axis}; expected equal lengths elsewhere")
    return Concat.apply(*tensors, axis=axis)


def take(x: Tensor, rows: np.ndarray | Sequence[int]) -> Tensor:
    """Return x[rows]. Rows are indices of the first axis; they may repeat, and negative ones count from the end."""
    rows = np.asarray(rows)
    if not x.ndim or rows.dtype.kind not in "iu" or (rows.size and not -len(x) <= rows.min() <= rows.max() < len(x)):
        raise ShapeError(f"take: rows of {rows.dtype} for shape {x.shape}; expected integer indices of the first axis")
    return Take.apply(x, rows=np.where(rows < 0, rows + len(x), rows).astype(np.int64))


def index(x: Tensor, key: Any) -> Tensor:
    """Return x[key]. key: slices, integers, `...`, None as in NumPy, or an integer or boolean array for axis 0."""
    if isinstance(key, list | np.ndarray):
        key = np.asarray(key)
        if key.dtype == bool:
            if key.shape != x.shape[:1]:
                raise ShapeError(f"index: a mask of shape {key.shape} for shape {x.shape}; expected {x.shape[:1]}")
            key = np.flatnonzero(key)
        return take(x, key)
    parts = key if isinstance(key, tuple) else (key,)
    known = slice, int, np.integer, EllipsisType, type(None)
    if any(isinstance(part, bool) or not isinstance(part, known) for part in parts):
        raise ShapeError(f"index: {key!r} is not supported; expected slices and integers, or one array of rows")
    if ... not in parts:
        parts += (...,)  # else a key with an integer for every axis would give a number, not a view
    try:
        return Slice.apply(x, key=parts)
    except (IndexError, ValueError) as error:
        raise ShapeError(f"index: {key!r} for shape {x.shape}: {error}") from None
