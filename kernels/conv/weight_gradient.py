"""Direct convolution, weight gradient: dweight[u, v, c, o] = sum over pixels of x[pixel + (u, v), c] dy[pixel, o].

Again the micro-kernel of matmul/tile.py, with the roles changed: its rows are the weights (v, c) of a kernel row u, its
columns the output channels, and what it sums over are pixels: a row of output pixels is a depth, rows are taps.

The sum over all pixels of all images is long, the result small. So dweight is cut into pieces that stay in cache, the
images into `splits` parts, and each task adds up one piece over one part; at the end the parts are added in their
order. How many there are depends on the sizes alone: neither the number of threads nor who is first changes a bit.

With few outputs, blocks of neighbouring pixels are computed as one pixel (geometry.py): the tile's rows are then the
places of the block's window, and each weight is the sum of what it got from every pixel of the block.

Within a part, each block of pixels is summed from 0 and then added: sums of sums round less (README, "Accuracy").
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, jit, parallel_jit, prange, threads
from minidl.kernels.matmul.tile import lanes, panel, panel_width

from .channels import channel_panel, channel_width
from .direct import BUFFER, PANEL, SERIAL, block_shape, by_channels, expand
from .geometry import LINE, MOST, Axis, aligned, blocks_of, copy_with_halo, forward_axis, forward_blocks, inside, span
from .reference import Pair, Shape, output_size

PIXELS = 256  # of a block
PIECE = 96 * 1024  # numbers of dweight that a task sums: they stay in L2
FEW = 64  # rows of tiles for which a copy of dy would not pay
TASKS = 16  # at least, where there are blocks enough


def _pieces(kernel: Pair, inner: int, outer: int, groups: int) -> tuple[int, int, int]:
    """How dweight is cut: kernel rows of a piece, outputs of a piece, pieces."""
    if by_channels(groups, outer):
        return kernel[0], groups * outer, 1
    panels = (outer + PANEL - 1) // PANEL
    rows = kernel[0] if kernel[0] * kernel[1] * inner * PANEL <= PIECE else 1
    most = max(1, PIECE // (rows * kernel[1] * inner * PANEL))  # panels
    cuts = (panels + most - 1) // most
    each = (panels + cuts - 1) // cuts
    return rows, each * PANEL, groups * (kernel[0] // rows) * ((panels + each - 1) // each)


pieces_of = jit(_pieces)


def _splits(pixels: int, pieces: int) -> int:
    """Into how many parts the sum over pixels is cut: a function of sizes alone."""
    return max(1, min((pixels + PIXELS - 1) // PIXELS // 2, TASKS // pieces))


splits_of = jit(_splits)


def _task_memory(kernel: Pair, width: int, inner: int, outer: int, groups: int, stride: Pair, padding: Pair,
                 dilation: Pair) -> int:  # fmt: skip
    """Numbers that a task needs: the copies of a block of dy and of x, the gradient of a block."""
    rows = (kernel[0] - 1) * dilation[0] + 1
    columns = width + 2 * padding[1] + (kernel[1] - 1) * dilation[1] + 2 * MOST * stride[1]
    blocks = kernel[0] * (kernel[1] + MOST * stride[1]) * inner * PANEL if groups == 1 and 2 * outer <= PANEL else 0
    across = by_channels(groups, outer)
    pixel, gradient = (inner * (groups * outer + PANEL), groups * outer) if across else (inner + PANEL, outer)
    copies = max(PIXELS, columns) * (gradient + PANEL) + max(BUFFER, rows * columns * pixel)
    return PANEL + blocks + copies


task_memory = jit(_task_memory)


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    kernel, inner, outer = (w_shape[0], w_shape[1]), w_shape[2], w_shape[3] // groups
    size = w_shape[0] * w_shape[1] * w_shape[2] * w_shape[3]
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    pixels = x_shape[0] * out[0] * out[1]
    splits = _splits(pixels, _pieces(kernel, inner, outer, groups)[2])
    tasks = threads() if pixels * size > SERIAL else 1
    each = _task_memory(kernel, x_shape[2], inner, outer, groups, stride, padding, dilation)
    return LINE + (splits * size if splits > 1 else 0) + tasks * each


@jit
def _copy_gradient(
    dy: ndarray, at: int, pixels: int, pixel: int, first: int, outputs: int, width: int, target: ndarray
) -> None:
    """target (panels, pixels, width) = dy (pixels, pixel) from output `first` on; beyond the last of them 0."""
    for o in range(0, outputs, width):
        some = min(width, outputs - o)
        for i in range(pixels):
            start = at + i * pixel + first + o
            source = dy[start : start + some]
            row = target[o * pixels + i * width : o * pixels + (i + 1) * width]
            for j in range(some):
                row[j] = source[j]
            for j in range(some, width):
                row[j] = 0


@jit
def _copy_lines(dy: ndarray, at: int, lines: int, size: int, padded: int, target: ndarray) -> None:
    """target (lines, padded) = dy (lines, size) from `at` on; 0 after them"""
    for i in range(lines):
        source = dy[at + i * size : at + (i + 1) * size]
        row = target[i * padded : (i + 1) * padded]
        for j in range(size):
            row[j] = source[j]
        for j in range(size, padded):
            row[j] = 0


@jit
def _unfold(blocks: ndarray, h: Axis, kernel: Pair, inner: int, outputs: int, total: ndarray) -> None:
    """total (kh, kw, C, O) from blocks (kh, taps, C, panel_width): pixel p saw tap v at place v - p tap_pixel."""
    total[:] = 0
    for u in range(kernel[0]):
        for v in range(kernel[1]):
            for c in range(inner):
                to = total[((u * kernel[1] + v) * inner + c) * outputs :]
                for p in range(h.block):
                    place = v - p * h.tap_pixel
                    part = blocks[((u * h.taps + place) * inner + c) * panel_width(blocks) + p * outputs :]
                    for o in range(outputs):
                        to[o] += part[o]


@apart_jit
def _part(
    piece: int, split: int, splits: int, x: ndarray, dy: ndarray, groups: int, kernel: Pair, stride: Pair,
    padding: Pair, dilation: Pair, memory: ndarray, total: ndarray,
) -> None:  # fmt: skip
    """One piece of dweight, summed over one part of the pixels; total is a whole dweight, as a vector."""
    images, height, width, pixel = x.shape
    outputs = dy.shape[3]
    inner, outer = pixel // groups, outputs // groups
    across = by_channels(groups, outer)
    source, gradient = x.reshape(-1), dy.reshape(-1)

    # which piece: kernel rows from u on, outputs from o on, of group g
    some_u, some_o, _ = pieces_of(kernel, inner, outer, groups)
    cuts = (outputs if across else outer) + some_o - 1
    cuts = cuts // some_o
    o, u = piece % cuts * some_o, piece // cuts % (kernel[0] // some_u) * some_u
    g = piece // cuts // (kernel[0] // some_u)
    some_o = min(some_o, (outputs if across else outer) - o)
    o += g * outer

    v = forward_axis(height, dy.shape[1], some_u, stride[0], padding[0] - u * dilation[0], dilation[0])
    h = forward_axis(width, dy.shape[2], kernel[1], stride[1], padding[1], dilation[1])
    together = 1
    if groups == 1 and dilation[1] == 1 and some_u == kernel[0]:
        together = blocks_of(width, dy.shape[2], kernel, stride[1], padding[1], some_o < 0, inner, outer, x)
    if together > 1:
        h = forward_blocks(width, dy.shape[2], kernel[1], stride[1], padding[1], together)
    columns_of_dy = together * some_o
    in_place = not across and inside(v) and inside(h)
    row_of_outputs = (outputs + lanes(x) - 1) // lanes(x) * lanes(x)
    expanded = across and inner * outer > 1
    padded = pixel if in_place or across else inner
    if expanded:
        padded = inner * row_of_outputs
    if not in_place and not across and inner % 64 == 0:
        padded += lanes(x)  # pixels a power of two apart would share few places in L1
    columns = width if in_place else span(h, h.pixels)
    some_images, some_rows = block_shape(v, h, images, 0 if in_place else padded, max(PIXELS, min(0, images)))
    lines = height if in_place else span(v, some_rows)

    # rows of the tiles: the weights of the piece; what is summed over: pixels
    weights = some_u * h.taps * inner
    a_rows, c_rows = np.empty(weights, np.int64), np.empty(weights, np.int64)
    for r in range(weights):
        tap, c = r // inner, r % inner
        a_rows[r] = (tap // h.taps * dilation[0] * columns + tap % h.taps * dilation[1]) * padded
        a_rows[r] += c * (row_of_outputs if across else 1)
        c_rows[r] = r * (outputs if together == 1 else panel_width(x))
    # dy is read where it lies, or copied into panels: fewer cache lines, and zeros beyond the last output
    dy_in_place = together == 1 and (outputs if across else outer) % lanes(x) == 0 and (across or weights <= FEW)
    depth = 1 if across else h.pixels
    taps = some_images * some_rows * h.pixels // depth
    panel_of_dy = channel_width(x) if across else panel_width(x)
    dy_step = outputs if dy_in_place else (columns_of_dy if together > 1 else panel_of_dy)
    a_taps, b_taps = np.empty(taps, np.int64), np.empty(taps, np.int64)
    for t in range(taps):
        i, j = t * depth // h.pixels, t * depth % h.pixels
        a_taps[t] = ((i // some_rows * lines + i % some_rows * v.step) * columns + j * h.step) * padded
        b_taps[t] = t * depth * dy_step
    size = max(PIXELS, h.pixels) * ((columns_of_dy + PANEL - 1) // PANEL * PANEL)
    db, xb = memory[:size], memory[size:]
    result, at = total, u * kernel[1] * inner * outputs + o
    if together > 1:
        result, xb, at = xb[: weights * PANEL], xb[weights * PANEL :], at - at

    down = (v.pixels + some_rows - 1) // some_rows
    blocks = (images + some_images - 1) // some_images * down
    first_block, last_block = split * blocks // splits, (split + 1) * blocks // splits
    if first_block == last_block:
        for r in range(weights):
            result[at + c_rows[r] : at + c_rows[r] + columns_of_dy] = 0
    for block in range(first_block, last_block):
        image, i = block // down * some_images, block % down * some_rows
        rows, count = min(some_rows, v.pixels - i), min(some_images, images - image)
        pixels = count * rows * h.pixels
        top = i * v.step + v.offset
        a, a_at = xb, 0
        if in_place:
            a, a_at = source, ((image * height + top) * width + h.offset) * pixel + g * inner
        for n in range(0 if in_place else count):
            picture = source[(image + n) * height * width * pixel : (image + n + 1) * height * width * pixel]
            target = xb[n * lines * columns * padded :]
            if expanded:
                expand(picture, height, width, pixel, top, span(v, rows), h.offset, columns,
                       inner, outer, row_of_outputs, target)  # fmt: skip
            else:
                copy_with_halo(picture, height, width, pixel, top, span(v, rows), h.offset, columns,
                               g * inner, pixel if across else inner, padded, target)  # fmt: skip
        b, b_at, b_panel = gradient, (image * v.out + i) * h.out * outputs + o, 1
        if together > 1:
            _copy_lines(gradient, b_at, count * rows, dy.shape[2] * outputs, h.pixels * columns_of_dy, db)
        elif not dy_in_place:
            _copy_gradient(gradient, b_at - o, pixels, outputs, o, some_o, panel_of_dy, db)
        if not dy_in_place:
            b, b_at, b_panel = db, 0, pixels
        for p in range(0, columns_of_dy, panel_of_dy):
            some, accumulate = min(panel_of_dy, columns_of_dy - p), block > first_block
            if across:
                channel_panel(weights, pixels, accumulate, a, a_taps, a_rows, a_at + p, b, b_taps, b_at + p * b_panel,
                              result, c_rows, at + p, some)  # fmt: skip
            else:
                panel(weights, pixels // depth, depth, accumulate, a, a_taps, a_rows, a_at, h.step * padded,
                      b, b_taps, b_at + p * b_panel, dy_step, result, c_rows, at + p, some)  # fmt: skip
    if together > 1:
        _unfold(result, h, kernel, inner, outputs, total)


@jit
def _add_parts(task: int, tasks: int, parts: ndarray, splits: int, total: ndarray) -> None:
    """total = the sum of `splits` vectors of its size, in their order; this task's share of it."""
    lo, hi = task * total.size // tasks, (task + 1) * total.size // tasks
    sums = total[lo:hi]
    for split in range(splits):
        part = parts[split * total.size + lo : split * total.size + hi]
        if split == 0:
            for i in range(sums.size):
                sums[i] = part[i]
        else:
            for i in range(sums.size):
                sums[i] += part[i]


