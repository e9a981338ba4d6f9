"""Direct convolution, weight gradient: dweight[u, v, c, o] = sum over pixels of x[pixel + (u, v), c] * dy[pixel, o].

This is the formula for stride 1 and dilation 1 without padding. The micro-kernel of matmul/tile.py computes the sum: a
tile's rows are weights (u, v, c), its columns are output channels, and k is an output pixel. Where neighbouring pixels
share numbers of x, the tile of line_gradient.py computes all taps of a line of the window. Groups with few outputs use
the tile of channels.py.

The sum over all pixels of all images is long, the result is small. So dweight is cut into pieces that stay in cache,
and the pixels are cut into parts (`splits` is their number). `_part` sums one piece over the pixels of one part. At the
end, the sums of the parts are added in order. The number of pieces and the number of parts depend on the sizes alone.
So the bits of the result depend neither on the number of threads nor on their timing.

With few outputs, a bundle of neighbouring pixels is computed as one pixel (geometry.py). In this case, the tile's rows
are the pixels and channels of the bundle's window, and `_unfold` adds up the sums that belong to the same weight.

Within a part, each block of pixels (blocks.py) is summed from 0, and then added to the sum of the previous blocks. This
has a smaller rounding error than one long sum (README.md, "Accuracy").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange
from minidl.kernels.matmul.blocks import LINE, aligned
from minidl.kernels.matmul.tile import columns_of, lanes, panel, panel_width, panels_of, whole_vectors, widest_panel

from .blocks import Block, Cut, block_at, clear, copy, copy_pixels, copy_size, cut_into_blocks, gather, place
from .channels import channel_panel, channel_width
from .geometry import Layer, bundle_of, by_channels, ceildiv, forward_axis, inside, layer_of
from .line_gradient import computes_taps, line_gradient
from .reference import Pair, Shape
from .sizes import MAX_BUNDLE, MAX_PIECE, MAX_UNPACKED, MIN_TASKS, NR, SERIAL, WEIGHT_KC


@helper
def _pieces(layer: Layer) -> tuple[int, int, int]:
    """Return the kernel rows of a piece, the largest number of outputs of a piece, and the number of pieces."""
    kernel, row = layer.kernel, layer.kernel[1] * layer.inner * NR  # row: weights in one kernel row of a panel
    if by_channels(layer):
        return kernel[0], layer.groups * layer.outer, 1
    panels, rows = ceildiv(layer.outer, NR), kernel[0] if kernel[0] * row <= MAX_PIECE else 1
    each = ceildiv(panels, ceildiv(panels, max(1, MAX_PIECE // (rows * row))))
    return rows, each * NR, layer.groups * (kernel[0] // rows) * ceildiv(panels, each)


@helper
def splits_of(pixels: int, pieces: int) -> int:
    """Return into how many parts the pixels are cut; the number depends on the sizes alone."""
    return max(1, min(ceildiv(pixels, WEIGHT_KC) // 2, MIN_TASKS // pieces))


@helper
def _task_memory(layer: Layer, width: int) -> int:
    """Return the size of a task's memory: copies of a block of dy and of x, and the sums for a bundle's window."""
    bundled = 2 * layer.outer <= NR and not by_channels(layer)
    columns, copy = copy_size(layer, width, NR)
    gradient = layer.kernel[0] * (layer.kernel[1] + MAX_BUNDLE * layer.stride[1]) * layer.inner * NR if bundled else 0
    outputs = layer.groups * layer.outer if by_channels(layer) else layer.outer
    return gradient + max(WEIGHT_KC, columns) * (outputs + NR) + copy


@helper
def scratch_size(
    threads: int, out: Pair, x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    """Return how many elements backward_weight's scratch has; x_shape (N, H, W, C), w_shape (kh, kw, C/groups, O)."""
    layer = layer_of(w_shape, False, groups, stride, padding, dilation)
    size, pixels = w_shape[0] * w_shape[1] * w_shape[2] * w_shape[3], x_shape[0] * out[0] * out[1]
    splits = splits_of(pixels, _pieces(layer)[2])
    tasks = threads if pixels * size > SERIAL else 1
    return LINE + (splits * size if splits > 1 else 0) + tasks * _task_memory(layer, x_shape[2])


