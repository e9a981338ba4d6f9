"""The steps of README.md as code: the strided copy of reference.py. bench/bench_movement.py prints the table."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import jit

from . import cpu


@jit
def odometer(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    """Loop over the last axis; the indices of the other axes advance like the wheels of an odometer."""
    last = shape.size - 1
    index, s, t = np.zeros(shape.size, np.int64), source_offset, target_offset
    for _ in range(np.prod(shape[:last])):
        for k in range(shape[last]):
            target[t + k * target_strides[last]] = source[s + k * source_strides[last]]
        for axis in range(last - 1, -1, -1):
            index[axis] += 1
            s += source_strides[axis]
            t += target_strides[axis]
            if index[axis] < shape[axis]:
                break
            s -= shape[axis] * source_strides[axis]
            t -= shape[axis] * target_strides[axis]
            index[axis] = 0


@jit
def merged(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    """Merge axes that are contiguous in memory: fewer, longer loops. A transpose still loads a line for each number."""
    axes = cpu._merged(shape, source_strides, target_strides)
    odometer(source, source_offset, axes[1], axes[0], target_offset, axes[2], target)


@jit
def planes(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    """Copy planes of two axes; squares of a transpose are turned in registers."""
    axes = cpu._merged(shape, source_strides, target_strides)
    cpu._copy_rows(source, source_offset, target, target_offset, axes, 0, np.prod(axes[0, :-1]))


RUNGS = {
    "1 an odometer over all axes": odometer,
    "2 axes merged": merged,
    "3 planes, squares in registers": planes,
    "4 planes, all threads": cpu.copy,
}
