"""Batch and layer normalisation: the definition and the oracle of the tests.

x, y, dx and dy have the shape (rows, C); an image batch (N, H, W, C) is N * H * W rows. weight, bias and their
gradients have the shape (C,). rstd is 1 / sqrt(variance + eps), kept for the backward pass. A variance is the mean of
the squared distances to the mean, unless stated otherwise. With `relu`, outputs below 0 become 0; the gradient
is 0 where the output is 0. partial: scratch of a fast kernel, not used here.
"""

from __future__ import annotations

import math

from numpy import ndarray

__all__ = [
    "affine", "affine_backward", "batch_norm", "batch_norm_backward", "fold", "fold_backward",
    "layer_norm", "layer_norm_backward",
]  # fmt: skip


def parts(rows: int, channels: int) -> int:
    """Return the number of blocks of rows in `partial` (blocks, 2, C): any, since these loops do not use it."""
    return 1


def _mean_and_variance(values: ndarray) -> tuple[float, float]:
    """Return mean and variance of a vector. The variance is accurate even if the mean is large."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


def _rectified(value: float, relu: bool) -> float:
    return 0.0 if relu and value < 0 else value


def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    running_mean: ndarray, running_var: ndarray, partial: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute y = (x - mean) * rstd * weight + bias [+ shortcut] [relu]; mean and rstd (C,) of the batch.

    Source: Ioffe, Szegedy 2015. shortcut: (rows, C), added before the relu as in a residual block; (0, C) for none.
    running_mean = (1 - momentum) * running_mean + momentum * mean. running_var is updated likewise, with the unbiased
    variance (divided by rows - 1), as in PyTorch. A single row has variance 0. On the CPU, y may have size 0: then only
    the statistics are computed.
    """
    rows, channels = x.shape
    for c in range(channels):
        mean[c], variance = _mean_and_variance(x[:, c])
        rstd[c] = 1 / math.sqrt(variance + eps)
        unbiased = variance * rows / max(rows - 1, 1)
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
        running_var[c] = (1 - momentum) * running_var[c] + momentum * unbiased
        for r in range(rows if y.size else 0):
            value = (x[r, c] - mean[c]) * (rstd[c] * weight[c]) + bias[c]
            y[r, c] = _rectified(value + shortcut[r, c] if shortcut.size else value, relu)


def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """Compute dx, dbias, dweight: dbias = sum of dy, dweight = sum of dy * z over the rows, with z = (x - mean) * rstd.

    dx = weight * rstd * (dy - dbias / rows - z * dweight / rows).

    With `relu`, the output is recomputed, and dy counts as 0 where the output is not above 0.
    """
    rows, channels = x.shape
    for c in range(channels):
        passed = _passed(dy[:, c], (x[:, c] - mean[c]) * (rstd[c] * weight[c]) + bias[c], relu)
        dbias[c] = sum(passed)
        dweight[c] = sum(passed[r] * (x[r, c] - mean[c]) * rstd[c] for r in range(rows))
        for r in range(rows):
            z = (x[r, c] - mean[c]) * rstd[c]
            dx[r, c] = weight[c] * rstd[c] * (passed[r] - dbias[c] / rows - z * dweight[c] / rows)


def _passed(dy: ndarray, y: ndarray, relu: bool) -> list[float]:
    """Return dy (rows,). With relu, set it to 0 where the relu's input y is not above 0."""
    return [dy[r] if y[r] > 0 or not relu else 0.0 for r in range(len(dy))]


def fold(
    weight: ndarray, bias: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    scale: ndarray, shift: ndarray,
) -> None:  # fmt: skip
    """Compute scale and shift (C,) for which x * scale + shift is batch norm with the running statistics."""
    for c in range(weight.size):
        scale[c] = weight[c] / math.sqrt(running_var[c] + eps)
        shift[c] = bias[c] - running_mean[c] * scale[c]


def fold_backward(
    dscale: ndarray, dshift: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """Compute dweight and dbias from dscale and dshift in float64, since the difference in dweight loses digits."""
    for c in range(dweight.size):
        dweight[c] = (dscale[c] - running_mean[c] * dshift[c]) / math.sqrt(running_var[c] + eps)
        dbias[c] = dshift[c]


def affine(x: ndarray, scale: ndarray, shift: ndarray, relu: bool, y: ndarray) -> None:
    """Compute y = x * scale + shift [relu]."""
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = _rectified(x[r, c] * scale[c] + shift[c], relu)


def affine_backward(
    dy: ndarray, x: ndarray, scale: ndarray, shift: ndarray, relu: bool, partial: ndarray,
    dx: ndarray, dscale: ndarray, dshift: ndarray,
) -> None:  # fmt: skip
    """Compute dx = dy * scale; in float64, dscale = sum of dy * x and dshift = sum of dy over the rows."""
    rows, channels = x.shape
    for c in range(channels):
        passed = _passed(dy[:, c], x[:, c] * scale[c] + shift[c], relu)
        dscale[c] = sum(float(passed[r]) * float(x[r, c]) for r in range(rows))
        dshift[c] = sum(float(gradient) for gradient in passed)
        for r in range(rows):
            dx[r, c] = passed[r] * scale[c]


def layer_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    """Compute y = (x - mean) * rstd * weight + bias with mean, rstd (rows,) of each row (Ba, Kiros, Hinton 2016)."""
    rows, channels = x.shape
    for r in range(rows):
        mean[r], variance = _mean_and_variance(x[r])
        rstd[r] = 1 / math.sqrt(variance + eps)
        for c in range(channels):
            y[r, c] = (x[r, c] - mean[r]) * rstd[r] * weight[c] + bias[c]


def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, partial: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """Compute dx, dbias, dweight: dbias = sum of dy, dweight = sum of dy * z over the rows, with z = (x - mean) * rstd.

    dx = rstd * (dz - mean(dz) - z * mean(dz * z)), with dz = dy * weight and means over the channels of a row.
    """
    rows, channels = x.shape
    dweight[...] = 0
    dbias[...] = 0
    for r in range(rows):
        z = [(x[r, c] - mean[r]) * rstd[r] for c in range(channels)]
        dz = [dy[r, c] * weight[c] for c in range(channels)]
        mean_dz = sum(dz) / channels
        mean_dz_z = sum(dz[c] * z[c] for c in range(channels)) / channels
        for c in range(channels):
            dx[r, c] = rstd[r] * (dz[c] - mean_dz - z[c] * mean_dz_z)
            dweight[c] += dy[r, c] * z[c]
            dbias[c] += dy[r, c]
