"""Normalisation over the batch and over the features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minidl.autograd import Function
from minidl.errors import ShapeError

if TYPE_CHECKING:
    from minidl.tensor import Tensor


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


class Norm(Function):
    """What the three have in common: x as rows (n, C), and gradients for x, weight and bias."""

    x: np.ndarray
    weight: np.ndarray

    def gradients(self, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Room for dx, dweight, dbias."""
        empty = self.device.empty
        return empty(dy.shape, dy.dtype), empty(self.weight.shape, dy.dtype), empty(self.weight.shape, dy.dtype)


class BatchNorm(Norm):
    """With the statistics of this batch; the running ones are brought up to date on the way."""

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
        self.x, self.weight = x, weight
        self.mean, self.rstd = self.device.empty(weight.shape, x.dtype), self.device.empty(weight.shape, x.dtype)
        y = self.device.empty(x.shape, x.dtype)
        self.device.norm.batch_norm(
            _rows(x), weight, bias, eps, momentum, running_mean, running_var, self.mean, self.rstd, _rows(y)
        )
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dx, dweight, dbias = self.gradients(dy)
        self.device.norm.batch_norm_backward(
            _rows(dy), _rows(self.x), self.weight, self.mean, self.rstd, _rows(dx), dweight, dbias
        )
        return dx, dweight, dbias


class BatchNormEval(Norm):
    """With the running statistics: an affine map of each channel."""

    def forward(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        running_mean: np.ndarray,
        running_var: np.ndarray,
        eps: float,
    ) -> np.ndarray:
        self.x, self.weight = x, weight
        self.eps, self.mean, self.var = eps, running_mean.copy(), running_var.copy()  # as they are now
        y = self.device.empty(x.shape, x.dtype)
        self.device.norm.batch_norm_eval(_rows(x), weight, bias, eps, self.mean, self.var, _rows(y))
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        dx, dweight, dbias = self.gradients(dy)
        self.device.norm.batch_norm_eval_backward(
            _rows(dy), _rows(self.x), self.weight, self.eps, self.mean, self.var, _rows(dx), dweight, dbias
        )
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
        self.device.norm.layer_norm_backward(
            _rows(dy), _rows(self.x), self.weight, self.mean, self.rstd, _rows(dx), dweight, dbias
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
    """(x - mean) / sqrt(var + eps) weight + bias for each channel (the last axis) (Ioffe and Szegedy 2015).

    training: mean and variance of this batch, and running <- (1 - momentum) running + momentum batch, in place (the
    variance with n - 1 in it, as in PyTorch); otherwise the running ones.
    """
    if x.ndim < 2 or not x.shape[-1:] == weight.shape == bias.shape == running_mean.shape == running_var.shape:
        raise ShapeError(f"batch_norm: input {x.shape} for {weight.shape[0]} channels; expected (N, ..., channels)")
    if not training:
        return BatchNormEval.apply(x, weight, bias, running_mean=running_mean, running_var=running_var, eps=eps)
    if x.size <= x.shape[-1]:
        raise ShapeError(f"batch_norm: input {x.shape} has fewer than two values for each channel: no variance; "
                         "give a larger batch, or call eval() first")  # fmt: skip
    return BatchNorm.apply(
        x, weight, bias, running_mean=running_mean, running_var=running_var, momentum=momentum, eps=eps
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) weight + bias over the last axis of each sample (Ba, Kiros, Hinton 2016)."""
    if not x.ndim or not x.shape[-1:] == weight.shape == bias.shape:
        raise ShapeError(f"layer_norm: input {x.shape} for {weight.shape} features; the last axis must agree")
    return LayerNorm.apply(x, weight, bias, eps=eps)