class Piece(NamedTuple):
    """A piece of dweight (some kernel rows and outputs of a group), and how dy is read for it."""

    cut: Cut  # the blocks of a layer that has only the kernel rows of this piece
    row: int  # the first kernel row
    group: int
    output: int  # the first output, counted over all groups
    columns: int  # outputs of the piece times pixels of a bundle
    dy_in_place: bool
    dy_step: int  # the distance from one pixel of dy, or of its copy, to the next; 0 if each panel has its own


@apart_jit
def _piece(number: int, layer: Layer, x: ndarray, dy: ndarray) -> Piece:
    """Return piece `number`; outputs vary fastest, then kernel rows, then groups."""
    kernel, across, outputs = layer.kernel, by_channels(layer), layer.groups * layer.outer
    rows, some, _ = _pieces(layer)
    outer = outputs if across else layer.outer
    cuts, bands = ceildiv(outer, some), kernel[0] // rows
    first, row, group = number % cuts * some, number // cuts % bands * rows, number // cuts // bands

    padding = layer.padding[0] - row * layer.dilation[0], layer.padding[1]
    part = Layer((rows, kernel[1]), layer.inner, layer.outer, layer.groups, layer.stride, padding, layer.dilation)
    bundle = bundle_of(part, False, x.shape[2], dy.shape[2], x) if rows == kernel[0] else 1
    v, h = forward_axis(part, 0, x.shape[1], dy.shape[1], 1), forward_axis(part, 1, x.shape[2], dy.shape[2], bundle)
    gap = lanes(x) if layer.inner % 64 == 0 else 0  # without this gap, pixels would share few sets of L1
    in_place = not across and inside(v) and inside(h)
    pixels = WEIGHT_KC // layer.stride[1]  # with a stride, a block of as many pixels reads more of x
    cut = cut_into_blocks(part, v, h, x.shape[0], in_place, gap, pixels, 0, x)

    # dy is read in place, or copied into panels if these use fewer cache lines and the copy saves more than it costs.
    few = across or rows * h.taps * layer.inner <= MAX_UNPACKED or outputs <= panel_width(x)
    dy_in_place = bundle == 1 and outer % lanes(x) == 0 and few
    columns = bundle * min(some, outer - first)
    dy_step = columns if bundle > 1 else (channel_width(x) if across else 0)
    if dy_in_place:
        dy_step = outputs
    return Piece(cut, row, group, group * layer.outer + first, columns, dy_in_place, dy_step)


