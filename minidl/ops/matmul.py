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
        return self.products(a, False, b, False)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return (
            self.products(dy, False, self.b, True) if self.needs[0] else None,
            self.products(self.a, True, dy, False) if self.needs[1] else None,
        )

    def products(self, a: np.ndarray, a_transposed: bool, b: np.ndarray, b_transposed: bool) -> np.ndarray:
        rows, depth = a.shape[:0:-1] if a_transposed else a.shape[1:]
        out = self.device.empty((len(a), rows, b.shape[1 if b_transposed else 2]), a.dtype)
        kernels = self.device.matmul
        scratch = self.device.empty((kernels.batched_scratch(*out.shape, depth),), a.dtype)
        kernels.batched(a, a_transposed, b, b_transposed, scratch, out)
        return out


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
    rows, columns = left.shape[-2:-1] if a.ndim > 1 else (), right.shape[-1:] if b.ndim > 1 else ()
    shape = (*batch, *rows, *columns)
    if right.ndim == 2:  # the rows of all matrices are the rows of one
        return reshape(Linear.apply(reshape(left, (math.prod(left.shape[:-1]), left.shape[-1])), right), shape)
    left, right = (broadcast_to(t, (*batch, *t.shape[-2:])) for t in (left, right))
    left, right = (reshape(t, (math.prod(batch), *t.shape[-2:])) for t in (left, right))
    return reshape(MatMul.apply(left, right), shape)


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
