"""Two things that many ops do with plain arrays: copy through strides, and sum over axes."""

from __future__ import annotations

import math

import numpy as np

from minidl.engine.device import Device, address

CHUNKS = 32  # a long sum is split into as many parts: a fixed number, so that bits do not depend on threads
ROWS = 64  # with at least so many summands in each, so that the parts' sums take little memory beside them
NUMBERS = 8192  # and so many numbers: less is not worth a thread


def strided_copy(
    device: Device,
    source: np.ndarray,
    view: np.ndarray,
    target: np.ndarray | None = None,
    into: np.ndarray | None = None,
) -> np.ndarray:
    """Copy `view`, of any strides, which looks into the contiguous array `source`.

    It goes into a new array, which is returned; or to where the view `into` looks in the contiguous array `target`.
    """
    if target is None or into is None:
        target = into = device.empty(view.shape, source.dtype)

    def place(look: np.ndarray, array: np.ndarray) -> tuple[int, np.ndarray]:
        """Offset and strides, in elements, of a view of an array."""
        offset = address(look) - address(array)
        return offset // array.itemsize, np.array(look.strides or (0,), np.int64) // array.itemsize

    shape = np.array(view.shape or (1,), np.int64)
    device.movement.copy(source.reshape(-1), *place(view, source), shape, *place(into, target), target.reshape(-1))
    return target


def middle(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """x as (outer, n, inner), where n are the given axes, which must be neighbours."""
    first, last = axes[0], axes[-1] + 1
    return x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:last]), math.prod(x.shape[last:]))


def runs(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sorted axes grouped into runs of neighbours, the last run first: (0, 1, 3) -> [(3,), (0, 1)]."""
    found: list[tuple[int, ...]] = []
    for axis in axes:
        if found and found[-1][-1] == axis - 1:
            found[-1] += (axis,)
        else:
            found.append((axis,))
    return found[::-1]


def partial_sums(device: Device, rows: int, outer: int, inner: int) -> np.ndarray:
    """Room for sums over so many rows, (parts, outer, inner) in float64: outer sums of rows of `inner` numbers."""
    parts = max(1, min(CHUNKS // max(1, outer), rows // ROWS, rows * outer * inner // NUMBERS))
    return device.empty((parts, outer, inner), np.dtype(np.float64))


def reduce_sum(device: Device, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """x summed over the sorted axes, which disappear: one kernel call for each run of neighbours."""
    for run in runs(axes):
        out = device.empty(x.shape[: run[0]] + x.shape[run[-1] + 1 :], x.dtype)
        rows = middle(x, run)
        outer, n, inner = rows.shape
        device.reduce.sum(rows, partial_sums(device, n, outer, inner), out.reshape(outer, inner))
        x = out
    return x
