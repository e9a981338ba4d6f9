"""Convolutions with kernels of 1 x 1: a pixel is a row of a matrix, so each pass is one matrix product.

    y (pixels, O) = x (pixels, C) @ weight (C, O)      dx = dy @ weight^T      dweight = x^T @ dy

The product copies the weights faster than direct.py, and reads them from the caches less often. With 512 x 512 weights
and few pixels it takes a third to a half of the time, with many pixels 0.85 to 1.0. With fewer than FEWEST channels, y
gains, but dx and dweight lose as much or more (16 -> 96, 37 images of 32 x 32, two threads of a Zen 4, in ms, direct.py
and product: y 0.84, 0.68; dx 0.56, 0.85; dweight 0.71, 0.86). On AMX (../matmul/README.md, step 9), the product is
faster still.

If a batch norm needs the sums of y or dx, the product is computed chunk by chunk of pixels (`convolve`), so that a
chunk is added up while it is in L2. All weights are packed before.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange, threads
from minidl.engine.team import thread_count
from minidl.kernels.matmul import cpu as matmul
from minidl.kernels.matmul.amx_product import uses_amx
from minidl.kernels.matmul.blocks import LANES, LINE, NR, PRODUCT_MR, aligned
from minidl.kernels.matmul.operands import Left, Right
from minidl.kernels.matmul.pack import pack_columns, pack_rows
from minidl.kernels.matmul.share import share, share_scratch
from minidl.kernels.matmul.tile import panel_width

from .geometry import ceildiv
from .norms import Norms, add_rest, add_up
from .reference import Pair, Shape
from .sizes import MAX_COPY

FEWEST = 32  # channels of x and of y
ROWS = 256  # pixels of a part of _finish
PIXELS = 8  # for each channel of x or y: with fewer, packing all weights costs too much


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


@helper
def _end(bias: ndarray, scale: ndarray, shift: ndarray, y: ndarray) -> ndarray:
    """Return bias, scale and shift (3, O) for y (pixels, O).

    What is missing has size 0. Adding -0 changes no number, so a missing bias or shift is -0.
    """
    outputs = y.shape[1]
    end = np.empty((3, outputs), y.dtype)
    for o in range(outputs):
        end[0, o] = bias[o] if bias.size else -0.0
        end[1, o] = scale[o] if scale.size else 1.0
        end[2, o] = shift[o] if scale.size else -0.0
    return end


@helper
def _finish_rows(first: int, last: int, end: ndarray, shortcut: ndarray, relu: bool, y: ndarray) -> None:
    """Compute y (pixels, O) = (y + bias) * scale + shift + shortcut for the pixels [first, last), each step rounded;
    then apply relu if `relu`. end: see _end; the shortcut may be of size 0."""
    outputs = y.shape[1]
    for p in range(first, last):
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


@parallel_jit
def _finish(bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, y: ndarray) -> None:
    """Apply _finish_rows to all pixels of y (pixels, O)."""
    pixels, end = y.shape[0], _end(bias, scale, shift, y)
    for part in prange((pixels + ROWS - 1) // ROWS):
        first = np.int64(part) * ROWS  # a prange index is unsigned: Numba would compute unsigned + signed in float64
        _finish_rows(first, min(pixels, first + ROWS), end, shortcut, relu, y)


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


# -- chunk by chunk, for the sums of a batch norm (norms.py) -----------------------------------------------------------


@helper
def _chunk(pixels: int, channels: int, outputs: int, tasks: int) -> int:
    """Return how many pixels of x and y are computed together: they stay in L2, and the tasks have equal shares."""
    most = max(4 * PRODUCT_MR, MAX_COPY // max(channels, outputs))
    chunks = ceildiv(ceildiv(pixels, most), tasks) * tasks
    return ceildiv(ceildiv(pixels, chunks), PRODUCT_MR) * PRODUCT_MR


@helper
def _panel_size(depth: int) -> int:
    """Return the distance from one packed panel of weights to the next."""
    return (depth // LANES + 2) * LANES * NR


@helper
def _memory_of_task(pixels: int, channels: int, outputs: int) -> int:
    """Return the size of a task's scratch, for products of `channels` numbers."""
    return share_scratch(_chunk(pixels, channels, outputs, 1) + PRODUCT_MR, outputs, channels)


