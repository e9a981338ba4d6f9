"""The steps of the ladder in README.md as code: y (N, H, W, O) for a 3 x 3 kernel with padding 1 and stride 1."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit
from minidl.kernels.matmul import cpu as matmul

from . import cpu

ONE = (1, 1)


@jit
def naive(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Compute one output after the other, with the products in the order of the definition."""
    for n, i, j, o in np.ndindex(y.shape):
        total = y.dtype.type(0)
        for u in range(3):
            for v in range(3):
                if 0 <= i + u - 1 < x.shape[1] and 0 <= j + v - 1 < x.shape[2]:
                    for c in range(x.shape[3]):
                        total += x[n, i + u - 1, j + v - 1, c] * weight[u, v, c, o]
        y[n, i, j, o] = total


@jit
def _add_scaled(number: float, row: ndarray, total: ndarray) -> None:
    for o in range(total.size):
        total[o] += number * row[o]


@jit
def channels_inside(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Loop over the output channels innermost: weights and sums are contiguous, so LLVM vectorises this loop."""
    for n, i, j in np.ndindex(y.shape[:3]):
        y[n, i, j] = 0
        for u in range(3):
            for v in range(3):
                if 0 <= i + u - 1 < x.shape[1] and 0 <= j + v - 1 < x.shape[2]:
                    for c in range(x.shape[3]):
                        _add_scaled(x[n, i + u - 1, j + v - 1, c], weight[u, v, c], y[n, i, j])


@jit
def _unroll(x: ndarray, columns: ndarray) -> None:
    """Fill row p of `columns` (N * H * W, 9 * C) with the patch of x (N, H, W, C) that output pixel p reads."""
    images, height, width, channels = x.shape
    for n, i, j in np.ndindex((images, height, width)):
        for u in range(3):
            for v in range(3):
                at = (u * 3 + v) * channels
                row = columns[(n * height + i) * width + j, at : at + channels]
                inside = 0 <= i + u - 1 < height and 0 <= j + v - 1 < width
                for c in range(channels):
                    row[c] = x[n, i + u - 1, j + v - 1, c] if inside else 0


def im2col(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Compute the sum as one matrix product: patches (N * H * W, 9 * C) times weights (9 * C, O)."""
    pixels, depth, outputs = y.shape[0] * y.shape[1] * y.shape[2], 9 * x.shape[3], y.shape[3]
    columns, none = np.empty((pixels, depth), x.dtype), np.empty(0, x.dtype)
    _unroll(x, columns)
    scratch = np.empty(matmul.nn_scratch(pixels, outputs, depth), x.dtype)
    matmul.nn(columns, weight.reshape(depth, outputs), none, False, none, scratch, y.reshape(pixels, outputs))


def direct(x: ndarray, weight: ndarray, y: ndarray) -> None:
    """Call direct.py: the micro-kernel reads the patches from a small copy of x with a halo of zeros, in the cache."""
    options = 1, ONE, ONE, ONE, False
    scratch = np.empty(cpu.forward_scratch(x.shape, weight.shape, *options), x.dtype)
    none = np.empty(0, x.dtype)
    cpu.forward(x, weight, none, none, none, none, False, *options, none, scratch, y)


RUNGS = {
    "naive loops": naive,
    "output channels innermost": channels_inside,
    "im2col and a matrix product": im2col,
    "halo and micro-kernel": direct,
}
