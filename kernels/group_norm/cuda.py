"""Group normalisation on a GPU: a block for one or several groups of an image.

Small groups of 1, 2, 4, 8 or 16 channels share a block, which has a strip of 16 channels: so all threads read 16 bytes
of different numbers, and the four columns of a thread stay the same. A group of another size has a block to itself.
x is read for the moments and for the output. Shared memory keeps the first numbers, so a small image is read once
(reduce/cuda_rows.py). As in batch norm, distances are measured from a number of the group, and sums are in float64.
"""

from __future__ import annotations

import math

from numba import float64, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, load4, put, store4

from ..elementwise.quads import QUAD
from ..norm.cuda_gradients import blocked, gradient_sums, per_group, total_gradients
from ..reduce.block_sum import THREADS, block_sum
from ..reduce.cuda_matrix import STRIP, STRIP_SUMS, load_part, store_part, strip_sum, wide
from ..reduce.cuda_rows import CACHED
from .reference import __all__ as __all__

COLUMNS = 2 * STRIP  # sums of the columns of a strip, and of their groups


@device
def _sum_of_one(values: ndarray, c: int, size: int, sums: ndarray, columns: ndarray) -> None:
    """Replace the four values of each thread by the sum over the block, which has one group."""
    total = block_sum((values[0] + values[1]) + (values[2] + values[3]), sums)
    for j in range(QUAD):
        values[j] = total


