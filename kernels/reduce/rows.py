"""Process several short rows as one wide row: loops over rows of any length become long vector loops.

x (rows, C) stores the C numbers of a row contiguously. Each column is a channel, and has its own sum or factor. A loop
over c < C uses vectors, but for C = 16 it processes only one vector: most of the time is spent at the beginning and
the end of the loop. In memory, however, k rows of C numbers are one wide row of k * C numbers:

    for each wide row:             of about WIDE_ROW numbers
        for i < width:             one vector loop
            sums[i] += row[i]      sums: k for each channel, added up at the end

The arrays of the channels (a mean, a factor) are repeated k times before the loop. The last wide row may be shorter.
With C = 1 the same loop adds up a plain vector, as WIDE_ROW independent sums.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper, in_parts

BLOCK_SIZE = 16384  # if there are several blocks of rows, each has about this many numbers or more
MAX_BLOCKS = 64
WIDE_ROW = 256  # numbers: four wide rows of float32 are a page of memory, and the sums fit into the first-level cache


@helper
def wide(channels: int) -> int:
    """Return the length of a wide row: the largest multiple of `channels` up to WIDE_ROW, at least one row."""
    return max(1, channels) * max(1, WIDE_ROW // max(1, channels))


@helper
def repeat(values: ndarray, width: int) -> ndarray:
    """Repeat `values` (C,) until they fill a wide row; return the row (width,)."""
    repeated = np.empty(width, values.dtype)
    for start in range(0, width, max(1, values.size)):
        for c in range(values.size):
            repeated[start + c] = values[c]
    return repeated


@helper
def narrow(sums: ndarray, total: ndarray) -> None:
    """Compute total (C,) = the sum of the rows of length C that form `sums` (width,)."""
    total[:] = 0
    for start in range(0, sums.size, max(1, total.size)):
        part = sums[start : start + total.size]
        for c in range(total.size):
            total[c] += part[c]


# Blocks of rows, which are divided among threads


@helper
def _blocks(x: ndarray) -> int:
    return max(1, min(MAX_BLOCKS, x.size // BLOCK_SIZE))


@helper
def block_of_rows(a: ndarray, k: int, blocks: int) -> ndarray:
    """Return the k-th block of rows."""
    rows = a.shape[0]
    return a[rows * k // blocks : rows * (k + 1) // blocks]


by_blocks = in_parts(_blocks, block_of_rows)
