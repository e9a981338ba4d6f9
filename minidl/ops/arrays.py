"""Operations on plain arrays that several ops share: strided copies, and sums over axes."""

from __future__ import annotations

import math

import numpy as np

from minidl.engine.device import Device, address

ROWS = 64  # the minimum number of rows per part: with fewer, the partial sums need much memory
NUMBERS = 8192  # the minimum number of elements per part: with fewer, a thread costs more than it saves


def strided_copy(
    device: Device,
    source: np.ndarray,
    view: np.ndarray,
    target: np.ndarray | None = None,
    into: np.ndarray | None = None,
) -> np.ndarray:
    """Copy `view`, a view of the array `source`, into `into`, a view of the array `target`. Return target.

    Views may have any strides; source and target must be contiguous. Without target and into, copy to a new array.
    """
    if target is None or into is None:
        target = into = device.empty(view.shape, source.dtype)

    def place(part: np.ndarray, array: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the offset and the strides, in elements, of a view of an array."""
        offset = address(part) - address(array)
        return offset // array.itemsize, np.array(part.strides or (0,), np.int64) // array.itemsize

    shape = np.array(view.shape or (1,), np.int64)
    device.movement.copy(source.reshape(-1), *place(view, source), shape, *place(into, target), target.reshape(-1))
    return target


def middle(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return x as (outer, n, inner): n is the number of elements along `axes`, which must be adjacent."""
    first, last = axes[0], axes[-1] + 1
    return x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:last]), math.prod(x.shape[last:]))


def runs(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group sorted axes into runs of adjacent axes, the last run first: (0, 1, 3) -> [(3,), (0, 1)]."""
    found: list[tuple[int, ...]] = []
    for axis in axes:
        if found and found[-1][-1] == axis - 1:
            found[-1] += (axis,)
        else:
            found.append((axis,))
    return found[::-1]


def partial_sums(device: Device, rows: int, outer: int, inner: int) -> np.ndarray:
    """Return an uninitialised float64 array (parts, outer, inner) for partial sums.

    A kernel computes `outer` sums, each over `rows` rows of `inner` elements. It divides the rows of each sum into
    parts, sums the parts in parallel, and then adds these partial sums.
    """
    parts = max(1, min(device.sum_parts // max(1, outer), rows // ROWS, rows * outer * inner // NUMBERS))
    return device.empty((parts, outer, inner), np.dtype(np.float64))


def reduce_sum(device: Device, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return x summed over the sorted axes, which are removed. Calls a kernel for each run of adjacent axes."""
    for run in runs(axes):
        out = device.empty(x.shape[: run[0]] + x.shape[run[-1] + 1 :], x.dtype)
        rows = middle(x, run)
        outer, n, inner = rows.shape
        device.reduce.sum(rows, partial_sums(device, n, outer, inner), out.reshape(outer, inner))
        x = out
    return x