@apart_jit
def _task(
    phase: int, worker: int, workers: int, pieces: int, splits: int, each: int, x: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, memory: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """First some pieces of some parts of the sum, then, if there are several parts, a share of dweight."""
    total = dweight.reshape(-1)
    mine = memory[memory.size - (worker + 1) * each : memory.size - worker * each]
    if phase == 1:
        _add_parts(worker, workers, memory, splits, total)
        return
    for task in range(worker * pieces * splits // workers, (worker + 1) * pieces * splits // workers):
        piece, split = task % pieces, task // pieces
        part = memory[split * total.size : (split + 1) * total.size] if splits > 1 else total
        _part(piece, split, splits, x, dy, groups, dweight.shape[:2], stride, padding, dilation, mine, part)


@parallel_jit
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray,
    dweight: ndarray,
) -> None:  # fmt: skip
    kernel, inner, outer = dweight.shape[:2], dweight.shape[2], dweight.shape[3] // groups
    pieces = pieces_of(kernel, inner, outer, groups)[2]
    splits = splits_of(dy.shape[0] * dy.shape[1] * dy.shape[2], pieces)
    each = task_memory(kernel, x.shape[2], inner, outer, groups, stride, padding, dilation)
    workers = (scratch.size - LINE - (splits * dweight.size if splits > 1 else 0)) // each
    memory = aligned(scratch)
    for phase in range(2 if splits > 1 else 1):
        for worker in prange(workers):
            _task(phase, np.int64(worker), workers, pieces, splits, each, x, dy,
                  groups, stride, padding, dilation, memory, dweight)  # fmt: skip