def adds_up(pixels: int, channels: int, outputs: int) -> bool:
    """Return whether y or dx can be computed in chunks: there are many pixels for each packed weight, and no AMX."""
    return pixels >= PIXELS * max(channels, outputs) and not uses_amx(pixels, outputs, channels)


def scratch_size(pixels: int, channels: int, outputs: int) -> int:
    """Return the number of elements of convolve's scratch."""
    return int(LINE + ceildiv(outputs, LANES) * _panel_size(channels)
               + threads() * _memory_of_task(pixels, channels, outputs))  # fmt: skip


@apart_jit
def _pack(task: int, tasks: int, weight: ndarray, backward: bool, panels: ndarray) -> None:
    """Pack this task's panels of the weights (C, O) or, if `backward`, of their transpose."""
    numbers, (depth, outputs) = weight.reshape(-1), weight.shape
    if backward:
        depth, outputs = outputs, depth
    columns, size = panel_width(panels), _panel_size(depth)
    count = ceildiv(outputs, columns)
    for p in range(task * count // tasks, (task + 1) * count // tasks):
        first = p * columns
        width, panel = min(columns, outputs - first), panels[p * size : (p + 1) * size]
        if backward:
            pack_columns(numbers, first * depth, depth, depth, width, panel, columns)
        else:
            pack_rows(numbers, first, outputs, depth, width, panel, columns)


@apart_jit
def _chunks(
    task: int, tasks: int, source: ndarray, panels: ndarray, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, memory: ndarray, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute this task's chunks of out (N, H, W, O), and add up the blocks of rows that they complete."""
    a, y = rows(source), rows(out)
    (pixels, depth), outputs = a.shape, y.shape[1]
    each, none, simple = _chunk(pixels, depth, outputs, tasks), scale[:0], scale.size + shortcut.size == 0
    chunks, b = ceildiv(pixels, each), Right(panels, _panel_size(depth), panel_width(out), 1, True)
    since, end = min(pixels, task * chunks // tasks * each), _end(bias, scale, shift, y)
    for number in range(task * chunks // tasks, (task + 1) * chunks // tasks):
        first, last = number * each, min(pixels, (number + 1) * each)
        left = Left(source.reshape(-1)[first * depth : last * depth], depth, 1)
        share(0, 1, left, b, depth, bias if simple else none, relu and simple, memory, y[first:last])
        if not simple:
            _finish_rows(first, last, end, shortcut, relu, y)
        since = add_up(out, since, last, norms)


@parallel_jit
def _convolve(
    tasks: int, source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, panels: ndarray, memory: ndarray, each: int, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Pack the weights, and then compute all chunks, each time in `tasks` tasks."""
    for step in range(2):  # one parallel loop for both: each parallel loop costs a second of compile time
        for task in prange(tasks):
            number = np.int64(task)  # a prange index is unsigned
            own = memory[number * each : (number + 1) * each]
            if step == 0:
                _pack(number, tasks, weight, backward, panels)
            else:
                _chunks(number, tasks, source, panels, bias, scale, shift, shortcut, relu, own, out, norms)
    add_rest(out, norms)


@helper
def convolve(
    source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, scratch: ndarray, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute out = y from source = x or, if `backward`, out = dx from source = dy, with the sums of `norms`.

    The bits are those of `forward` and `backward_input`. scratch: scratch_size numbers
    """
    pixels, depth, outputs = out.size // out.shape[3], source.shape[3], out.shape[3]
    memory = aligned(scratch)
    size, each = ceildiv(outputs, LANES) * _panel_size(depth), _memory_of_task(pixels, depth, outputs)
    tasks = np.int64(min(thread_count(), (memory.size - size) // each))
    _convolve(tasks, source, rows(weight), backward, bias, scale, shift, shortcut, relu, memory[:size], memory[size:],
              each, out, norms)  # fmt: skip
