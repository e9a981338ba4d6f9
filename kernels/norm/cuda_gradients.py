"""The sums over rows of all backward passes of norms: of dy and of dy * z, for each channel, z = (x - mean) * rstd.

A block has a strip of channels and a part of the rows (reduce/cuda_matrix.py). With relu, dy counts as 0 where the
output (x - mean) * (rstd * weight) + bias is not above 0.

There is a kernel for each way in which mean and rstd belong to the numbers of x (rows, C):

- per_channel: mean, rstd (C,), as in batch norm
- per_group: `pixels` successive rows are an image; mean, rstd (images, groups); layer norm has one group, and one pixel
- constant: mean 0 and rstd 1; an affine map
"""

from __future__ import annotations

from typing import Any

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
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
    strip_sum,
    strips,
    wide,
)


@device
def per_channel(
    mean: ndarray, rstd: ndarray, row: int, c: int, channels: int, pixels: int, groups: int, wide: bool,
    m: ndarray, s: ndarray,
) -> None:  # fmt: skip
    """m, s = mean and rstd of the channels c to c + 3"""
    load_part(mean, c, channels - c, wide, m)
    load_part(rstd, c, channels - c, wide, s)


@device
def per_group(
    mean: ndarray, rstd: ndarray, row: int, c: int, channels: int, pixels: int, groups: int, wide: bool,
    m: ndarray, s: ndarray,
) -> None:  # fmt: skip
    for j in range(QUAD):
        if c + j < channels:
            i = int32(row // pixels * groups + (c + j) // (channels // groups))
            m[j], s[j] = get(mean, i), get(rstd, i)


@device
def constant(
    mean: ndarray, rstd: ndarray, row: int, c: int, channels: int, pixels: int, groups: int, wide: bool,
    m: ndarray, s: ndarray,
) -> None:  # fmt: skip
    for j in range(QUAD):
        m[j], s[j] = 0, 1


@device
def blocked(distance: float, scale: float, bias: float, relu: bool) -> bool:
    """Return whether a relu blocks the gradient: whether the output is not above 0. distance: x - mean."""
    return relu and distance * scale + bias <= 0


def gradient_sums(statistics: Any) -> Any:
    """Return the function that launches the kernel. statistics: per_channel, per_group or constant."""

    @kernel(threads=THREADS)
    def sums(
        dy: ndarray, x: ndarray, mean: ndarray, rstd: ndarray, weight: ndarray, bias: ndarray, relu: bool, rows: int,
        channels: int, pixels: int, groups: int, parts: int, strips: int, wide: bool, partial: ndarray,
    ) -> None:  # fmt: skip
        """partial (parts, 2, C) = the sums of dy and dy * z over a part of the rows"""
        shared = cuda.shared.array(STRIP_SUMS, float64)
        strip, part = int32(cuda.blockIdx.x) % strips, int32(cuda.blockIdx.x) // strips
        begin, end = part_of(rows, part, parts)
        row, column = place()
        c = int32(strip * STRIP + column)
        count = int32(channels - c)
        d, v = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        m, s = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        w, b = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
        first, second = cuda.local.array(QUAD, float64), cuda.local.array(QUAD, float64)
        for j in range(QUAD):
            first[j], second[j], d[j], v[j], m[j], s[j], w[j], b[j] = 0, 0, 0, 0, 0, 0, 0, 0
        load_part(weight, c, count, wide, w)
        load_part(bias, c, count, wide, b)
        for r in range(begin + row, end, HEIGHT):
            at = int32(r * channels + c)
            load_part(dy, at, count, wide, d)
            load_part(x, at, count, wide, v)
            statistics(mean, rstd, int32(r), c, channels, pixels, groups, wide, m, s)
            for j in range(QUAD):
                gradient = float64(0 if blocked(v[j] - m[j], s[j] * w[j], b[j], relu) else d[j])
                first[j] += gradient
                second[j] += gradient * float64((v[j] - m[j]) * s[j])
        total, total_z = strip_sum(first, shared), strip_sum(second, shared)
        i = int32(strip * STRIP + cuda.threadIdx.x)
        if cuda.threadIdx.x < STRIP and i < channels:
            put(partial, int32(2 * part * channels + i), total)
            put(partial, int32((2 * part + 1) * channels + i), total_z)

    def run(
        dy: ndarray, x: ndarray, mean: ndarray, rstd: ndarray, weight: ndarray, bias: ndarray, relu: bool,
        partial: ndarray, pixels: int = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        """dy, x (rows, C); partial (parts, 2, C)"""
        (rows, channels), parts = x.shape, partial.shape[0]
        vectors = (dy, x, weight, bias) + ((mean, rstd) if statistics is per_channel else ())
        launch(
            sums, parts * strips(channels), dy, x, mean, rstd, weight, bias, relu, rows, channels, pixels, groups,
            parts, strips(channels), wide(channels, *vectors), partial,
        )  # fmt: skip

    return run


@kernel(threads=THREADS)
def _total(partial: ndarray, parts: int, channels: int, dweight: ndarray, dbias: ndarray) -> None:
    """dbias, dweight = the sums over the parts of partial (parts, 2, C)"""
    sums = cuda.shared.array(PART_SUMS, float64)
    c = int32(cuda.blockIdx.x * WARP + cuda.threadIdx.x % WARP)
    first = parts_sum(partial, c, 2 * channels, parts, sums)
    second = parts_sum(partial, int32(channels + c), 2 * channels, parts, sums)
    if cuda.threadIdx.x < WARP and c < channels:
        put(dbias, c, dbias.dtype.type(first))
        put(dweight, c, dweight.dtype.type(second))


def total_gradients(partial: ndarray, dweight: ndarray, dbias: ndarray) -> None:
    parts, _, channels = partial.shape
    launch(_total, -(-channels // WARP), partial, parts, channels, dweight, dbias)
