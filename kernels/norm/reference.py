"""Batch and layer normalisation: the definition and the oracle of the tests.

x, y, dx, dy (rows, C); an image batch (N, H, W, C) comes as N * H * W rows. weight, bias and their gradients (C,).
rstd is 1 / sqrt(variance + eps), kept for the backward pass. Variances are those of the sample (divided by
the count), except where said otherwise.
"""

from __future__ import annotations

import math

from numpy import ndarray

__all__ = [
    "batch_norm", "batch_norm_backward", "batch_norm_eval", "batch_norm_eval_backward",
    "layer_norm", "layer_norm_backward",
]  # fmt: skip


def _mean_and_variance(values: ndarray) -> tuple[float, float]:
    """Both of a vector; the variance from the distances to the mean, so that a large mean does no harm."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float,
    running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """y = (x - mean) rstd weight + bias, with mean and rstd (C,) of this batch (Ioffe, Szegedy 2015).

    running = (1 - momentum) running + momentum batch, for the mean and for the unbiased variance (divided by
    rows - 1), as in PyTorch. A single row has variance 0.
    """
    rows, channels = x.shape
    for c in range(channels):
        mean[c], variance = _mean_and_variance(x[:, c])
        rstd[c] = 1 / math.sqrt(variance + eps)
        unbiased = variance * rows / max(rows - 1, 1)
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
        running_var[c] = (1 - momentum) * running_var[c] + momentum * unbiased
        for r in range(rows):
            y[r, c] = (x[r, c] - mean[c]) * rstd[c] * weight[c] + bias[c]


def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """With z = (x - mean) rstd: dbias = sum dy, dweight = sum dy z (over the rows), and

    dx = weight rstd (dy - dbias / rows - z dweight / rows).
    """
    rows, channels = x.shape
    for c in range(channels):
        dbias[c] = sum(dy[r, c] for r in range(rows))
        dweight[c] = sum(dy[r, c] * (x[r, c] - mean[c]) * rstd[c] for r in range(rows))
        for r in range(rows):
            z = (x[r, c] - mean[c]) * rstd[c]
            dx[r, c] = weight[c] * rstd[c] * (dy[r, c] - dbias[c] / rows - z * dweight[c] / rows)


def batch_norm_eval(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float,
    running_mean: ndarray, running_var: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """y = (x - running_mean) / sqrt(running_var + eps) weight + bias."""
    rows, channels = x.shape
    for c in range(channels):
        rstd = 1 / math.sqrt(running_var[c] + eps)
        for r in range(rows):
            y[r, c] = (x[r, c] - running_mean[c]) * rstd * weight[c] + bias[c]


def batch_norm_eval_backward(
    dy: ndarray, x: ndarray, weight: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """As batch_norm_backward, but the statistics are constants: dx = dy weight rstd."""
    rows, channels = x.shape
    for c in range(channels):
        rstd = 1 / math.sqrt(running_var[c] + eps)
        dbias[c] = sum(dy[r, c] for r in range(rows))
        dweight[c] = sum(dy[r, c] * (x[r, c] - running_mean[c]) * rstd for r in range(rows))
        for r in range(rows):
            dx[r, c] = dy[r, c] * weight[c] * rstd


def layer_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    """y = (x - mean) rstd weight + bias, with mean and rstd (rows,) of each row (Ba, Kiros, Hinton 2016)."""
    rows, channels = x.shape
    for r in range(rows):
        mean[r], variance = _mean_and_variance(x[r])
        rstd[r] = 1 / math.sqrt(variance + eps)
        for c in range(channels):
            y[r, c] = (x[r, c] - mean[r]) * rstd[r] * weight[c] + bias[c]


def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """With z = (x - mean) rstd and dz = dy weight: dbias = sum dy, dweight = sum dy z (over the rows), and

    dx = rstd (dz - mean of dz - z * mean of dz z), means over the channels of a row.
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
