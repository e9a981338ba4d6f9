"""Direct convolution, forward and data gradient: two micro-kernels compute the sum of the definition.

The work consists of passes; a pass computes one sum of the form in geometry.py. Forward needs one pass. The data
gradient needs one pass for each remainder of a pixel's position modulo the stride (see `_cut`). The outputs of a pass
are divided into blocks (blocks.py). For each block:

1. Unless the source can be read in place, `gather` copies what the block reads, with zeros around it, into memory
   that stays in the core's cache.
2. `_sum` computes about CHUNK pixels of a panel of outputs. A panel has as many channels as a tile has columns. The
   rows of a tile are pixels. Where neighbouring pixels share numbers of the source, the tile of line.py computes most
   of a line. The tile of matmul/tile.py computes all others: a table contains their offsets, so any stride is possible,
   and a tile may continue on the next line of the image. The tiles apply bias, scale and shift, shortcut and relu
   before they store their sums.
3. Groups with few outputs use the tile of channels.py, or bundles of pixels (geometry.py). The sums of a bundle are
   contiguous, its pixels in y are not, so `spread_rows` copies them.

The micro-kernels sum about KC products at a time, and then these sums are added: the rounding error is smaller than
that of one long sum (README.md, "Accuracy"). The tile of channels.py computes one long sum.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange
from minidl.kernels.matmul.blocks import LINE, MR, aligned
from minidl.kernels.matmul.tile import columns_of, panel, panel_width, panels_of, whole_vectors

from . import geometry
from .blocks import Cut, block_at, copy_size, cut_into_blocks, gather, place, row_of_outputs
from .channels import channel_panel, channel_width
from .geometry import (
    Layer,
    axes_of,
    bundle_of,
    bundles_in_tiles,
    by_channels,
    ceildiv,
    layer_of,
    passes_of,
    whole_bundles,
)
from .line import line_panel
from .norms import Norms, add_rest, add_up
from .packing import count_of_threes, pack, panel_at, products_of
from .reference import Pair, Shape
from .rows import fill_end, spread_rows
from .sizes import CHUNK, FEWEST_PIXELS, KC, MAX_BUNDLE, MC, NR, SERIAL


@helper
def _packed_size(layer: Layer) -> int:
    """Return an upper limit for the total size of the packed weights and of the array that rows.py calls `end`."""
    bundled = 2 * layer.outer <= NR and not by_channels(layer)
    taps = layer.kernel[0] * (layer.kernel[1] + (MAX_BUNDLE * layer.stride[1] if bundled else 0))
    row = layer.groups * layer.outer + NR if by_channels(layer) else layer.groups * (layer.outer + NR)
    return (taps * layer.inner + 4) * row + NR + LINE


@helper
def packed_size(w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair) -> int:
    """Return the number of elements of convolve's `packed`: the weights, and whether they are there."""
    return _packed_size(layer_of(w_shape, False, groups, stride, padding, dilation)) + 1


@helper
def _task_memory(layer: Layer, width: int) -> int:
    """Return the size of a task's memory: the sums of a chunk of pixels, and the copy of what a block reads."""
    return CHUNK * NR + copy_size(layer, width, 0)[1]


@helper
def scratch_size(
    threads: int, x_shape: Shape, w_shape: Shape, backward: bool, groups: int, stride: Pair, padding: Pair,
    dilation: Pair,
) -> int:  # fmt: skip
    """Return the number of elements of convolve's scratch; x_shape (N, H, W, C), w_shape (kh, kw, C/groups, O)."""
    layer = layer_of(w_shape, backward, groups, stride, padding, dilation)
    products = x_shape[0] * x_shape[1] * x_shape[2] * w_shape[0] * w_shape[1] * w_shape[2] * w_shape[3]
    tasks = threads if products > SERIAL * stride[0] * stride[1] else 1
    return _packed_size(layer) + tasks * _task_memory(layer, x_shape[2])


@helper
def _source_offsets(cut: Cut, products: ndarray) -> ndarray:
    """Return the offset of each product of a sum, in what a block reads."""
    offsets = np.empty(products.shape[0], np.int64)
    for k in range(offsets.size):
        s, t, channel = products[k, 0], products[k, 1], products[k, 2]
        offsets[k] = place(cut, 0, s * cut.v.spacing, t * cut.h.spacing) + channel * cut.channel
    return offsets


