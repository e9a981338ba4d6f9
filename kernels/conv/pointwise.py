"""Convolutions with kernels of 1 x 1: a pixel is a row of a matrix, so each pass is one matrix product.

    y (pixels, O) = x (pixels, C) @ weight (C, O)      dx = dy @ weight^T      dweight = x^T @ dy

The product copies the weights faster than direct.py, and reads them from the caches less often. With 512 x 512 weights
and few pixels it takes a third to a half of the time, with many pixels 0.85 to 1.0. With fewer than FEWEST channels, y
gains, but dx and dweight lose as much or more (16 -> 96, 37 images of 32 x 32, two threads of a Zen 4, in ms, direct.py
and product: y 0.84, 0.68; dx 0.56, 0.85; dweight 0.71, 0.86). On AMX (../matmul/README.md, step 9), the product is
faster still.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper, parallel_jit, prange
from minidl.kernels.matmul import cpu as matmul

from .reference import Pair, Shape

FEWEST = 32  # channels of x and of y
ROWS = 256  # pixels of a part of _finish


@helper
def is_product(w_shape: Shape, groups: int, stride: Pair, padding: Pair) -> bool:
    """Return whether a layer with weights of this shape is computed here. w_shape: (kh, kw, C / groups, O)

    The number of pixels does not matter, so the result for an image does not depend on the other images of its batch,
    except in the last bits on a CPU with AMX, which computes large products only.
    """
    same = w_shape[:2] == (1, 1) and groups == 1 and stride == (1, 1) and padding == (0, 0)
    return same and min(w_shape[2:]) >= FEWEST


@helper
def rows(x: ndarray) -> ndarray:
    """Return x (..., C) as a matrix (pixels, C)."""
    return x.reshape(-1, x.shape[-1])


@parallel_jit
def _finish(bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, y: ndarray) -> None:
    """Compute y (pixels, O) = (y + bias) * scale + shift + shortcut, each step rounded; then apply relu if `relu`.

    What is missing has size 0. Adding -0 changes no number, so a missing bias or shift is -0.
    """
    pixels, outputs = y.shape
    end = np.empty((3, outputs), y.dtype)
    for o in range(outputs):
        end[0, o] = bias[o] if bias.size else -0.0
        end[1, o] = scale[o] if scale.size else 1.0
        end[2, o] = shift[o] if scale.size else -0.0
    for part in prange((pixels + ROWS - 1) // ROWS):
        first = np.int64(part) * ROWS  # a prange index is unsigned: Numba would compute unsigned + signed in float64
        for p in range(first, min(pixels, first + ROWS)):
            row = y[p]
            for o in range(outputs):
                row[o] = (row[o] + end[0, o]) * end[1, o] + end[2, o]
            if shortcut.size:
                other = shortcut[p * outputs : (p + 1) * outputs]
                for o in range(outputs):
                    row[o] += other[o]
            if relu:
                for o in range(outputs):
                    row[o] = 0 if row[o] < 0 else row[o]


@helper
def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    packed: ndarray, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute y as reference.py's forward."""
    none, simple = scratch[:0], scale.size + shortcut.size == 0  # simple: the product applies bias and relu itself
    matmul.nn(rows(x), rows(weight), bias if simple else none, relu and simple, packed, scratch, rows(y))
    if not simple:
        _finish(bias, scale, shift, shortcut, relu, rows(y))


@helper
def backward_input(dy: ndarray, weight: ndarray, shortcut: ndarray, scratch: ndarray, dx: ndarray) -> None:
    """Compute dx [+ shortcut] = dy @ weight^T."""
    none = scratch[:0]
    matmul.nt(rows(dy), rows(weight), scratch, rows(dx))
    if shortcut.size:
        _finish(none, none, none, shortcut, False, rows(dx))


@helper
def backward_weight(x: ndarray, dy: ndarray, scratch: ndarray, dweight: ndarray) -> None:
    """Compute dweight = x^T @ dy."""
    matmul.tn(rows(x), rows(dy), scratch, rows(dweight))
