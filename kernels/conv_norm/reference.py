"""Convolutions beside batch norms, training: the definition and the oracle of the tests.

    x -> batch norm, relu -> convolution -> y -> next batch norm -> ...

`forward` and `backward_weight` read the input of the batch norm before them, and normalise and rectify it themselves.
`forward` and `backward_input` also compute `sums` (blocks, 2, C) over blocks of rows of what they write. All blocks
have equally many rows, up to 128; only the last one may have fewer.
`batch_norm` and `batch_norm_backward` need these sums: they do not have to read their input a first time.

x, y, dx, dy are images (N, H, W, C), except in the batch norms, where they are rows (N * H * W, C). norm_weight and the
other arguments norm_... (C,) belong to the batch norm before the convolution; rstd is 1 / sqrt(variance + eps).
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from ..conv import reference as conv
from ..conv.reference import Pair
from ..norm import reference as norm

__all__ = ["backward_input", "backward_weight", "batch_norm", "batch_norm_backward", "forward"]


def _blocks(rows: int, count: int) -> list[slice]:
    """Return which of the rows are in each block."""
    each = -(-rows // max(1, count))
    return [slice(k * each, (k + 1) * each) for k in range(count)]


def _normalized(x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray) -> ndarray:
    """Return relu(batch norm of x), or x if the mean has size 0."""
    return np.maximum((x - mean) * (rstd * weight) + bias, 0) if mean.size else x


def forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    """Compute y as conv.forward does, from the normalised and rectified x. The arguments norm_... may have size 0.

    sums: of size 0, or the moments of y for the next batch norm: for each block of rows, the sum of y and the sum of
    (y - m)^2, where m is the mean of the block.
    """
    z = _normalized(x, norm_weight, norm_bias, norm_mean, norm_rstd)
    conv.forward(z, weight, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation, winograd, packed,
                 scratch, y)  # fmt: skip
    rows = y.reshape(-1, y.shape[3])
    for k, block in enumerate(rows[part] for part in _blocks(len(rows), len(sums))):
        sums[k] = block.sum(0), ((block - block.mean(0)) ** 2).sum(0)


def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    """Compute dx as conv.backward_input does, and sums for the gradients of the batch norm with the input norm_x.

    relu_y: of size 0 or, if a relu follows the sum of batch norm and shortcut, its output (a vector); dx is then the
    gradient before this relu. norm_relu: whether a relu directly follows the batch norm; its gradient is applied to
    what is added, not to dx. sums: for each block of rows, the sum of dx and the sum of dx * (norm_x - mean).
    """
    conv.backward_input(dy, weight, shortcut, groups, stride, padding, dilation, winograd, scratch, dx)
    if relu_y.size:
        dx[relu_y.reshape(dx.shape) <= 0] = 0
    distances = (norm_x - norm_mean).reshape(-1, dx.shape[3])
    rows = dx.reshape(distances.shape)
    passed = np.where(distances * (norm_rstd * norm_weight) + norm_bias > 0, rows, 0) if norm_relu else rows
    for k, block in enumerate(_blocks(len(rows), len(sums))):
        sums[k] = passed[block].sum(0), (passed[block] * distances[block]).sum(0)


def backward_weight(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """Compute dweight as conv.backward_weight does, from the normalised and rectified x."""
    z = _normalized(x, norm_weight, norm_bias, norm_mean, norm_rstd)
    conv.backward_weight(z, dy, groups, stride, padding, dilation, winograd, scratch, dweight)


def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    sums: ndarray, running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Do the same as norm.batch_norm, with the moments of x."""
    norm.batch_norm(x, weight, bias, eps, momentum, shortcut, relu, running_mean, running_var, x[:0], mean, rstd, y)


def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    sums: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """Do the same as norm.batch_norm_backward, with the sums of backward_input."""
    norm.batch_norm_backward(dy, x, weight, bias, mean, rstd, relu, x[:0], dx, dweight, dbias)