@helper
def _pixel_offsets(cut: Cut, outputs: int, ends: tuple[int, int, int]) -> tuple[ndarray, ndarray]:
    """Return two offsets of each bundle (geometry.py) of a block: in what the block reads, and in the output.

    ends: where each of three parts of a row of outputs ends. The first parts of all rows come first, and so on.
    """
    v, h, lines = cut.v, cut.h, cut.images * cut.rows
    a_rows, c_rows = np.empty(lines * h.pixels, np.int64), np.empty(lines * h.pixels, np.int64)
    for line in range(lines):
        image, i = line // cut.rows, line % cut.rows
        for j in range(h.pixels):
            part = 0 if j < ends[0] else 1 if j < ends[1] else 2
            begin = ends[part - 1] if part else 0
            r = lines * begin + line * (ends[part] - begin) + j - begin
            a_rows[r] = place(cut, image, i * v.step, j * h.step)
            c_rows[r] = ((image * v.out + i * v.stride) * h.out + j * h.stride) * outputs
    return a_rows, c_rows


@apart_jit
def _sum(
    length: int, step: int, pixel: int, threes: int, a: ndarray, a_offsets: ndarray, a_rows: ndarray, a_at: int,
    b: ndarray, b_at: int, b_step: int, c: ndarray, c_rows: ndarray, c_at: int, width: int, finish: bool, end: ndarray,
    end_at: int, shortcut: ndarray,
) -> None:  # fmt: skip
    """Compute c (rows, width), the sums of a chunk of pixels in a panel of outputs; about KC products at a time.

    If `finish`, apply the end of the layer to c. If line.py computes the chunk, length, step and pixel are those of
    line_panel, otherwise `length` is 0. threes: see count_of_threes; 0 if the pass does not use line.py.
    """
    rows, depth, k = a_rows.size, a_offsets.size, 0
    while k < depth:
        rest = threes - k if k < threes and depth > KC else depth - k
        # A multiple of 6: whole groups of 3 and of 2 taps
        some = min(rest, ceildiv(ceildiv(rest, ceildiv(rest, KC)), 6) * 6)
        finishes = finish and k + some == depth
        if length:
            in_threes = min(some, max(0, threes - k))
            line_panel(rows // length, length, step, in_threes // 3, (some - in_threes) // 2, k > 0, a, a_offsets[k:],
                       a_rows, pixel, a_at, b, b_at + k * b_step, b_step, c, c_rows, c_at, width, finishes, end, end_at,
                       shortcut)  # fmt: skip
        else:
            panel(rows, some, k > 0, a, a_offsets[k:], a_rows, a_at, b, b_at + k * b_step, b_step,
                  c, c_rows, c_at, width, finishes, end, end_at, shortcut)  # fmt: skip
        k += some


