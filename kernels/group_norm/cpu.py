"""Group normalisation: image by image, so only the first pass over an image reads it from memory.

For one image, x is P rows of C channels. They are processed as wide rows (kernels/reduce/rows.py), several at once.
Arrays of channels (mean, scale, bias) are repeated to the length of a wide row. Sums are computed for each column of
the wide rows, then for each channel, then for each group.

Images are divided into blocks, which run in parallel. For the gradients of weight and bias, the shape of the scratch
array `partial` (blocks, 2, C) determines the number of blocks. Their float64 sums are added in the order of the blocks.
So results do not depend on the number of threads.

An output may share the memory of an input. So operands are read with `get` and outputs written with `put` (stream.py).
Sums are read without `get`: `put` declares that it does not write what `get` reads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, helper, in_parts, jit

from ..elementwise.stream import get, put
from ..norm.cpu import _limit, _passing, _total, by_partial_sums
from ..reduce.rows import BLOCK_SIZE, MAX_BLOCKS, block_of_rows, narrow, repeat
from .reference import __all__ as __all__

WIDE_ROW = 64  # numbers: fewer than elsewhere, since the arrays of channels are filled again for each image
ROWS = 8  # wide rows whose terms are added before the sums in memory are loaded


@helper
def _blocks(y: ndarray) -> int:
    return max(1, min(MAX_BLOCKS, y.shape[0], y.size // BLOCK_SIZE))


by_images = in_parts(_blocks, block_of_rows)


@helper
def _width(channels: int) -> int:
    """Return the length of a wide row: the largest multiple of `channels` up to WIDE_ROW, at least one pixel."""
    return channels * max(1, WIDE_ROW // channels)


# Passes over one image x (n,): wide rows of `width` numbers, the last of which may be shorter


@helper
def _distance(x: ndarray, origin: ndarray, squared: bool, at: int, i: int) -> Any:
    distance = get(x, at) - get(origin, i)
    return distance * distance if squared else distance


@helper
def _add(x: ndarray, origin: ndarray, squared: bool, sums: ndarray) -> None:
    """Compute sums (width,) = sums of x - origin, or of (x - origin)^2 if `squared`.

    The terms of several wide rows are added in the type of x, and the results in float64.
    """
    width, begin = sums.size, 0
    sums[:] = 0
    while begin + ROWS * width <= x.size:
        for i in range(width):
            total = _distance(x, origin, squared, begin + i, i)
            for row in range(1, ROWS):  # LLVM unrolls this loop, and makes vectors of the loop over i
                total += _distance(x, origin, squared, begin + row * width + i, i)
            put(sums, i, sums[i] + total, False)
        begin += ROWS * width
    while begin < x.size:
        for i in range(min(width, x.size - begin)):
            put(sums, i, sums[i] + _distance(x, origin, squared, begin + i, i), False)
        begin += width


@helper
def _normalize(
    x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, shortcut: ndarray, relu: bool, y: ndarray
) -> None:
    """Compute y = (x - mean) * scale + bias; add the shortcut unless it is empty, then apply relu if `relu`."""
    zero, adds = x.dtype.type(0), shortcut.size > 0
    for begin in range(0, x.size, mean.size):
        for i in range(min(mean.size, x.size - begin)):
            value = (get(x, begin + i) - get(mean, i)) * get(scale, i) + get(bias, i)
            if adds:
                value += get(shortcut, begin + i)
            put(y, begin + i, zero if relu & (value < zero) else value, False)


@helper
def _add_gradients(
    dy: ndarray, x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, relu: bool, sums: ndarray
) -> None:
    """Compute sums (2, width) of dy and dy * (x - mean); with relu, only over positive outputs."""
    first, second = sums[0], sums[1]
    width, begin, limit = first.size, 0, _limit(x, relu)
    sums[:] = 0
    while begin + ROWS * width <= x.size:
        for i in range(width):
            total, distance = _passing(dy, x, mean, scale, bias, limit, begin + i, i)
            total_z = total * distance
            for row in range(1, ROWS):
                gradient, distance = _passing(dy, x, mean, scale, bias, limit, begin + row * width + i, i)
                total += gradient
                total_z += gradient * distance
            put(first, i, first[i] + total, False)
            put(second, i, second[i] + total_z, False)
        begin += ROWS * width
    while begin < x.size:
        for i in range(min(width, x.size - begin)):
            gradient, distance = _passing(dy, x, mean, scale, bias, limit, begin + i, i)
            put(first, i, first[i] + gradient, False)
            put(second, i, second[i] + gradient * distance, False)
        begin += width


@helper
def _input_gradient(
    dy: ndarray, x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, relu: bool, slope: ndarray,
    constant: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    """Compute dx = scale * dy + slope * (x - mean) + constant; with relu, dy is 0 where the output was not positive."""
    limit = _limit(x, relu)
    for begin in range(0, x.size, mean.size):
        for i in range(min(mean.size, x.size - begin)):
            gradient, distance = _passing(dy, x, mean, scale, bias, limit, begin + i, i)
            put(dx, begin + i, get(scale, i) * gradient + (get(slope, i) * distance + get(constant, i)), False)


# From the columns of wide rows to groups, and back


@helper
def _group_sums(sums: ndarray, of_channels: ndarray, of_groups: ndarray) -> None:
    """Compute the sums of channels (C,) and of groups (G,) from the sums of columns (width,)."""
    narrow(sums, of_channels)
    size = of_channels.size // of_groups.size
    for g in range(of_groups.size):
        total = 0.0
        for c in range(g * size, (g + 1) * size):
            total += of_channels[c]
        of_groups[g] = total


@helper
def _spread(of_groups: ndarray, channels: int, values: ndarray) -> None:
    """Set the columns of each channel in values (width,) to the number of the channel's group; of_groups (G,)."""
    size = channels // of_groups.size
    for g in range(of_groups.size):
        for c in range(g * size, (g + 1) * size):
            values[c] = of_groups[g]
    for start in range(channels, values.size, channels):
        for c in range(channels):
            values[start + c] = values[c]


