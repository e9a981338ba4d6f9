"""Layer normalisation on a GPU: a warp for each short row, a block for each long one (reduce/cuda_rows.py).

The backward pass reads x and dy twice: by strips of channels for dweight and dbias, and by rows for dx. Sums are in
float64, and their order depends only on the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda
from minidl.engine.cuda_memory import get, put

from ..elementwise.quads import QUAD
from ..reduce.block_sum import WARPS
from ..reduce.cuda_matrix import load_part, store_part, wide
from ..reduce.cuda_rows import CACHED, Row, row_kernels
from .cuda_gradients import gradient_sums, per_group, total_gradients


def _layer_norm(row: Row) -> Callable[..., None]:
    position, total, keep, again, step = row.position, row.total, row.keep, row.again, row.threads * QUAD

    def layer_norm(
        x: ndarray, weight: ndarray, bias: ndarray, eps: float, rows: int, channels: int, wide: bool,
        mean: ndarray, rstd: ndarray, y: ndarray,
    ) -> None:  # fmt: skip
        sums, cache = cuda.shared.array(WARPS, float64), cuda.shared.array(CACHED, x.dtype, 16)
        r, first, base = position()
        if r >= rows:
            return
        begin, number = int32(r * channels), x.dtype.type
        v, w, b = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        result = float64(0)
        for c in range(first, channels, step):
            load_part(x, begin + c, channels - c, wide, v)
            keep(cache, base, c, v)
            for j in range(QUAD):
                result += v[j]
        center = total(result, sums) / channels
        result = float64(0)
        for c in range(first, channels, step):
            again(cache, base, x, begin + c, c, channels - c, wide, v)
            for j in range(QUAD):
                distance = float64(v[j]) - center
                result += distance * distance if c + j < channels else 0.0
        shift, scale = number(center), number(1 / math.sqrt(total(result, sums) / channels + eps))
        for c in range(first, channels, step):
            again(cache, base, x, begin + c, c, channels - c, wide, v)
            load_part(weight, c, channels - c, wide, w)
            load_part(bias, c, channels - c, wide, b)
            for j in range(QUAD):
                v[j] = (v[j] - shift) * scale * w[j] + b[j]
            store_part(y, begin + c, channels - c, wide, v)
        if first == 0:
            put(mean, r, shift)
            put(rstd, r, scale)

    return layer_norm


_layer_norms = row_kernels(_layer_norm)


def layer_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, mean: ndarray, rstd: ndarray, y: ndarray
) -> None:
    rows, channels = x.shape
    aligned = wide(channels, x, weight, bias, y)
    _layer_norms(rows, channels, x, weight, bias, eps, rows, channels, aligned, mean, rstd, y)


def _layer_gradient(row: Row) -> Callable[..., None]:
    position, total, keep, again, step = row.position, row.total, row.keep, row.again, row.threads * QUAD

    def layer_gradient(
        dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, rows: int, channels: int, wide: bool,
        dx: ndarray,
    ) -> None:  # fmt: skip
        """dx = rstd * (dz - mean(dz) - z * mean(dz * z)), with dz = dy * weight."""
        sums = cuda.shared.array(WARPS, float64)
        dy_cache, x_cache = cuda.shared.array(CACHED, x.dtype, 16), cuda.shared.array(CACHED, x.dtype, 16)
        r, first, base = position()
        if r >= rows:
            return
        begin, number = int32(r * channels), x.dtype.type
        d, v, w = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        shift, scale = get(mean, r), get(rstd, r)
        result, result_z = float64(0), float64(0)
        for c in range(first, channels, step):
            load_part(dy, begin + c, channels - c, wide, d)
            load_part(x, begin + c, channels - c, wide, v)
            load_part(weight, c, channels - c, wide, w)
            keep(dy_cache, base, c, d)
            keep(x_cache, base, c, v)
            for j in range(QUAD):
                dz = d[j] * w[j]
                result += dz
                result_z += float64(dz) * float64((v[j] - shift) * scale)
        mean_dz, mean_dz_z = number(total(result, sums) / channels), number(total(result_z, sums) / channels)
        for c in range(first, channels, step):
            again(dy_cache, base, dy, begin + c, c, channels - c, wide, d)
            again(x_cache, base, x, begin + c, c, channels - c, wide, v)
            load_part(weight, c, channels - c, wide, w)
            for j in range(QUAD):
                d[j] = scale * (d[j] * w[j] - mean_dz - (v[j] - shift) * scale * mean_dz_z)
            store_part(dx, begin + c, channels - c, wide, d)

    return layer_gradient


_layer_sums = gradient_sums(per_group)
_layer_gradients = row_kernels(_layer_gradient)


def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, partial: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    rows, channels = x.shape
    _layer_sums(dy, x, mean, rstd, weight, weight, False, partial)  # first: dx may overwrite dy
    total_gradients(partial, dweight, dbias)
    aligned = wide(channels, dy, x, weight, dx)
    _layer_gradients(rows, channels, dy, x, weight, mean, rstd, rows, channels, aligned, dx)
