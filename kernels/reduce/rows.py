"""Short rows taken together: how sums over rows, and maps of rows, become vector loops whatever the row's length.

x (rows, C) has its C numbers contiguous, and what a channel needs is a sum, or a factor, of its own. A loop over
c < C is a vector loop, but where C is 16 it is one vector: nearly all beginning and end. In memory, though, k rows of C
numbers are one row of k C numbers, so

    for each wide row:             of about WIDE numbers
        for i < width:             one vector loop
            sums[i] += row[i]      sums: k for each channel, added up at the end

and what belongs to channels (a mean, a factor) is repeated k times before the loop. The last wide row may be shorter.
With C = 1 the same loop adds up a plain vector, in WIDE sums that do not wait for each other.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

WIDE = 256  # numbers: four wide rows lie within a page of memory, and their sums in the first cache


@jit
def wide(channels: int) -> int:
    """The width of a wide row: whole rows, at least one."""
    return max(1, channels) * max(1, WIDE // max(1, channels))


@jit
def repeat(values: ndarray, width: int) -> ndarray:
    """values (C,), values, ... up to the width of a wide row"""
    repeated = np.empty(width, values.dtype)
    for start in range(0, width, max(1, values.size)):
        repeated[start : start + values.size] = values
    return repeated


@jit
def narrow(sums: ndarray, total: ndarray) -> None:
    """total (C,) = the sums of a wide row (width,), over the rows in it"""
    total[:] = 0
    for start in range(0, sums.size, max(1, total.size)):
        part = sums[start : start + total.size]
        for c in range(total.size):
            total[c] += part[c]