@helper
def _weight_offsets(cut: Cut, array: ndarray) -> tuple[ndarray, ndarray]:
    """Return two offsets of each row of the tiles: in x (or in its copy), and in the sum. A row is a weight (u, v, c)
    of the piece. With bundles, v is a column of the bundle's window."""
    layer, h, outputs = cut.layer, cut.h, cut.layer.groups * cut.layer.outer
    weights = layer.kernel[0] * h.taps * layer.inner
    a_rows, c_rows = np.empty(weights, np.int64), np.empty(weights, np.int64)
    for r in range(weights):
        tap, c = r // layer.inner, r % layer.inner
        a_rows[r] = place(cut, 0, tap // h.taps * cut.v.spacing, tap % h.taps * h.spacing) + c * cut.channel
        c_rows[r] = r * (outputs if h.bundle == 1 else panel_width(array))
    return a_rows, c_rows


@helper
def _of_first_taps(cut: Cut, offsets: ndarray) -> ndarray:
    """Return those of the offsets (u, v, c) with v = 0: of the rows of the tiles of line_gradient.py."""
    inner = cut.layer.inner
    return offsets.reshape(offsets.size // (cut.h.taps * inner), cut.h.taps * inner)[:, :inner].copy().reshape(-1)


@helper
def _pixel_offsets(cut: Cut) -> ndarray:
    """Return the offset of each output pixel (or bundle) of a block in x, or in its copy."""
    offsets = np.empty(cut.images * cut.rows * cut.h.pixels, np.int64)
    for k in range(offsets.size):
        i, j = k // cut.h.pixels, k % cut.h.pixels
        offsets[k] = place(cut, i // cut.rows, i % cut.rows * cut.v.step, j * cut.h.step)
    return offsets


@helper
def _panel(number: int, piece: Piece, array: ndarray) -> tuple[int, int, int]:
    """Return the first column of a panel of the piece, its width, and the distance between pixels of dy."""
    if by_channels(piece.cut.layer):
        first = number * channel_width(array)
        return first, min(channel_width(array), piece.columns - first), piece.dy_step
    width = columns_of(number, piece.columns, array)
    step = piece.dy_step if piece.dy_step else whole_vectors(width, array)
    return number * panel_width(array), width, step


@helper
def _panels(piece: Piece, array: ndarray) -> int:
    """Return the number of panels of the piece."""
    if by_channels(piece.cut.layer):
        return ceildiv(piece.columns, channel_width(array))
    return panels_of(piece.columns, array)


@apart_jit
def _gather_dy(piece: Piece, block: Block, dy: ndarray, memory: ndarray) -> tuple[ndarray, int, int]:
    """Return a block of dy: array, offset and factor. The panel with first column p begins at offset + p * factor."""
    layer, h, lines = piece.cut.layer, piece.cut.h, block.images * block.rows
    outputs = layer.groups * layer.outer
    at = (block.image * piece.cut.v.out + block.row) * h.out * outputs + piece.output
    if piece.dy_in_place:
        return dy, at, 1
    if h.bundle > 1:  # the pixels of a bundle become contiguous; zeros fill up the last bundle of a line
        line, padded = h.out * layer.outer, h.pixels * piece.columns
        for i in range(lines):
            target = memory[i * padded : (i + 1) * padded]
            if layer.groups == 1:
                copy(dy[at + i * line : at + (i + 1) * line], target[:line])
            else:
                copy_pixels(h.out, layer.outer, dy, at + i * h.out * outputs, outputs, target, layer.outer)
            clear(target[line:])
    else:
        for p in range(_panels(piece, dy)):
            column, width, step = _panel(p, piece, dy)
            copy_pixels(lines * h.pixels, width, dy, at + column, outputs, memory[column * lines * h.pixels :], step)
    return memory, 0, lines * h.pixels


@apart_jit
def _unfold(cut: Cut, bundles: ndarray, total: ndarray) -> None:
    """Sum `bundles` (kh, taps, C, panel_width) into the outputs of a group in `total` (kh, kw, C, O).

    total: begins with the group's first output. For pixel p of a bundle, kernel column v is at tap v - p * tap_pixel of
    the window.
    """
    layer, h, kernel, outer = cut.layer, cut.h, cut.layer.kernel, cut.layer.outer
    for u in range(kernel[0]):
        for v in range(kernel[1]):
            for c in range(layer.inner):
                to = total[((u * kernel[1] + v) * layer.inner + c) * layer.groups * outer :]
                for o in range(outer):
                    to[o] = 0
                for p in range(h.bundle):
                    row = (u * h.taps + v - p * h.tap_pixel) * layer.inner + c
                    part = bundles[row * panel_width(bundles) + p * outer :]
                    for o in range(outer):
                        to[o] += part[o]


@apart_jit
def _part(
    number: int, split: int, splits: int, layer: Layer, x: ndarray, dy: ndarray, memory: ndarray, total: ndarray
) -> None:
    """Sum piece `number` of dweight over part `split` of the pixels; total: a vector of the size of dweight."""
    piece, across, outputs = _piece(number, layer, x, dy), by_channels(layer), layer.groups * layer.outer
    cut, columns = piece.cut, piece.columns
    a_rows, c_rows = _weight_offsets(cut, x)
    a_offsets = _pixel_offsets(cut)
    neighbours = not across and cut.h.bundle == 1 and computes_taps(cut.h, widest_panel(columns, x), x)
    x_rows, sum_rows = _of_first_taps(cut, a_rows), _of_first_taps(cut, c_rows)

    size = max(WEIGHT_KC, cut.h.pixels) * ceildiv(columns, NR) * NR + NR  # copy_pixels writes beyond the end
    dy_copy, x_copy = memory[:size], memory[size:]
    result, at = total, piece.row * layer.kernel[1] * layer.inner * outputs + piece.output
    if cut.h.bundle > 1:
        size = a_rows.size * NR
        result, at, x_copy = x_copy[:size], 0, x_copy[size:]

    source, gradient = x.reshape(-1), dy.reshape(-1)
    first, last = split * cut.blocks // splits, (split + 1) * cut.blocks // splits
    if first == last:
        for row in c_rows:
            result[at + row : at + row + columns] = 0
    for i in range(first, last):
        block = block_at(cut, i)
        a, a_at = gather(cut, block, piece.group, source, x_copy)
        b, b_at, b_panel = _gather_dy(piece, block, gradient, dy_copy)
        pixels, accumulate = block.images * block.rows * cut.h.pixels, i > first
        ahead = pixels * outputs if piece.dy_in_place else 0
        for p in range(_panels(piece, x)):
            column, width, step = _panel(p, piece, x)
            if across:
                channel_panel(a_rows.size, pixels, accumulate, a, a_offsets, a_rows, a_at + column,
                              b, b_at + column * b_panel, step, result, c_rows, at + column, width, False, x_copy, 0,
                              x_copy)  # fmt: skip
            elif neighbours:
                line_gradient(cut.h.taps, cut.h.step, block.images * block.rows, cut.h.pixels, accumulate, a, x_rows,
                              a_offsets, cut.pixel, a_at, b, b_at + column * b_panel, step, result, sum_rows,
                              layer.inner * outputs, at + column, width, ahead)  # fmt: skip
            else:
                panel(a_rows.size, pixels, accumulate, a, a_offsets, a_rows, a_at,
                      b, b_at + column * b_panel, step, result, c_rows, at + column, width, False, x_copy, 0,
                      x_copy)  # fmt: skip
    if cut.h.bundle > 1:
        _unfold(cut, result, total[piece.output :])


@helper
def add_parts(task: int, tasks: int, parts: ndarray, splits: int, total: ndarray) -> None:
    """Compute this task's section of `total`: add the vectors in `parts`, in order; splits: the number of vectors."""
    lo, hi = task * total.size // tasks, (task + 1) * total.size // tasks
    sums = total[lo:hi]
    for split in range(splits):
        part = parts[split * total.size + lo : split * total.size + hi]
        for i in range(sums.size):
            sums[i] = sums[i] + part[i] if split else part[i]


@apart_jit
def _task(
    phase: int, task: int, tasks: int, pieces: int, splits: int, layer: Layer, each: int, x: ndarray, dy: ndarray,
    memory: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """In phase 0, sum pieces, each over one part of the pixels. In phase 1, add up the parts for this task's section of
    dweight."""
    total = dweight.reshape(-1)
    mine = memory[memory.size - (task + 1) * each : memory.size - task * each]
    if phase == 1:
        add_parts(task, tasks, memory, splits, total)
        return
    for i in range(task * pieces * splits // tasks, (task + 1) * pieces * splits // tasks):
        piece, split = i % pieces, i // pieces
        part = memory[split * total.size : (split + 1) * total.size] if splits > 1 else total
        _part(piece, split, splits, layer, x, dy, mine, part)


@parallel_jit
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray,
    dweight: ndarray,
) -> None:  # fmt: skip
    """Compute dweight = dL/dweight from x (N, H, W, C) and dy (N, Ho, Wo, O)."""
    layer = layer_of(dweight.shape, False, groups, stride, padding, dilation)
    pieces = _pieces(layer)[2]
    splits = splits_of(dy.shape[0] * dy.shape[1] * dy.shape[2], pieces)
    each = _task_memory(layer, x.shape[2])
    tasks = (scratch.size - LINE - (splits * dweight.size if splits > 1 else 0)) // each
    memory = aligned(scratch)
    for phase in range(2 if splits > 1 else 1):
        for task in prange(tasks):  # task is unsigned; a tuple of tuples (a Layer) cannot be passed into the loop
            same = layer_of(dweight.shape, False, groups, stride, padding, dilation)
            _task(phase, np.int64(task), tasks, pieces, splits, same, each, x, dy, memory, dweight)
