"""What a convolution does for the batch norms beside it (../conv_norm/README.md).

norm/blocks.py divides the rows of a batch norm into blocks, and adds up each block. Here the rows are the pixels of y,
or of dx. A task of a convolution writes successive pixels. After each part of them, it adds up the blocks that are
complete by then, while they are in its caches (`add_up`). Blocks that more than one task writes are left, and added up
at the end (`add_rest`). So any image size and any division among threads is possible, and the bits are always the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.norm.blocks import (
    gradients_of_block,
    moments_of_block,
    normalize_rows,
    rows_of_block,
    wide_row,
)

from .geometry import ceildiv


class Norms(NamedTuple):
    """The arguments of a convolution for the batch norms beside it. Arrays of size 0 mean that nothing is to be done.

    before (3, C): mean, scale and bias; x is first normalised with them, and rectified.
    sums (blocks, 2, O): for the sums of what is written, y or dx (norm/blocks.py).
    x, constants, relu, relu_y: arguments of gradients_of_block; x is a vector, and empty if `sums` are moments.
    done (blocks,): whether a block has been added up; false at first.
    """

    before: ndarray
    x: ndarray
    constants: ndarray
    relu: bool
    relu_y: ndarray
    sums: ndarray
    done: ndarray


@helper
def no_norms(array: ndarray) -> Norms:
    """Return Norms with arrays of size 0, of the type of `array` (n,)."""
    none = array[:0]
    return Norms(none.reshape(3, 0), none, none, False, none, np.empty((0, 2, 0)), np.empty(0, np.bool_))


@apart_jit
def normalize(x: ndarray, begin: int, end: int, before: ndarray, z: ndarray) -> None:
    """Compute z = the pixels [begin, end) of x (n,), normalised and rectified; before: see Norms."""
    channels = before.shape[1]
    pixels = x[begin * channels : end * channels].reshape(-1, channels)
    normalize_rows(pixels, before[0], before[1], before[2], x[:0], True, z[: pixels.size].reshape(-1, channels))


@apart_jit
def _add_blocks(y: ndarray, first: int, last: int, norms: Norms) -> None:
    """Compute the sums of the blocks [first, last) of y (N, H, W, O), unless they are done."""
    channels, blocks = y.shape[3], norms.sums.shape[0]
    numbers, rows, width = y.reshape(-1), y.size // channels, wide_row(y, channels)
    each, memory = rows_of_block(rows, blocks), np.empty(2 * width, y.dtype)
    for k in range(first, last):
        if norms.done[k]:
            continue
        begin, end = min(rows, k * each), min(rows, (k + 1) * each)
        if norms.x.size:
            gradients_of_block(numbers, norms.x, norms.relu_y, begin * channels, end - begin, channels, width,
                               norms.constants, norms.relu, memory, norms.sums, k)  # fmt: skip
        else:
            moments_of_block(numbers, begin * channels, end - begin, channels, width, memory, norms.sums, k)
        norms.done[k] = True


@helper
def add_up(y: ndarray, since: int, end: int, norms: Norms) -> int:
    """Add up the blocks that are within the pixels [since, end) of y (N, H, W, O); return where the next one begins.

    The caller has written these pixels. It passes the result as the next `since`.
    """
    blocks = norms.sums.shape[0]
    if blocks == 0:
        return since
    rows = y.shape[0] * y.shape[1] * y.shape[2]
    each = rows_of_block(rows, blocks)
    first, last = ceildiv(since, each), blocks if end == rows else end // each
    if last <= first:
        return since
    _add_blocks(y, first, last, norms)
    return last * each


@helper
def add_rest(y: ndarray, norms: Norms) -> None:
    """Add up the blocks that are not done, after all tasks."""
    if norms.sums.shape[0]:
        _add_blocks(y, 0, norms.sums.shape[0], norms)
