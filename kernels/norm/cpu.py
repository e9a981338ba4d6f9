"""Batch normalisation (two passes over memory) and layer normalisation (one), with the rows divided among threads.

Batch norm's first pass computes sums over blocks of rows (blocks.py). The shape of the scratch array `partial` (blocks,
2, C) determines the number of blocks. The array receives the float64 sums of each block. These sums are added in a
fixed order, so results do not depend on the number of threads.

Channels are contiguous, so vector instructions process several of them. The passes that write an output process several
short rows as one wide row (kernels/reduce/rows.py), and repeat the arrays of the channels (mean, scale, bias) to the
same width. They prefetch (stream.py): with up to four arrays, a core does not look far enough ahead.

An output may share the memory of an input. So the loops of batch norm that write an output read all operands with `get`
(stream.py), even the repeated means and scales. With a single plain load, LLVM would test whether arrays overlap, and
process overlapping arrays one number at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import Part, helper, in_parts, jit
from minidl.kernels.reduce.rows import BLOCK_SIZE, MAX_BLOCKS, block_of_rows, by_blocks, repeat, wide

from ..elementwise.stream import fetch, get, put
from .blocks import (
    AHEAD,
    BLOCK_ROWS,
    constants_of,
    fetch_rows,
    gradients_of_block,
    moments_of_block,
    normalize_rows,
    rows_of_block,
    wide_row,
)
from .layer import gradients_of_rows, normalize_each
from .reference import __all__ as __all__


@helper
def _partial_sums(partial: ndarray) -> int:
    return partial.shape[0]


by_partial_sums = in_parts(_partial_sums, block_of_rows)  # the decorated function receives partial (1, 2, C)


@helper
def _total(partial: ndarray) -> ndarray:
    """Return the sum (2, C) of partial (blocks, 2, C) over the blocks, in order; the sum overwrites the first block."""
    total = partial[0]
    for block in range(1, partial.shape[0]):
        for k in range(2):
            for c in range(total.shape[1]):
                total[k, c] += partial[block, k, c]
    return total


# Sums over blocks of rows


def parts(rows: int, channels: int) -> int:
    """Return the number of blocks of rows in batch norm's `partial` (blocks, 2, C)."""
    return max(1, -(-rows // BLOCK_ROWS))


@helper
def _tasks(partial: ndarray) -> int:
    return max(1, min(MAX_BLOCKS, partial.shape[0], partial.size // 2 * BLOCK_ROWS // BLOCK_SIZE))


@helper
def _first_block(partial: ndarray, task: int, tasks: int) -> int:
    return partial.shape[0] * task // tasks


@helper
def _count(partial: ndarray, task: int, tasks: int) -> int:
    return partial.shape[0]


by_tasks = in_parts(_tasks, block_of_rows, first=_first_block, blocks=_count)


@by_tasks
def _moments(x: ndarray, first: int, blocks: int, partial: Part) -> None:
    """Compute partial (blocks, 2, C) = the moments of each block of rows (blocks.py)."""
    rows, channels = x.shape
    numbers, width = x.reshape(x.size), wide_row(x, channels)
    memory, each = np.empty(2 * width, x.dtype), rows_of_block(rows, blocks)
    for k in range(partial.shape[0]):
        begin, end = min(rows, (first + k) * each), min(rows, (first + k + 1) * each)
        fetch_rows(numbers, end * channels, (end - begin) * channels)
        moments_of_block(numbers, begin * channels, end - begin, channels, width, memory, partial, k)


@by_tasks
def _gradient_moments(
    dy: ndarray, x: ndarray, constants: ndarray, relu: bool, first: int, blocks: int, partial: Part
) -> None:
    """Compute partial (blocks, 2, C) = the sums of each block of rows for the gradients (blocks.py)."""
    rows, channels = x.shape
    dys, numbers, width = dy.reshape(dy.size), x.reshape(x.size), wide_row(x, channels)
    memory, each = np.empty(2 * width, x.dtype), rows_of_block(rows, blocks)
    for k in range(partial.shape[0]):
        begin, end = min(rows, (first + k) * each), min(rows, (first + k + 1) * each)
        fetch_rows(dys, end * channels, (end - begin) * channels)
        fetch_rows(numbers, end * channels, (end - begin) * channels)
        gradients_of_block(dys, numbers, dys[:0], begin * channels, end - begin, channels, width, constants, relu,
                           memory, partial, k)  # fmt: skip


@helper
def _sums_of_blocks(partial: ndarray, blocks: int) -> ndarray:
    """Return the sums of the first `blocks` rows of partial (blocks, 2 * C), and the sums of the squares of distances
    from the mean: (2, 2 * C)."""
    columns = 2 * partial.shape[2]
    total, width = np.empty((1, 2, columns)), wide_row(partial, columns)
    moments_of_block(partial.reshape(partial.size), 0, blocks, columns, width, np.empty(2 * width), total, 0)
    return total[0]


# Batch normalisation


@by_blocks
def _normalize(x: Part, mean: ndarray, scale: ndarray, bias: ndarray, shortcut: Part, relu: bool, y: Part) -> None:
    """Compute y = (x - mean) * scale + bias; add the shortcut unless it is empty, then apply relu if `relu`."""
    normalize_rows(x, mean, scale, bias, shortcut, relu, y)


@helper
def _statistics(
    rows: int, eps: float, momentum: float, running_mean: ndarray, running_var: ndarray, partial: ndarray,
    mean: ndarray, rstd: ndarray,
) -> None:  # fmt: skip
    """Compute mean and rstd from the moments of all blocks, and update the running statistics.

    The squared distances from the mean of all rows are those from the means of the blocks, plus those of these means
    (Chan, Golub and LeVeque 1983). So no digits cancel, even if the mean is large.
    """
    blocks, _, channels = partial.shape
    each = rows_of_block(rows, blocks)
    full = rows // each
    total = _sums_of_blocks(partial, full)
    for c in range(channels):
        count, center = full * each, total[0, c] / (full * each)
        squares = total[0, channels + c] + total[1, c] / each
        if count < rows:  # the last block has fewer rows
            more = rows - count
            distance = partial[full, 0, c] / more - center
            squares += partial[full, 1, c] + distance * distance * count * more / rows
            center += distance * more / rows
        mean[c] = center
        rstd[c] = 1 / math.sqrt(squares / rows + eps)
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * mean[c]
        running_var[c] = (1 - momentum) * running_var[c] + momentum * squares / max(rows - 1, 1)


@jit
def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    running_mean: ndarray, running_var: ndarray, partial: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    _moments(x, partial)
    finish(x, weight, bias, eps, momentum, shortcut, relu, partial, running_mean, running_var, mean, rstd, y)


@helper
def finish(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    partial: ndarray, running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Do the rest of batch_norm after the moments of x."""
    _statistics(x.shape[0], eps, momentum, running_mean, running_var, partial, mean, rstd)
    if y.size:
        _normalize(x, mean, rstd * weight, bias, shortcut, relu, y)


@helper
def _limit(x: ndarray, relu: bool) -> Any:
    """Return the largest output that lets no gradient pass: 0 with relu, otherwise NaN, because nothing is <= NaN."""
    return x.dtype.type(0 if relu else np.nan)


@helper
def _passing(
    dy: ndarray, x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, limit: float, at: int, i: int
) -> Any:
    """Return dy[at], or 0 if the output was not above the limit (_limit), and x[at] - mean[i]."""
    distance = get(x, at) - get(mean, i)
    gradient = get(dy, at)
    return (x.dtype.type(0) if distance * get(scale, i) + get(bias, i) <= limit else gradient), distance


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
    for begin in range(0, numbers.size, width):
        following = begin + AHEAD * width
        fetch(dys, following, width)
        fetch(numbers, following, width)
        fetch(dxs, following, width)
        for i in range(min(width, numbers.size - begin)):
            gradient, distance = _passing(dys, numbers, mean, scale, bias, limit, begin + i, i)
            value = get(scale, i) * gradient + (get(slope, i) * distance + get(constant, i))
            put(dxs, begin + i, value, False)


@jit
def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    _gradient_moments(dy, x, constants_of(mean, rstd * weight, bias), relu, partial)
    finish_backward(dy, x, weight, bias, mean, rstd, relu, partial, dx, dweight, dbias)


@helper
def finish_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    partial: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    """Do the rest of batch_norm_backward after the sums."""
    # For each channel, dx = weight * rstd * (dy - dbias / rows - (x - mean) * rstd * dweight / rows),
    # which is linear in dy and x.
    rows, channels = x.shape
    scale = rstd * weight  # as in the forward pass: relu needs the bit-identical output
    slope, constant = np.empty_like(weight), np.empty_like(weight)
    total = _sums_of_blocks(partial, partial.shape[0])[0]
    for c in range(channels):
        dbias[c] = total[c]
        dweight[c] = total[channels + c] * rstd[c]
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
    _gradient_moments(dy, x, constants_of(zeros, scale, shift), relu, partial)
    total = _sums_of_blocks(partial, partial.shape[0])[0]
    for c in range(scale.size):
        dshift[c], dscale[c] = total[c], total[scale.size + c]
    _input_gradient(dy, x, zeros, scale, shift, relu, zeros, zeros, dx)


# Layer normalisation


@by_blocks
def layer_norm(x: Part, weight: ndarray, bias: ndarray, eps: float, mean: Part, rstd: Part, y: Part) -> None:
    normalize_each(x, weight, bias, eps, mean, rstd, y)


@by_partial_sums
def _layer_norm_backward(dy: Part, x: Part, weight: ndarray, mean: Part, rstd: Part, dx: Part, partial: Part) -> None:
    gradients_of_rows(dy, x, weight, mean, rstd, dx, partial[0])


@jit
def layer_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, mean: ndarray, rstd: ndarray, partial: ndarray,
    dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    _layer_norm_backward(dy, x, weight, mean, rstd, dx, partial)
    total = _total(partial)
    for c in range(x.shape[1]):
        dbias[c], dweight[c] = total[0, c], total[1, c]
