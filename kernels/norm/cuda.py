"""Batch normalisation on a GPU, and the affine map of each channel. Layer norm is in cuda_layer.py.

Batch norm takes three kernels, forward and backward. The first sums strips of channels over parts of the rows
(reduce/cuda_matrix.py). The second adds the parts: a block for 32 channels. In the third, each thread computes four
neighbouring numbers of the output. As on the CPU, one pass computes both moments, from the distances to the first row.

Sums are in float64, and their order depends only on the shapes.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..elementwise.quads import QUAD
from ..reduce.block_sum import THREADS, WARP
from ..reduce.cuda_matrix import (
    HEIGHT,
    PART_SUMS,
    STRIP,
    STRIP_SUMS,
    load_part,
    part_of,
    parts_sum,
    place,
    store_part,
    strip_sum,
    strips,
    wide,
)
from .cuda_gradients import blocked, constant, gradient_sums, per_channel, total_gradients
from .cuda_layer import layer_norm as layer_norm
from .cuda_layer import layer_norm_backward as layer_norm_backward
from .reference import __all__ as __all__


def parts(rows: int, channels: int) -> int:
    """Return the number of blocks of rows in batch norm's `partial` (blocks, 2, C): about two for each SM."""
    return max(1, min(256, rows // 64, 2 * rows * channels // 8192))


def _quads(rows: int, channels: int) -> int:
    """Return the number of blocks that have a thread for each quad of the rows."""
    return -(-rows * -(-channels // QUAD) // THREADS)


# Batch normalisation, and the affine map of each channel


@kernel(threads=THREADS)
def _moments(x: ndarray, rows: int, channels: int, parts: int, strips: int, wide: bool, partial: ndarray) -> None:
    """partial (parts, 2, C) = the sums of x - x[0] and of (x - x[0])^2 over a part of the rows, for a strip"""
    shared = cuda.shared.array(STRIP_SUMS, float64)
    strip, part = int32(cuda.blockIdx.x) % strips, int32(cuda.blockIdx.x) // strips
    begin, end = part_of(rows, part, parts)
    row, column = place()
    c = int32(strip * STRIP + column)
    v, origin = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    first, second = cuda.local.array(QUAD, float64), cuda.local.array(QUAD, float64)
    for j in range(QUAD):
        first[j], second[j], v[j], origin[j] = 0, 0, 0, 0
    load_part(x, c, channels - c, wide, origin)
    for r in range(begin + row, end, HEIGHT):
        load_part(x, int32(r * channels + c), channels - c, wide, v)
        for j in range(QUAD):
            distance = float64(v[j]) - float64(origin[j])
            first[j] += distance
            second[j] += distance * distance
    total, total_square = strip_sum(first, shared), strip_sum(second, shared)
    i = int32(strip * STRIP + cuda.threadIdx.x)
    if cuda.threadIdx.x < STRIP and i < channels:
        put(partial, int32(2 * part * channels + i), total)
        put(partial, int32((2 * part + 1) * channels + i), total_square)


@kernel(threads=THREADS)
def _statistics(
    partial: ndarray, parts: int, x: ndarray, rows: int, channels: int, eps: float, momentum: float,
    running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray,
) -> None:  # fmt: skip
    sums, number = cuda.shared.array(PART_SUMS, float64), x.dtype.type
    c = int32(cuda.blockIdx.x * WARP + cuda.threadIdx.x % WARP)
    first = parts_sum(partial, c, 2 * channels, parts, sums)
    second = parts_sum(partial, int32(channels + c), 2 * channels, parts, sums)
    if cuda.threadIdx.x < WARP and c < channels:
        distance = first / rows
        variance = max(second / rows - distance * distance, 0.0)  # rounding may make it negative
        unbiased = variance * rows / max(rows - 1, 1)
        put(mean, c, number(float64(get(x, c)) + distance))
        put(rstd, c, number(1 / math.sqrt(variance + eps)))
        put(running_mean, c, number((1 - momentum) * get(running_mean, c) + momentum * get(mean, c)))
        put(running_var, c, number((1 - momentum) * get(running_var, c) + momentum * unbiased))


def _normalize(statistics: Any) -> Kernel:
    def normalize(
        x: ndarray, mean: ndarray, rstd: ndarray, weight: ndarray, bias: ndarray, shortcut: ndarray, relu: bool,
        rows: int, channels: int, wide: bool, y: ndarray,
    ) -> None:  # fmt: skip
        """y = (x - mean) * (rstd * weight) + bias [+ shortcut] [relu]: a thread for each quad"""
        item, across = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32((channels + QUAD - 1) // QUAD)
        r, c = item // across, int32(item % across * QUAD)
        if r >= rows:
            return
        at, count, zero = int32(r * channels + c), int32(channels - c), x.dtype.type(0)
        v, o = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        m, s = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        w, b = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        load_part(x, at, count, wide, v)
        statistics(mean, rstd, r, c, channels, 1, 1, wide, m, s)
        load_part(weight, c, count, wide, w)
        load_part(bias, c, count, wide, b)
        for j in range(QUAD):
            v[j] = (v[j] - m[j]) * (s[j] * w[j]) + b[j]
        if shortcut.size > 0:
            load_part(shortcut, at, count, wide, o)
            for j in range(QUAD):
                v[j] += o[j]
        for j in range(QUAD):
            v[j] = zero if relu and v[j] < zero else v[j]
        store_part(y, at, count, wide, v)

    return kernel(threads=THREADS)(normalize)


_normalize_batch, _apply_map = _normalize(per_channel), _normalize(constant)


def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    running_mean: ndarray, running_var: ndarray, partial: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    (rows, channels), parts, across = x.shape, partial.shape[0], strips(x.shape[1])
    launch(_moments, parts * across, x, rows, channels, parts, across, wide(channels, x), partial)
    launch(
        _statistics, -(-channels // WARP), partial, parts, x, rows, channels, eps, momentum,
        running_mean, running_var, mean, rstd,
    )  # fmt: skip
    launch(
        _normalize_batch, _quads(rows, channels), x, mean, rstd, weight, bias, shortcut, relu, rows, channels,
        wide(channels, x, mean, rstd, weight, bias, shortcut, y), y,
    )  # fmt: skip


def _input_gradient(statistics: Any) -> Kernel:
    def input_gradient(
        dy: ndarray, x: ndarray, mean: ndarray, rstd: ndarray, weight: ndarray, bias: ndarray, relu: bool,
        dweight: ndarray, dbias: ndarray, rows: int, channels: int, inverse: float, wide: bool, dx: ndarray,
    ) -> None:  # fmt: skip
        """dx = weight * rstd * (dy - dbias / rows - z * dweight / rows), for an affine map weight * dy"""
        item, across = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32((channels + QUAD - 1) // QUAD)
        r, c = item // across, int32(item % across * QUAD)
        if r >= rows:
            return
        at, count = int32(r * channels + c), int32(channels - c)
        d, v = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        m, s = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        w, b = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        load_part(dy, at, count, wide, d)
        load_part(x, at, count, wide, v)
        statistics(mean, rstd, r, c, channels, 1, 1, wide, m, s)
        load_part(weight, c, count, wide, w)
        load_part(bias, c, count, wide, b)
        for j in range(QUAD):
            v[j] -= m[j]
            m[j] = s[j] * w[j]
            d[j] = x.dtype.type(0) if blocked(v[j], m[j], b[j], relu) else d[j]
        if statistics is per_channel:
            load_part(dweight, c, count, wide, w)
            load_part(dbias, c, count, wide, b)
            for j in range(QUAD):
                d[j] -= inverse * (b[j] + v[j] * s[j] * w[j])
        for j in range(QUAD):
            d[j] *= m[j]
        store_part(dx, at, count, wide, d)

    return kernel(threads=THREADS)(input_gradient)


_batch_gradient, _map_gradient = _input_gradient(per_channel), _input_gradient(constant)
_batch_sums, _map_sums = gradient_sums(per_channel), gradient_sums(constant)


def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    rows, channels = x.shape
    _batch_sums(dy, x, mean, rstd, weight, bias, relu, partial)
    total_gradients(partial, dweight, dbias)
    launch(
        _batch_gradient, _quads(rows, channels), dy, x, mean, rstd, weight, bias, relu, dweight, dbias, rows, channels,
        x.dtype.type(1 / rows), wide(channels, dy, x, mean, rstd, weight, bias, dweight, dbias, dx), dx,
    )  # fmt: skip


def affine(x: ndarray, scale: ndarray, shift: ndarray, relu: bool, y: ndarray) -> None:
    rows, channels = x.shape
    launch(
        _apply_map, _quads(rows, channels), x, scale, scale, scale, shift, x[:0], relu, rows, channels,
        wide(channels, x, scale, shift, y), y,
    )  # fmt: skip


def affine_backward(
    dy: ndarray, x: ndarray, scale: ndarray, shift: ndarray, relu: bool, partial: ndarray,
    dx: ndarray, dscale: ndarray, dshift: ndarray,
) -> None:  # fmt: skip
    rows, channels = x.shape
    _map_sums(dy, x, scale, scale, scale, shift, relu, partial)
    total_gradients(partial, dscale, dshift)
    launch(
        _map_gradient, _quads(rows, channels), dy, x, scale, scale, scale, shift, relu, scale, scale, rows, channels,
        x.dtype.type(0), wide(channels, dy, x, scale, shift, dx), dx,
    )  # fmt: skip


@kernel(threads=THREADS)
def _fold(
    weight: ndarray, bias: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    scale: ndarray, shift: ndarray,
) -> None:  # fmt: skip
    c, number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), scale.dtype.type
    if c < scale.size:
        put(scale, c, number(get(weight, c) / math.sqrt(get(running_var, c) + eps)))
        put(shift, c, number(get(bias, c) - float64(get(running_mean, c)) * get(scale, c)))


def fold(
    weight: ndarray, bias: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    scale: ndarray, shift: ndarray,
) -> None:  # fmt: skip
    launch(_fold, -(-scale.size // THREADS), weight, bias, eps, running_mean, running_var, scale, shift)


@kernel(threads=THREADS)
def _fold_backward(
    dscale: ndarray, dshift: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    c, number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), dbias.dtype.type
    if c < dweight.size:
        difference = get(dscale, c) - get(running_mean, c) * get(dshift, c)
        put(dweight, c, number(difference / math.sqrt(get(running_var, c) + eps)))
        put(dbias, c, number(get(dshift, c)))


def fold_backward(
    dscale: ndarray, dshift: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    launch(_fold_backward, -(-dweight.size // THREADS), dscale, dshift, eps, running_mean, running_var, dweight, dbias)