@apart_jit
def _clear(task: int, tasks: int, cut: Cut, shortcut: ndarray, y: ndarray) -> None:
    """Set this task's pixels to 0, or to the shortcut: a pass has no taps if, for example, the stride exceeds kh."""
    v, h, outputs = cut.v, cut.h, cut.layer.groups * cut.layer.outer
    for image in range(task * cut.batch // tasks, (task + 1) * cut.batch // tasks):
        for i in range(v.pixels):
            for j in range(h.pixels):
                column = h.first + j * h.stride
                at = ((image * v.out + v.first + i * v.stride) * h.out + column) * outputs
                for o in range(at, at + min(h.bundle, h.out - column) * outputs):
                    y[o] = 0.0 + shortcut[o] if shortcut.size else 0.0


@helper
def _divides_panels(layer: Layer, source: ndarray, norms: Norms) -> bool:
    """Return whether the tasks divide the panels of weights among themselves instead of the blocks of pixels.

    Then each task reads its panels and all of the source, instead of all panels and its part of the source.
    """
    weights = layer.kernel[0] * layer.kernel[1] * layer.inner * layer.groups * layer.outer
    return weights > source.size and norms.sums.shape[0] == 0  # norms add up whole rows


@apart_jit
def _pass(
    task: int, tasks: int, cut: Cut, source: ndarray, packed: ndarray, memory: ndarray, finish: bool, end: ndarray,
    shortcut: ndarray, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute this task's part of a pass. If `finish`, also apply the end of the layer (matmul/tile.py).

    norms: with sums, only if there is a single pass
    """
    layer, v, h, across = cut.layer, cut.v, cut.h, by_channels(cut.layer)
    x, y = source.reshape(-1), out.reshape(-1)
    if v.taps * h.taps == 0:
        _clear(task, tasks, cut, shortcut, y)
        return
    outputs = layer.groups * layer.outer
    pixels = bundles_in_tiles(layer, h, packed)
    ends = pixels, whole_bundles(h), h.pixels
    threes = count_of_threes(cut) if pixels else 0
    a_rows, c_rows = _pixel_offsets(cut, outputs, ends)
    sums, copied = memory[: CHUNK * NR], memory[CHUNK * NR :]
    rows_of_sums = np.arange(CHUNK) * panel_width(sums)
    apart = layer.groups > 1 and h.bundle > 1  # in y, other groups lie between the outputs of a bundle
    a_offsets = _source_offsets(cut, products_of(cut, pixels > 0))
    groups, columns, width = layer.groups, h.bundle * layer.outer, panel_width(packed)
    panels = panels_of(columns, packed)
    if across:
        groups, columns, width = 1, outputs, channel_width(packed)
        panels = ceildiv(columns, width)
    first_block, last_block = task * cut.blocks // tasks, (task + 1) * cut.blocks // tasks
    first_panel, last_panel = 0, groups * panels
    if _divides_panels(layer, source, norms):
        first_block, last_block = 0, cut.blocks
        first_panel, last_panel = task * groups * panels // tasks, (task + 1) * groups * panels // tasks
    begin = block_at(cut, first_block)
    since = (begin.image * v.out + begin.row) * h.out
    for i in range(first_block, last_block):
        block = block_at(cut, i)
        pixel = ((block.image * v.out + v.first + block.row * v.stride) * h.out + h.first) * outputs
        for group in range(first_panel // panels, ceildiv(last_panel, panels)):
            a, a_at = gather(cut, block, group, x, copied)
            for p in range(max(0, first_panel - group * panels), min(panels, last_panel - group * panels)):
                at, channel = pixel + group * layer.outer + p * width, 0
                if across:  # the panels are side by side
                    each, b_step = min(width, columns - p * width), row_of_outputs(layer, 1, packed)
                    end_at, b_at, channel = p * width, p * width, p * width
                else:
                    each = columns_of(p, columns, packed)
                    end_at, b_step = panel_at(cut, group, p, packed), whole_vectors(each, packed)
                    b_at = end_at * a_offsets.size
                for part in range(3):  # the tiles of line.py, other complete bundles, the incomplete one of each row
                    first_of_row = ends[part - 1] if part else 0
                    top = cut.images * cut.rows * first_of_row
                    stop = top + block.images * block.rows * (ends[part] - first_of_row)
                    some = h.rest * layer.outer if part == 2 else each
                    chunk = max(1, CHUNK // pixels) * pixels if part == 0 and pixels else CHUNK
                    for first in range(top, stop, chunk):
                        last = min(first + chunk, stop)
                        rows = c_rows[first:last]
                        if across:
                            channel_panel(last - first, a_offsets.size, False, a, a_offsets, a_rows[first:last],
                                          a_at + channel, packed, b_at, b_step, y, rows, at, some, finish, end, end_at,
                                          shortcut)  # fmt: skip
                        elif apart:
                            _sum(0, 0, 0, threes, a, a_offsets, a_rows[first:last], a_at, packed, b_at, b_step,
                                 sums, rows_of_sums, 0, some, False, end, 0, shortcut)  # fmt: skip
                            for o in range(0, some, layer.outer):  # one pixel of each bundle
                                spread_rows(sums, o, y, rows, at + o // layer.outer * outputs, layer.outer, finish,
                                            end, end_at, shortcut)  # fmt: skip
                        else:
                            _sum(0 if part else pixels, h.step, cut.pixel, threes, a, a_offsets, a_rows[first:last],
                                 a_at, packed, b_at, b_step, y, rows, at, some, finish, end, end_at,
                                 shortcut)  # fmt: skip
        since = add_up(out, since, ((block.image + block.images - 1) * v.out + block.row + block.rows) * h.out, norms)


@apart_jit
def _cut(remainder: int, bundle: int, tasks: int, layer: Layer, source: ndarray, backward: bool, out: ndarray) -> Cut:
    """Return pass number `remainder`, cut into blocks. Without bundles, taps that read only outside the source are left
    out."""
    size, of_y = (out.shape[1:3], source.shape[1:3]) if backward else (source.shape[1:3], out.shape[1:3])
    v, h = axes_of(layer, backward, size, of_y, remainder, bundle)
    v = geometry.trimmed(v)
    if bundle == 1:
        h = geometry.trimmed(h)
    contiguous = layer.groups == 1 or v.taps * h.taps == 1  # neighbouring taps are adjacent in the source
    in_place = contiguous and not by_channels(layer) and geometry.inside(v) and geometry.inside(h)
    total = source.shape[0] * v.pixels * h.pixels
    pixels = total // (4 * tasks)
    if pixels < FEWEST_PIXELS:
        pixels = ceildiv(ceildiv(total, tasks), MR) * MR
    return cut_into_blocks(layer, v, h, source.shape[0], in_place, 0, min(MC, pixels), tasks, source)


@helper
def _bundle(layer: Layer, backward: bool, source: ndarray, out: ndarray) -> int:
    """Return how many neighbouring pixels are computed as one (geometry.py)."""
    wide, out_wide = source.shape[2], out.shape[2]
    return bundle_of(layer, backward, out_wide if backward else wide, wide if backward else out_wide, source)


@apart_jit
def _task(
    phase: int, task: int, tasks: int, source: ndarray, weight: ndarray, backward: bool, shortcut: ndarray,
    finish: bool, layer: Layer, each: int, kept: ndarray, memory: ndarray, out: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """In phase 0, pack this task's panels of weights. In phase 1, compute its blocks of pixels, or all pixels in its
    panels."""
    bundle = _bundle(layer, backward, source, out)
    row = row_of_outputs(layer, bundle, memory)
    end, packed = memory[: 4 * row], kept if kept.size else memory[4 * row :]
    mine = memory[memory.size - (task + 1) * each : memory.size - task * each]
    panels = 1 if by_channels(layer) else layer.groups * panels_of(bundle * layer.outer, memory)
    at = 0
    for remainder in range(passes_of(layer, backward)):
        if bundle > 1 and remainder % layer.stride[1]:
            continue  # the pass for horizontal remainder 0 computes these pixels, too
        together = 1 if _divides_panels(layer, source, norms) else tasks  # tasks that divide the blocks
        cut = _cut(remainder, bundle, together, layer, source, backward, out)
        if phase == 0:
            products = products_of(cut, bundles_in_tiles(layer, cut.h, packed) > 0)
            for number in range(task * panels // tasks, (task + 1) * panels // tasks):
                pack(number, cut, products, weight, backward, packed[at:])
        else:
            _pass(task, tasks, cut, source, packed[at:], mine, finish, end, shortcut, out, norms)
        at += cut.v.taps * cut.h.taps * layer.inner * row


@parallel_jit
def convolve(
    source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, packed: ndarray, scratch: ndarray, out: ndarray,
    norms: Norms,
) -> None:  # fmt: skip
    """Compute out = y from source = x or, if `backward`, out = dx from source = dy.

    If `backward`, only a shortcut may be added: bias, scale, shift and packed must be empty, and relu must be false.
    packed: see reference.py. norms.before must be of size 0; norms.sums may be used if there is a single pass.
    """
    layer = layer_of(weight.shape, backward, groups, stride, padding, dilation)
    each = _task_memory(layer, out.shape[2] if backward else source.shape[2])
    tasks = (scratch.size - _packed_size(layer)) // each
    memory, kept = aligned(scratch), aligned(packed)
    bundle = _bundle(layer, backward, source, out)
    fill_end(bias, scale, shift, relu, 1 if by_channels(layer) else groups, bundle,
             memory[: 4 * row_of_outputs(layer, bundle, memory)])  # fmt: skip
    finish = relu or bias.size + scale.size + shortcut.size > 0
    first_phase = 1 if packed.size and packed[packed.size - 1] else 0  # whether the weights are packed already
    if tasks == 1:  # without a parallel loop, no other thread has to wake up
        for phase in range(first_phase, 2):
            _task(phase, 0, 1, source, weight, backward, shortcut, finish, layer, each, kept, memory, out,
                  norms)  # fmt: skip
        first_phase = 2
    for phase in range(first_phase, 2):
        for task in prange(tasks):  # task is unsigned; Numba cannot pass a tuple of tuples (a Layer) into the loop
            same = layer_of(weight.shape, backward, groups, stride, padding, dilation)
            _task(phase, np.int64(task), tasks, source, weight, backward, shortcut, finish, same, each, kept, memory,
                  out, norms)  # fmt: skip
    add_rest(out, norms)
    if packed.size:
        packed[packed.size - 1] = 1
