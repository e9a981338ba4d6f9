"""Batch normalisation (two passes over memory) and layer normalisation (one), with the rows divided among threads.

Channels are contiguous, so vector instructions process several of them. Batch norm processes several short rows as one
wide row (kernels/reduce/rows.py), and repeats the arrays of the channels (mean, scale, bias) to the same width.

The rows are divided into blocks. For sums, the shape of the scratch array `partial` (blocks, 2, C) determines the
number of blocks. The array receives the float64 sums of each block. These sums are added in the order of the blocks, so
results do not depend on the number of threads.

The loops prefetch (stream.py): with up to four arrays and float64 sums, a core does not look far enough ahead.

An output may share the memory of an input. So the loops of batch norm that write an output read all operands with `get`
(stream.py), even the repeated means and scales. With a single plain load, LLVM would test whether arrays overlap, and
process overlapping arrays one number at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, in_parts, jit
from minidl.kernels.reduce.rows import narrow, repeat, wide

from ..elementwise.stream import fetch, get, put
from .reference import __all__ as __all__

BLOCK_SIZE = 16384  # if there are several blocks, each has about this many numbers or more
MAX_BLOCKS = 64
AHEAD = 2  # wide rows: at the beginning of a row, the cache lines of the row that follows the next one are requested


@jit
def _blocks(x: ndarray) -> int:
    return max(1, min(MAX_BLOCKS, x.size // BLOCK_SIZE))


@jit
def _partial_sums(partial: ndarray) -> int:
    return partial.shape[0]


@jit
def _block(a: ndarray, k: int, blocks: int) -> ndarray:
    """Return the k-th block of rows."""
    rows = a.shape[0]
    return a[rows * k // blocks : rows * (k + 1) // blocks]


by_blocks = in_parts(_blocks, _block)
by_partial_sums = in_parts(_partial_sums, _block)  # the decorated function receives partial (1, 2, C)


@jit
def _total(partial: ndarray) -> ndarray:
    """Return the sum (2, C) of partial (blocks, 2, C) over the blocks, in order; the sum overwrites the first block."""
    total = partial[0]
    for block in range(1, partial.shape[0]):
        for k in range(2):
            for c in range(total.shape[1]):
                total[k, c] += partial[block, k, c]
    return total


# Batch normalisation


@by_partial_sums
def _moments(x: Part, origin: ndarray, partial: Part) -> None:
    """Compute partial[0] (2, C) = the sums of x - origin and of (x - origin)^2 over the rows."""
    width = wide(x.shape[1])
    origin = repeat(origin, width)
    first, second = np.zeros(width), np.zeros(width)
    numbers = x.reshape(x.size)
    begin = 0
    while begin + 4 * width <= numbers.size:  # four rows together: the sums are loaded and stored a quarter as often
        fetch(numbers, begin + 4 * width, 4 * width)
        four = numbers[begin : begin + 4 * width].reshape(4, width)
        p, q, r, s = four[0], four[1], four[2], four[3]
        for i in range(width):
            o = get(origin, i)
            a, b, c, d = get(p, i) - o, get(q, i) - o, get(r, i) - o, get(s, i) - o
            put(first, i, get(first, i) + ((a + b) + (c + d)), False)
            put(second, i, get(second, i) + ((a * a + b * b) + (c * c + d * d)), False)
        begin += 4 * width
    while begin < numbers.size:
        row = numbers[begin : begin + width]
        for i in range(row.size):
            distance = row[i] - origin[i]
            first[i] += distance
            second[i] += distance * distance
        begin += width
    narrow(first, partial[0, 0])
    narrow(second, partial[0, 1])


@by_blocks
def _normalize(x: Part, mean: ndarray, scale: ndarray, bias: ndarray, shortcut: Part, relu: bool, y: Part) -> None:
    """Compute y = (x - mean) * scale + bias; add the shortcut unless it is empty, then apply relu if `relu`."""
    width = wide(x.shape[1])
    mean, scale, bias = repeat(mean, width), repeat(scale, width), repeat(bias, width)
    zero, adds = x.dtype.type(0), shortcut.size > 0
    numbers, results, others = x.reshape(x.size), y.reshape(y.size), shortcut.reshape(shortcut.size)
    for start in range(0, numbers.size, width):
        following = start + AHEAD * width
        fetch(numbers, following, width)
        fetch(results, following, width)
        fetch(others, following, width)
        row, result = numbers[start : start + width], results[start : start + width]
        other = others[start : start + width]
        for i in range(row.size):
            value = (get(row, i) - get(mean, i)) * get(scale, i) + get(bias, i)
            if adds:
                value += get(other, i)
            put(result, i, zero if relu and value < zero else value, False)


@jit
def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    running_mean: ndarray, running_var: ndarray, partial: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    # One pass computes both moments. It is as accurate as two passes: distances are measured from the first row. Since
    # this row contributes to the variance, at most log2(rows) of float64's 53 bits cancel.
    rows, channels = x.shape
    origin = x[0].astype(np.float64)
    _moments(x, origin, partial)
    moments = _total(partial)
    scale = np.empty_like(weight)
    for c in range(channels):
        distance = moments[0, c] / rows
        variance = moments[1, c] / rows - distance * distance
        if variance < 0:  # due to rounding
            variance = 0.0
        unbiased = variance * rows / max(rows - 1, 1)
        mean[c] = origin[c] + distance
        rstd[c] = 1 / math.sqrt(variance + eps)
        scale[c] = rstd[c] * weight[c]
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
        running_var[c] = (1 - momentum) * running_var[c] + momentum * unbiased
    _normalize(x, mean, scale, bias, shortcut, relu, y)


@jit
def _limit(x: ndarray, relu: bool) -> Any:
    """Return the largest output that lets no gradient pass: 0 with relu, otherwise NaN, because nothing is <= NaN."""
    return x.dtype.type(0 if relu else np.nan)


@jit
def _passing(
    dy: ndarray, x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, limit: float, at: int, i: int
) -> Any:
    """Return dy[at], or 0 if the output was not above the limit (_limit), and x[at] - mean[i]."""
    distance = get(x, at) - get(mean, i)
    gradient = get(dy, at)
    return (x.dtype.type(0) if distance * get(scale, i) + get(bias, i) <= limit else gradient), distance


@by_partial_sums
def _gradient_moments(
    dy: Part, x: Part, mean: ndarray, scale: ndarray, bias: ndarray, relu: bool, partial: Part
) -> None:
    """Compute partial[0] (2, C) = sums of dy and dy * (x - mean) over the rows; with relu, only over positive outputs.

    Four rows are added in the type of the arrays, and their sums in float64. Unlike in a variance, no digits cancel.
    These are two loops: float64 in the first one would halve the length of all its vectors.
    """
    width, limit = wide(x.shape[1]), _limit(x, relu)
    mean, scale, bias = repeat(mean, width), repeat(scale, width), repeat(bias, width)
    first, second = np.zeros(width), np.zeros(width)
    four_dys, four_products = np.empty(width, x.dtype), np.empty(width, x.dtype)
    dys, numbers = dy.reshape(dy.size), x.reshape(x.size)
    begin = 0
    while begin + 4 * width <= numbers.size:
        fetch(dys, begin + 4 * width, 4 * width)
        fetch(numbers, begin + 4 * width, 4 * width)
        g4 = dys[begin : begin + 4 * width].reshape(4, width)
        x4 = numbers[begin : begin + 4 * width].reshape(4, width)
        g0, g1, g2, g3, x0, x1, x2, x3 = g4[0], g4[1], g4[2], g4[3], x4[0], x4[1], x4[2], x4[3]
        for i in range(width):
            ga, a = _passing(g0, x0, mean, scale, bias, limit, i, i)
            gb, b = _passing(g1, x1, mean, scale, bias, limit, i, i)
            gc, c = _passing(g2, x2, mean, scale, bias, limit, i, i)
            gd, d = _passing(g3, x3, mean, scale, bias, limit, i, i)
            put(four_dys, i, (ga + gb) + (gc + gd), False)
            put(four_products, i, (ga * a + gb * b) + (gc * c + gd * d), False)
        for i in range(width):
            put(first, i, get(first, i) + get(four_dys, i), False)
            put(second, i, get(second, i) + get(four_products, i), False)
        begin += 4 * width
    while begin < numbers.size:
        dy_row, row = dys[begin : begin + width], numbers[begin : begin + width]
        for i in range(row.size):
            gradient, distance = _passing(dy_row, row, mean, scale, bias, limit, i, i)
            first[i] += gradient
            second[i] += gradient * distance
        begin += width
    narrow(first, partial[0, 0])
    narrow(second, partial[0, 1])


@by_blocks
def _input_gradient(
    dy: Part, x: Part, mean: ndarray, scale: ndarray, bias: ndarray, relu: bool, slope: ndarray,
    constant: ndarray, dx: Part,
) -> None:  # fmt: skip
    """Compute dx = scale * dy + slope * (x - mean) + constant; with relu, dy is 0 where the output was not positive."""
    width, limit = wide(x.shape[1]), _limit(x, relu)
    mean, scale, bias = repeat(mean, width), repeat(scale, width), repeat(bias, width)
    slope, constant = repeat(slope, width), repeat(constant, width)
    dys, numbers, dxs = dy.reshape(dy.size), x.reshape(x.size), dx.reshape(dx.size)
    for start in range(0, numbers.size, width):
        following = start + AHEAD * width
        fetch(dys, following, width)
        fetch(numbers, following, width)
        fetch(dxs, following, width)
        dy_row, row, dx_row = dys[start : start + width], numbers[start : start + width], dxs[start : start + width]
        for i in range(row.size):
            gradient, distance = _passing(dy_row, row, mean, scale, bias, limit, i, i)
            value = get(scale, i) * gradient + (get(slope, i) * distance + get(constant, i))
            put(dx_row, i, value, False)


@jit
def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    # For each channel, dx = weight * rstd * (dy - dbias / rows - (x - mean) * rstd * dweight / rows),
    # which is linear in dy and x.
    rows, channels = x.shape
    scale, slope, constant = np.empty_like(weight), np.empty_like(weight), np.empty_like(weight)
    for c in range(channels):
        scale[c] = rstd[c] * weight[c]  # as in the forward pass: relu needs the bit-identical output
    _gradient_moments(dy, x, mean, scale, bias, relu, partial)
    moments = _total(partial)
    for c in range(channels):
        dbias[c] = moments[0, c]
        dweight[c] = moments[1, c] * rstd[c]
        slope[c] = -scale[c] * rstd[c] * dweight[c] / rows
        constant[c] = -scale[c] * dbias[c] / rows
    _input_gradient(dy, x, mean, scale, bias, relu, slope, constant, dx)


# Batch normalisation with given statistics: an affine map for each channel


@jit
def fold(
    weight: ndarray, bias: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    scale: ndarray, shift: ndarray,
) -> None:  # fmt: skip
    for c in range(weight.size):
        scale[c] = weight[c] / math.sqrt(running_var[c] + eps)
        shift[c] = bias[c] - np.float64(running_mean[c]) * scale[c]


@jit
def fold_backward(
    dscale: ndarray, dshift: ndarray, eps: float, running_mean: ndarray, running_var: ndarray,
    dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    for c in range(dweight.size):
        dweight[c] = (dscale[c] - running_mean[c] * dshift[c]) / math.sqrt(running_var[c] + eps)
        dbias[c] = dshift[c]


@jit
def affine(x: ndarray, scale: ndarray, shift: ndarray, relu: bool, y: ndarray) -> None:
    _normalize(x, np.zeros_like(scale), scale, shift, x[:0], relu, y)


@jit
def affine_backward(
    dy: ndarray, x: ndarray, scale: ndarray, shift: ndarray, relu: bool, partial: ndarray,
    dx: ndarray, dscale: ndarray, dshift: ndarray,
) -> None:  # fmt: skip
    zeros = np.zeros_like(scale)  # for mean, slope and constant: given statistics add no terms to dx
    _gradient_moments(dy, x, zeros, scale, shift, relu, partial)
    moments = _total(partial)
    for c in range(scale.size):
        dshift[c], dscale[c] = moments[0, c], moments[1, c]
    _input_gradient(dy, x, zeros, scale, shift, relu, zeros, zeros, dx)


# Layer normalisation


@by_blocks
def layer_norm(x: Part, weight: ndarray, bias: ndarray, eps: float, mean: Part, rstd: Part, y: Part) -> None:
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
        shift, scale = mean[r], rstd[r]  # rounded to the arrays' type
        for c in range(x_row.size):
            y_row[c] = (x_row[c] - shift) * scale * weight[c] + bias[c]


@by_partial_sums
def _layer_norm_backward(dy: Part, x: Part, weight: ndarray, mean: Part, rstd: Part, dx: Part, partial: Part) -> None:
    """Compute dx and partial[0] (2, C) = the sums of dy and dy * z over the rows, with z = (x - mean) * rstd."""
    partial[:] = 0
    first, second = partial[0, 0], partial[0, 1]
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


@jit
def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, partial: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    _layer_norm_backward(dy, x, weight, mean, rstd, dx, partial)
    total = _total(partial)
    for c in range(x.shape[1]):
        dbias[c], dweight[c] = total[0, c], total[1, c]