@device
def _sum_of_several(values: ndarray, c: int, size: int, sums: ndarray, columns: ndarray) -> None:
    """Replace the values of the columns c to c + 3 by the sums over their groups, which have `size` columns each."""
    total, thread = strip_sum(values, sums), int32(cuda.threadIdx.x)
    if thread < STRIP:
        columns[thread] = total
    cuda.syncthreads()
    if thread < STRIP:
        begin = int32(thread // size * size)
        total = columns[begin]
        for k in range(1, size):
            total += columns[begin + k]
        columns[STRIP + thread] = total
    cuda.syncthreads()
    for j in range(QUAD):
        values[j] = columns[STRIP + c + j]


def _forward(several: bool) -> Kernel:
    group_sum = _sum_of_several if several else _sum_of_one

    def group_norm(
        x: ndarray, weight: ndarray, bias: ndarray, eps: float, shortcut: ndarray, relu: bool, pixels: int,
        channels: int, size: int, share: float, width: int, wide: bool, mean: ndarray, rstd: ndarray, y: ndarray,
    ) -> None:  # fmt: skip
        """width: channels of the block, one or several groups of `size` channels. share: 1 / (pixels * size)"""
        sums, columns = cuda.shared.array(STRIP_SUMS, float64), cuda.shared.array(COLUMNS, float64)
        cache, number = cuda.shared.array(CACHED, x.dtype, 16), x.dtype.type
        bundles = int32(channels // width)
        image, c0 = int32(cuda.blockIdx.x) // bundles, int32(int32(cuda.blockIdx.x) % bundles * width)
        begin, thread = int32(image * pixels * channels + c0), int32(cuda.threadIdx.x)
        across = int32((width + QUAD - 1) // QUAD)
        own = int32(thread % across * QUAD)  # the first column, if the block has several groups
        v, o = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        w, b = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        origin, m, s = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        first, second = cuda.local.array(QUAD, float64), cuda.local.array(QUAD, float64)
        for j in range(QUAD):
            first[j], second[j] = 0, 0
            origin[j] = get(x, int32(begin + (own + j) // size * size)) if own + j < width else 0
        for i in range(thread, pixels * across, THREADS):
            c = int32(i % across * QUAD)
            at, count = int32(begin + i // across * channels + c), int32(width - c)
            load_part(x, at, count, wide, v)
            if i * QUAD < CACHED:
                store4(cache, i * QUAD, (v[0], v[1], v[2], v[3]))
            for j in range(QUAD):
                distance = float64(v[j]) - float64(origin[j if several else 0])
                if j < count:
                    first[j] += distance
                    second[j] += distance * distance
        group_sum(first, own, size, sums, columns)
        group_sum(second, own, size, sums, columns)
        for j in range(QUAD):
            distance = first[j] * share
            variance = max(second[j] * share - distance * distance, 0.0)  # rounding may make it negative
            m[j] = number(float64(origin[j if several else 0]) + distance)
            s[j] = number(1 / math.sqrt(variance + eps))
            if thread < across and (own + j) % size == 0 and own + j < width:
                group = int32(image * (channels // size) + (c0 + own + j) // size)
                put(mean, group, m[j])
                put(rstd, group, s[j])
        for i in range(thread, pixels * across, THREADS):
            c = int32(i % across * QUAD)
            at, count = int32(begin + i // across * channels + c), int32(width - c)
            if i * QUAD < CACHED:
                v[0], v[1], v[2], v[3] = load4(cache, i * QUAD)
            else:
                load_part(x, at, count, wide, v)
            load_part(weight, c0 + c, count, wide, w)
            load_part(bias, c0 + c, count, wide, b)
            for j in range(QUAD):
                v[j] = (v[j] - m[j]) * (s[j] * w[j]) + b[j]
            if shortcut.size > 0:
                load_part(shortcut, at, count, wide, o)
                for j in range(QUAD):
                    v[j] += o[j]
            for j in range(QUAD):
                v[j] = number(0) if relu and v[j] < 0 else v[j]
            store_part(y, at, count, wide, v)

    return kernel(threads=THREADS)(group_norm)


@device
def _gradients(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, relu: bool, at: int, c: int, count: int, wide: bool,
    m: ndarray, s: ndarray, d: ndarray, v: ndarray,
) -> None:  # fmt: skip
    """d, v = dz and z of the quad at `at`, whose channels begin at c; m, s = mean and rstd"""
    w, b = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load_part(dy, at, count, wide, d)
    load_part(x, at, count, wide, v)
    load_part(weight, c, count, wide, w)
    load_part(bias, c, count, wide, b)
    for j in range(QUAD):
        v[j] -= m[j]
        d[j] = x.dtype.type(0) if blocked(v[j], s[j] * w[j], b[j], relu) else d[j] * w[j]
        v[j] *= s[j]


def _input_gradient(several: bool) -> Kernel:
    group_sum = _sum_of_several if several else _sum_of_one

    def input_gradient(
        dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
        pixels: int, channels: int, size: int, share: float, width: int, wide: bool, dx: ndarray,
    ) -> None:  # fmt: skip
        """dx = rstd * (dz - mean(dz) - z * mean(dz * z)), with dz = dy * weight"""
        sums, columns = cuda.shared.array(STRIP_SUMS, float64), cuda.shared.array(COLUMNS, float64)
        dz_cache, z_cache = cuda.shared.array(CACHED, x.dtype, 16), cuda.shared.array(CACHED, x.dtype, 16)
        width = int32(STRIP) if several else width  # a constant saves registers
        bundles, number = int32(channels // width), x.dtype.type
        image, c0 = int32(cuda.blockIdx.x) // bundles, int32(int32(cuda.blockIdx.x) % bundles * width)
        begin, thread = int32(image * pixels * channels + c0), int32(cuda.threadIdx.x)
        across = int32((width + QUAD - 1) // QUAD)
        own = int32(thread % across * QUAD)
        d, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        m, s = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        first, second = cuda.local.array(QUAD, float64), cuda.local.array(QUAD, float64)
        for j in range(QUAD):
            first[j], second[j] = 0, 0
            group = int32(image * (channels // size) + (c0 + (own + j if several else 0)) // size)
            m[j], s[j] = get(mean, group), get(rstd, group)
        for i in range(thread, pixels * across, THREADS):
            c = int32(i % across * QUAD)
            at, count = int32(begin + i // across * channels + c), int32(width - c)
            _gradients(dy, x, weight, bias, relu, at, c0 + c, count, wide, m, s, d, v)
            for j in range(QUAD):
                first[j] += d[j]
                second[j] += float64(d[j]) * float64(v[j])
            if i * QUAD < CACHED:
                store4(dz_cache, i * QUAD, (d[0], d[1], d[2], d[3]))
                store4(z_cache, i * QUAD, (v[0], v[1], v[2], v[3]))
        group_sum(first, own, size, sums, columns)
        group_sum(second, own, size, sums, columns)
        for j in range(QUAD):
            first[j] *= share
            second[j] *= share
        for i in range(thread, pixels * across, THREADS):
            c = int32(i % across * QUAD)
            at, count = int32(begin + i // across * channels + c), int32(width - c)
            if i * QUAD < CACHED:
                d[0], d[1], d[2], d[3] = load4(dz_cache, i * QUAD)
                v[0], v[1], v[2], v[3] = load4(z_cache, i * QUAD)
            else:
                _gradients(dy, x, weight, bias, relu, at, c0 + c, count, wide, m, s, d, v)
            for j in range(QUAD):
                d[j] = s[j] * (d[j] - number(first[j]) - v[j] * number(second[j]))
            store_part(dx, at, count, wide, d)

    return kernel(threads=THREADS)(input_gradient)


_one_group, _several_groups = _forward(False), _forward(True)
_one_gradient, _several_gradients = _input_gradient(False), _input_gradient(True)
_sums = gradient_sums(per_group)


def _width(channels: int, groups: int) -> int:
    """Return the number of channels of a block: a strip if groups fit into it exactly, else those of a group."""
    size = channels // groups
    return STRIP if STRIP % size == 0 and channels % STRIP == 0 else size


def group_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, shortcut: ndarray, relu: bool,
    mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    (images, pixels, channels), groups = x.shape, mean.shape[1]
    width = _width(channels, groups)
    launch(
        _several_groups if width == STRIP else _one_group, images * channels // width, x, weight, bias, eps, shortcut,
        relu, pixels, channels, channels // groups, groups / max(1, pixels * channels), width,
        wide(width, x, weight, bias, shortcut, y), mean, rstd, y,
    )  # fmt: skip


def group_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    (images, pixels, channels), groups = x.shape, mean.shape[1]
    rows, width = (images * pixels, channels), _width(channels, groups)
    _sums(dy.reshape(rows), x.reshape(rows), mean, rstd, weight, bias, relu, partial, pixels, groups)
    total_gradients(partial, dweight, dbias)  # before the next kernel: dx may overwrite dy
    launch(
        _several_gradients if width == STRIP else _one_gradient, images * channels // width, dy, x, weight, bias,
        mean, rstd, relu, pixels, channels, channels // groups, groups / max(1, pixels * channels), width,
        wide(width, dy, x, weight, bias, dx), dx,
    )  # fmt: skip
