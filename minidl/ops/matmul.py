"""Matrix products and the linear layer."""

from __future__ import annotations

import math

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.device import Device
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import reduce_sum
from minidl.ops.elementwise import as_tensors
from minidl.ops.movement import broadcast_to, reshape


class MatMul(Function):
    """y[i] = a[i] @ b[i] for a batch of matrices: a (B, M, K), b (B, K, N), y (B, M, N)."""

    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.a, self.b = a, b
        y = self.device.empty((a.shape[0], a.shape[1], b.shape[2]), a.dtype)
        no_bias = self.device.empty((0,), a.dtype)
        for i in range(len(y)):
            product(self.device, a[i], b[i], no_bias, y[i])
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        da = self.device.empty(self.a.shape, dy.dtype) if self.needs[0] else None
        db = self.device.empty(self.b.shape, dy.dtype) if self.needs[1] else None
        for i in range(len(dy)):
            if da is not None:
                product_with_transposed(self.device, dy[i], self.b[i], da[i])
            if db is not None:
                transposed_product(self.device, self.a[i], dy[i], db[i])
        return da, db


class Linear(Function):
    """y = x @ w + b: x (rows, in), w (in, out), b (out,), y (rows, out)."""

    def forward(self, x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> np.ndarray:
        self.x, self.w = x, w
        y = self.device.empty((x.shape[0], w.shape[1]), x.dtype)
        product(self.device, x, w, bias[0] if bias else self.device.empty((0,), x.dtype), y)
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        dx = dw = None
        if self.needs[0]:
            dx = self.device.empty(self.x.shape, dy.dtype)
            product_with_transposed(self.device, dy, self.w, dx)
        if self.needs[1]:
            dw = self.device.empty(self.w.shape, dy.dtype)
            transposed_product(self.device, self.x, dy, dw)
        return dx, dw, *(reduce_sum(self.device, dy, (0,)) if need else None for need in self.needs[2:])


def product(device: Device, a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Compute out = a @ b + bias: a (M, K), b (K, N), bias (N,), out (M, N). An empty bias (0,) is not added."""
    scratch = device.empty((device.matmul.nn_scratch(*out.shape, a.shape[1]),), a.dtype)
    device.matmul.nn(a, b, bias, False, device.empty((0,), a.dtype), scratch, out)


def product_with_transposed(device: Device, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Compute out = a @ b^T: a (M, K), b (N, K), out (M, N)."""
    scratch = device.empty((device.matmul.nt_scratch(*out.shape, a.shape[1]),), a.dtype)
    device.matmul.nt(a, b, scratch, out)


def transposed_product(device: Device, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Compute out = a^T @ b: a (K, M), b (K, N), out (M, N)."""
    scratch = device.empty((device.matmul.tn_scratch(*out.shape, a.shape[0]),), a.dtype)
    device.matmul.tn(a, b, scratch, out)


def matmul(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> Tensor:
    """Return a @ b: products are summed over the last axis of a and the second-to-last of b. Leading axes broadcast.

    As in NumPy, a vector is a row on the left and a column on the right. Raises ShapeError if the shapes do not fit.
    """
    a, b = as_tensors(a, b)
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ShapeError(f"matmul: {a.shape} @ {b.shape}: the last axis of the left operand must have the length of "
                         "the second-to-last axis of the right one")  # fmt: skip
    left = reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    try:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ShapeError(f"matmul: {a.shape} @ {b.shape}: the leading axes do not broadcast") from None
    left, right = (broadcast_to(t, (*batch, *t.shape[-2:])) for t in (left, right))
    count = math.prod(batch)
    y = MatMul.apply(reshape(left, (count, *left.shape[-2:])), reshape(right, (count, *right.shape[-2:])))
    rows, columns = left.shape[-2:-1] if a.ndim > 1 else (), right.shape[-1:] if b.ndim > 1 else ()
    return reshape(y, (*batch, *rows, *columns))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., in) @ weight (in, out) + bias (out,): (..., out). Raises ShapeError if the shapes do not fit."""
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[0]:
        raise ShapeError(f"linear: input {x.shape} for a weight (in, out) = {weight.shape}: the last axis must have "
                         f"length {weight.shape[0]}")  # fmt: skip
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ShapeError(f"linear: bias {bias.shape} for a weight (in, out) = {weight.shape}; "
                         f"expected {weight.shape[1:]}")  # fmt: skip
    rows = x if x.ndim == 2 else reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = Linear.apply(rows, weight, *([] if bias is None else [bias]))
    return y if x.ndim == 2 else reshape(y, (*x.shape[:-1], weight.shape[1]))
