"""Batch and layer normalisation: two passes over memory each, the rows shared out among the threads.

The rows are split into CHUNKS blocks, always the same number: each block sums into float64 numbers of its
own, and these are added in the blocks' order, so that results do not depend on the number of threads.
Rows are walked in order with the contiguous channels innermost, as memory likes it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__

CHUNKS = 32


@jit
def _block(a: ndarray, chunk: int) -> ndarray:
    """The chunk-th of CHUNKS blocks of rows."""
    rows = a.shape[0]
    return a[rows * chunk // CHUNKS : rows * (chunk + 1) // CHUNKS]


@jit
def _total(partial: ndarray) -> ndarray:
    """The sum of partial (CHUNKS, 2, C) over the chunks, in their order: (2, C)."""
    total = np.zeros_like(partial[0])
    for chunk in range(CHUNKS):
        for k in range(2):
            for c in range(total.shape[1]):
                total[k, c] += partial[chunk, k, c]
    return total


# Batch normalisation


@jit
def _sum_moments(x: ndarray, origin: ndarray, sums: ndarray) -> None:
    """sums (2, C) = sum of (x - origin), sum of (x - origin)^2, over the rows"""
    sums[:] = 0
    first, second = sums[0], sums[1]
    for r in range(x.shape[0]):
        row = x[r]
        for c in range(row.size):
            distance = row[c] - origin[c]
            first[c] += distance
            second[c] += distance * distance


@parallel_jit
def _moments(x: ndarray, origin: ndarray) -> ndarray:
    partial = np.empty((CHUNKS, 2, x.shape[1]))
    for chunk in prange(CHUNKS):
        _sum_moments(_block(x, chunk), origin, partial[chunk])
    return _total(partial)


@jit
def _affine(x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, y: ndarray) -> None:
    for r in range(x.shape[0]):
        x_row, y_row = x[r], y[r]
        for c in range(x_row.size):
            y_row[c] = (x_row[c] - mean[c]) * scale[c] + bias[c]


@parallel_jit
def _normalize(x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, y: ndarray) -> None:
    """y = (x - mean) scale + bias"""
    for chunk in prange(CHUNKS):
        _affine(_block(x, chunk), mean, scale, bias, _block(y, chunk))


@jit
def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float,
    running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    # One pass gives both moments. It is as accurate as two, because distances are taken from the first row: its
    # distance to the mean can cancel at most log2(rows) bits of the variance, to which it belongs itself.
    rows, channels = x.shape
    origin = x[0].astype(np.float64)
    moments = _moments(x, origin)
    scale = np.empty_like(weight)
    for c in range(channels):
        distance = moments[0, c] / rows
        variance = moments[1, c] / rows - distance * distance
        if variance < 0:  # by rounding
            variance = 0.0
        unbiased = variance * rows / max(rows - 1, 1)
        mean[c] = origin[c] + distance
        rstd[c] = 1 / math.sqrt(variance + eps)
        scale[c] = rstd[c] * weight[c]
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
        running_var[c] = (1 - momentum) * running_var[c] + momentum * unbiased
    _normalize(x, mean, scale, bias, y)


@jit
def batch_norm_eval(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float,
    running_mean: ndarray, running_var: ndarray, y: ndarray,
) -> None:  # fmt: skip
    scale = np.empty_like(weight)
    for c in range(weight.size):
        scale[c] = weight[c] / math.sqrt(running_var[c] + eps)
    _normalize(x, running_mean, scale, bias, y)


@jit
def _sum_gradient_moments(dy: ndarray, x: ndarray, mean: ndarray, sums: ndarray) -> None:
    """sums (2, C) = sum of dy, sum of dy (x - mean), over the rows"""
    sums[:] = 0
    first, second = sums[0], sums[1]
    for r in range(x.shape[0]):
        dy_row, x_row = dy[r], x[r]
        for c in range(x_row.size):
            first[c] += dy_row[c]
            second[c] += dy_row[c] * (x_row[c] - mean[c])


@parallel_jit
def _gradient_moments(dy: ndarray, x: ndarray, mean: ndarray) -> ndarray:
    partial = np.empty((CHUNKS, 2, x.shape[1]))
    for chunk in prange(CHUNKS):
        _sum_gradient_moments(_block(dy, chunk), _block(x, chunk), mean, partial[chunk])
    return _total(partial)


@jit
def _add_affine(
    dy: ndarray, x: ndarray, mean: ndarray, dy_scale: ndarray, x_scale: ndarray, shift: ndarray, dx: ndarray
) -> None:
    for r in range(x.shape[0]):
        dy_row, x_row, dx_row = dy[r], x[r], dx[r]
        for c in range(x_row.size):
            dx_row[c] = dy_scale[c] * dy_row[c] + (x_scale[c] * (x_row[c] - mean[c]) + shift[c])


@parallel_jit
def _input_gradient(
    dy: ndarray, x: ndarray, mean: ndarray, dy_scale: ndarray, x_scale: ndarray, shift: ndarray, dx: ndarray
) -> None:
    """dx = dy_scale dy + x_scale (x - mean) + shift"""
    for chunk in prange(CHUNKS):
        _add_affine(_block(dy, chunk), _block(x, chunk), mean, dy_scale, x_scale, shift, _block(dx, chunk))


@jit
def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    # For each channel dx is linear in dy and x: weight rstd (dy - dbias / rows - (x - mean) rstd dweight / rows).
    rows, channels = x.shape
    moments = _gradient_moments(dy, x, mean)
    dy_scale, x_scale, shift = np.empty_like(weight), np.empty_like(weight), np.empty_like(weight)
    for c in range(channels):
        dbias[c] = moments[0, c]
        dweight[c] = moments[1, c] * rstd[c]
        dy_scale[c] = weight[c] * rstd[c]
        x_scale[c] = -dy_scale[c] * rstd[c] * dweight[c] / rows
        shift[c] = -dy_scale[c] * dbias[c] / rows
    _input_gradient(dy, x, mean, dy_scale, x_scale, shift, dx)


@jit
def batch_norm_eval_backward(
    dy: ndarray, x: ndarray, weight: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    moments = _gradient_moments(dy, x, running_mean)
    dy_scale = np.empty_like(weight)
    constant = np.zeros_like(weight)  # the statistics do not move with x: its terms vanish
    for c in range(weight.size):
        rstd = 1 / math.sqrt(running_var[c] + eps)
        dbias[c] = moments[0, c]
        dweight[c] = moments[1, c] * rstd
        dy_scale[c] = weight[c] * rstd
    _input_gradient(dy, x, running_mean, dy_scale, constant, constant, dx)


# Layer normalisation


@jit
def _layer_norm_rows(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    for r in range(x.shape[0]):
        x_row, y_row = x[r], y[r]
        total = 0.0
        for c in range(x_row.size):
            total += x_row[c]
        center = total / x_row.size
        squares = 0.0
        for c in range(x_row.size):
            squares += (x_row[c] - center) ** 2
        mean[r] = center
        rstd[r] = 1 / math.sqrt(squares / x_row.size + eps)
        shift, scale = mean[r], rstd[r]  # as stored, in the arrays' type
        for c in range(x_row.size):
            y_row[c] = (x_row[c] - shift) * scale * weight[c] + bias[c]


@parallel_jit
def layer_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    for chunk in prange(CHUNKS):
        _layer_norm_rows(
            _block(x, chunk), weight, bias, eps, _block(mean, chunk), _block(rstd, chunk), _block(y, chunk)
        )


@jit
def _layer_norm_backward_rows(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, dx: ndarray, sums: ndarray
) -> None:
    """Writes dx, and sums (2, C) = sum of dy, sum of dy z, over the rows."""
    sums[:] = 0
    first, second = sums[0], sums[1]
    for r in range(x.shape[0]):
        dy_row, x_row, dx_row = dy[r], x[r], dx[r]
        shift, scale = mean[r], rstd[r]
        total, total_z = 0.0, 0.0
        for c in range(x_row.size):
            dz = dy_row[c] * weight[c]
            z = (x_row[c] - shift) * scale
            total += dz
            total_z += dz * z
        mean_dz, mean_dz_z = x.dtype.type(total / x_row.size), x.dtype.type(total_z / x_row.size)
        for c in range(x_row.size):
            z = (x_row[c] - shift) * scale
            dx_row[c] = scale * (dy_row[c] * weight[c] - mean_dz - z * mean_dz_z)
            first[c] += dy_row[c]
            second[c] += dy_row[c] * z


@parallel_jit
def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    partial = np.empty((CHUNKS, 2, x.shape[1]))
    for chunk in prange(CHUNKS):
        _layer_norm_backward_rows(
            _block(dy, chunk), _block(x, chunk), weight, _block(mean, chunk), _block(rstd, chunk),
            _block(dx, chunk), partial[chunk],
        )  # fmt: skip
    total = _total(partial)
    for c in range(x.shape[1]):
        dbias[c], dweight[c] = total[0, c], total[1, c]