@by_images
def group_norm(
    x: Part, weight: ndarray, bias: ndarray, eps: float, shortcut: Part, relu: bool, mean: Part, rstd: Part, y: Part
) -> None:
    pixels, channels, groups = x.shape[1], x.shape[2], mean.shape[1]
    count, width = pixels * channels // groups, _width(channels)
    weight, bias = repeat(weight, width), repeat(bias, width)
    means, scales, sums = np.empty_like(weight), np.empty_like(weight), np.empty(width)
    of_channels, of_groups = np.empty(channels), np.empty(groups)
    for n in range(x.shape[0] if pixels else 0):
        image, result = x[n].reshape(-1), y[n].reshape(-1)
        added = shortcut[n].reshape(-1) if shortcut.size else image[:0]
        # The first pass measures distances from a number of each group: the mean of equal numbers is exact.
        # The second pass measures them from the mean: no digits cancel in the variance.
        for g in range(groups):
            mean[n, g] = image[g * (channels // groups)]
        _spread(mean[n], channels, means)
        _add(image, means, False, sums)
        _group_sums(sums, of_channels, of_groups)
        for g in range(groups):
            mean[n, g] += of_groups[g] / count
        _spread(mean[n], channels, means)
        _add(image, means, True, sums)
        _group_sums(sums, of_channels, of_groups)
        for g in range(groups):
            rstd[n, g] = 1 / math.sqrt(of_groups[g] / count + eps)
        _spread(rstd[n], channels, scales)
        for i in range(width):
            scales[i] *= weight[i]
        _normalize(image, means, scales, bias, added, relu, result)


@by_partial_sums
def _group_norm_backward(
    dy: Part, x: Part, weight: ndarray, bias: ndarray, mean: Part, rstd: Part, relu: bool, dx: Part, partial: Part
) -> None:
    """Compute dx and partial[0] (2, C) = the sums of dy and dy * z over the images, with z = (x - mean) * rstd."""
    pixels, channels, groups = x.shape[1], x.shape[2], mean.shape[1]
    size, width = channels // groups, _width(channels)
    weight, bias = repeat(weight, width), repeat(bias, width)
    means, scales, slopes, constants = weight.copy(), weight.copy(), weight.copy(), weight.copy()
    sums, first, second = np.empty((2, width)), np.empty(channels), np.empty(channels)
    group_slopes, group_constants = np.empty(groups, x.dtype), np.empty(groups, x.dtype)
    partial[:] = 0
    for n in range(x.shape[0] if pixels else 0):
        dy_image, image, result = dy[n].reshape(-1), x[n].reshape(-1), dx[n].reshape(-1)
        _spread(mean[n], channels, means)
        _spread(rstd[n], channels, scales)
        for i in range(width):
            scales[i] *= weight[i]
        _add_gradients(dy_image, image, means, scales, bias, relu, sums)
        narrow(sums[0], first)
        narrow(sums[1], second)
        for g in range(groups):
            # The sums of s and s * z over the group, with s = scale * dy. This is the product that dx adds them to,
            # with the same rounding: dx is a small difference if the group has few numbers.
            factor, total, total_z = np.float64(rstd[n, g]), 0.0, 0.0
            for c in range(g * size, (g + 1) * size):
                second[c] *= factor
                total += first[c] * scales[c]
                total_z += second[c] * scales[c]
            group_slopes[g] = -factor * total_z / (pixels * size)
            group_constants[g] = -total / (pixels * size)
        for c in range(channels):
            partial[0, 0, c] += first[c]
            partial[0, 1, c] += second[c]
        _spread(group_slopes, channels, slopes)
        _spread(group_constants, channels, constants)
        _input_gradient(dy_image, image, means, scales, bias, relu, slopes, constants, result)


@jit
def group_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    # For each channel, dx = scale * dy + slope * (x - mean) + constant: linear in dy and x, as in batch norm.
    _group_norm_backward(dy, x, weight, bias, mean, rstd, relu, dx, partial)
    total = _total(partial)
    for c in range(x.shape[2]):
        dbias[c], dweight[c] = total[0, c], total[1, c]
