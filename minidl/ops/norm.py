"""Normalisation over the batch and over the features."""

from __future__ import annotations

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import partial_sums, strided_copy


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


class Norm(Function):
    """The base class. It allocates gradients and scratch for the kernels, which process x as rows (n, C)."""

    x: np.ndarray
    weight: np.ndarray

    def gradients(self, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return uninitialised arrays for dx, dweight and dbias."""
        empty = self.device.empty
        return empty(dy.shape, dy.dtype), empty(self.weight.shape, dy.dtype), empty(self.weight.shape, dy.dtype)

    def partial(self, x: np.ndarray) -> np.ndarray:
        """Return an uninitialised array (blocks, 2, C) for the sums of batch norm over blocks of the rows of x."""
        rows, channels = x.shape
        return self.device.empty((self.device.norm.parts(rows, channels), 2, channels), np.dtype(np.float64))


class BatchNorm(Norm):
    """Normalises with the statistics of this batch, and updates the running statistics."""

    def forward(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        running_mean: np.ndarray,
        running_var: np.ndarray,
        momentum: float,
        eps: float,
    ) -> np.ndarray:
        self.x, self.weight, self.bias = x, weight, bias
        self.mean, self.rstd = self.device.empty(weight.shape, x.dtype), self.device.empty(weight.shape, x.dtype)
        y, rows, none = self.device.empty(x.shape, x.dtype), _rows(x), self.device.empty((0, x.shape[-1]), x.dtype)
        self.device.norm.batch_norm(
            rows, weight, bias, eps, momentum, none, False, running_mean, running_var,
            self.partial(rows), self.mean, self.rstd, _rows(y),
        )  # fmt: skip
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dx, dweight, dbias = self.gradients(dy)
        rows = _rows(self.x)
        self.device.norm.batch_norm_backward(
            _rows(dy), rows, self.weight, self.bias, self.mean, self.rstd, False,
            self.partial(rows), _rows(dx), dweight, dbias,
        )  # fmt: skip
        return dx, dweight, dbias


class BatchNormEval(Norm):
    """Normalises with the running statistics: an affine map of each channel."""

    def forward(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        running_mean: np.ndarray,
        running_var: np.ndarray,
        eps: float,
    ) -> np.ndarray:
        self.x, self.weight, self.eps = x, weight, eps
        self.scale, self.shift = self.device.empty(weight.shape, x.dtype), self.device.empty(weight.shape, x.dtype)
        y = self.device.empty(x.shape, x.dtype)
        self.device.norm.fold(weight, bias, eps, running_mean, running_var, self.scale, self.shift)
        self.device.norm.affine(_rows(x), self.scale, self.shift, False, _rows(y))
        # Backward needs the statistics that forward used, but a training step may update them before backward.
        self.statistics = [strided_copy(self.device, a, a) for a in (running_mean, running_var) if any(self.needs)]
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dx, dweight, dbias = self.gradients(dy)
        rows, float64 = _rows(self.x), np.dtype(np.float64)
        dscale, dshift = self.device.empty(dbias.shape, float64), self.device.empty(dbias.shape, float64)
        self.device.norm.affine_backward(
            _rows(dy), rows, self.scale, self.shift, False, self.partial(rows), _rows(dx), dscale, dshift
        )
        self.device.norm.fold_backward(dscale, dshift, self.eps, *self.statistics, dweight, dbias)
        return dx, dweight, dbias


class LayerNorm(Norm):
    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
        self.x, self.weight = x, weight
        rows = _rows(x)
        self.mean, self.rstd = self.device.empty(rows.shape[:1], x.dtype), self.device.empty(rows.shape[:1], x.dtype)
        y = self.device.empty(x.shape, x.dtype)
        self.device.norm.layer_norm(rows, weight, bias, eps, self.mean, self.rstd, _rows(y))
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dx, dweight, dbias = self.gradients(dy)
        rows = _rows(self.x)
        partial = partial_sums(self.device, len(rows), 1, 2 * rows.shape[1])
        partial = partial.reshape(len(partial), 2, rows.shape[1])
        self.device.norm.layer_norm_backward(
            _rows(dy), rows, self.weight, self.mean, self.rstd, partial, _rows(dx), dweight, dbias
        )
        return dx, dweight, dbias


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: np.ndarray,
    running_var: np.ndarray,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias for each channel (the last axis of x (N, ..., C)).

    training: if False, mean and var are the running statistics (Ioffe and Szegedy 2015). If True, they are those of the
    batch, and the running statistics are updated in place: running <- (1 - momentum) * running + momentum * batch.
    As in PyTorch, the divisor of the variance is n - 1 in this update, but n in the formula above.
    Raises ShapeError if the shapes do not fit or, in training, if a channel has fewer than two values.
    """
    if x.ndim < 2 or not x.shape[-1:] == weight.shape == bias.shape == running_mean.shape == running_var.shape:
        raise ShapeError(f"batch_norm: input {x.shape} for {weight.shape[0]} channels; expected (N, ..., channels)")
    running = dict(running_mean=running_mean, running_var=running_var)
    if not training:
        return BatchNormEval.apply(x, weight, bias, **running, eps=eps)
    if x.size <= x.shape[-1]:
        raise ShapeError(f"batch_norm: input {x.shape} has fewer than two values for each channel: no variance; "
                         "use a larger batch, or call eval() first")  # fmt: skip
    return BatchNorm.apply(x, weight, bias, **running, momentum=momentum, eps=eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return weight * (x - mean) / sqrt(var + eps) + bias, with mean and var over the last axis (Ba et al. 2016)."""
    if not x.ndim or not x.shape[-1:] == weight.shape == bias.shape:
        raise ShapeError(f"layer_norm: input {x.shape} for {weight.shape} features; expected the last axis to be equal")
    return LayerNorm.apply(x, weight, bias, eps=eps)
