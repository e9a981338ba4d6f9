"""The strided copy, compiled: an odometer over the outer axes, one loop over the innermost."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import jit

from .reference import __all__ as __all__


@jit
def copy(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    rank = shape.size
    for axis in range(rank):
        if shape[axis] == 0:
            return
    last = rank - 1
    n, source_step, target_step = shape[last], source_strides[last], target_strides[last]
    index = np.zeros(rank, np.int64)
    s, t = source_offset, target_offset
    while True:
        if source_step == 1 and target_step == 1:
            target[t : t + n] = source[s : s + n]
        else:
            for i in range(n):
                target[t + i * target_step] = source[s + i * source_step]
        axis = last - 1  # advance the odometer: the wheel that overflows goes back to 0 and turns the next one
        while axis >= 0:
            index[axis] += 1
            s += source_strides[axis]
            t += target_strides[axis]
            if index[axis] < shape[axis]:
                break
            s -= shape[axis] * source_strides[axis]
            t -= shape[axis] * target_strides[axis]
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return


@jit
def take(x: ndarray, rows: ndarray, out: ndarray) -> None:
    for i in range(rows.size):
        out[i] = x[rows[i]]


@jit
def take_backward(dy: ndarray, rows: ndarray, dx: ndarray) -> None:
    dx[:] = 0
    for i in range(rows.size):
        target, gradient = dx[rows[i]], dy[i]
        for c in range(target.size):
            target[c] += gradient[c]
