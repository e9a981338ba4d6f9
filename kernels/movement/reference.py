"""Moving elements: one strided copy implements transpose, broadcast, slice, pad and concatenation.

An array of any shape is a vector in memory with an offset and one stride (in elements) for each axis:

    element (i, j, k)  is stored at  offset + i * strides[0] + j * strides[1] + k * strides[2]

A transpose permutes strides, a broadcast has a stride of 0, a slice has an offset and larger strides. The gradient of a
slice, a pad or a concatenation is the same copy with source and target exchanged.
"""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["copy", "take", "take_backward"]


def copy(
    source: np.ndarray,
    source_offset: int,
    source_strides: np.ndarray,
    shape: np.ndarray,
    target_offset: int,
    target_strides: np.ndarray,
    target: np.ndarray,
) -> None:
    """target[index . target_strides + target_offset] = source[index . source_strides + source_offset]

    source, target: vectors; shape and strides (in elements): int64 (rank,). `index` runs over all indices of an array
    of this shape.
    """
    for index in itertools.product(*(range(n) for n in shape)):
        s, t = source_offset, target_offset
        for i, source_stride, target_stride in zip(index, source_strides, target_strides, strict=True):
            s += i * source_stride
            t += i * target_stride
        target[t] = source[s]


def take(x: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out[i] = x[rows[i]] for out (n, C), x (N, C), and rows (n,) with values in [0, N)"""
    for i in range(rows.size):
        for c in range(x.shape[1]):
            out[i, c] = x[rows[i], c]


def take_backward(dy: np.ndarray, rows: np.ndarray, dx: np.ndarray) -> None:
    """dx (N, C) = 0, then dx[rows[i]] += dy[i]: a row that was taken twice receives both gradients"""
    for r in range(dx.shape[0]):
        for c in range(dx.shape[1]):
            dx[r, c] = 0
    for i in range(rows.size):
        for c in range(dx.shape[1]):
            dx[rows[i], c] += dy[i, c]
