"""Direct convolution, forward and data gradient: the sum as it stands, on the micro-kernel of matmul/tile.py.

Both are passes as geometry.py describes them. A pass is cut into blocks of output pixels: some rows of an image, or
several small images. For each,

1. what the block looks at is copied, with zeros around it, into memory that stays in the core's cache: afterwards
   there are no borders. (Not where nothing looks beyond the borders: then the source itself serves.)
2. for each panel of output channels, for some pixels at a time, the micro-kernel sums. Its rows are pixels (a table
   says where each is: any stride, and a tile goes on in the next row of the image), its taps the rows of the kernel;
   kw taps of C channels lie beside each other in memory and are one depth of kw C.
3. while these pixels are in L1: bias, scale and shift, shortcut, relu.

No more than about DEPTH products are summed in one go: a sum of such sums rounds less (README, "Accuracy").
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, apart_jit, jit, parallel_jit, prange, threads
from minidl.kernels.matmul.tile import lanes, panel, panel_width

from .channels import channel_panel, channel_width
from .geometry import (
    LINE,
    MOST,
    Axis,
    aligned,
    blocks_of,
    copy_with_halo,
    forward_axis,
    forward_blocks,
    gradient_axis,
    gradient_blocks,
    inside,
    span,
)
from .reference import Pair, Shape
from .rows import fill_end, finish_rows

PIXELS = 512  # of a block, at most
CHUNK = 64  # pixels that are finished together
BUFFER = 48 * 1024  # numbers that a block's copy may have: it shares L2 with a panel of weights
DEPTH = 384
SERIAL = 500_000  # products: fewer are not worth a second thread
PANEL = VECTOR_BYTES // 2  # panel_width of float32; float64 needs no more memory


@jit
def by_channels(groups: int, outer: int) -> bool:
    """Whether groups have so few outputs that vectors should run across groups.

    A group by itself fills outer / 16 of each vector; across groups all of it is filled, but the tile is half as fast,
    and each number of x is copied to the lane of every output. Measured (float32, 32 channels, 3 x 3 and 5 x 5): with 2
    outputs in a group across is 3 to 4 times as fast, with 4 as fast, with 8 a third as fast.
    """
    return groups > 1 and 8 * outer <= PANEL  # whatever the type: the sizes of scratch depend on it


# -- memory ----------------------------------------------------------------------------------------------------


def _packed(kernel: Pair, inner: int, outer: int, groups: int, stride: Pair) -> int:
    """Numbers of all packed weights, and of the end of a layer, at most."""
    taps = kernel[0] * (kernel[1] + (MOST * stride[1] if groups == 1 and 2 * outer <= PANEL else 0))
    return (taps * inner + 5) * groups * (outer + PANEL) + PANEL + LINE


def _task_memory(kernel: Pair, width: int, inner: int, outer: int, groups: int, stride: Pair, padding: Pair,
                 dilation: Pair) -> int:  # fmt: skip
    """Numbers that a task needs: the copy of a block, of one row of outputs at least."""
    rows = (kernel[0] - 1) * dilation[0] + 1
    columns = width + 2 * padding[1] + (kernel[1] - 1) * dilation[1] + 2 * MOST * stride[1]
    pixel = inner * (groups * outer + PANEL) if by_channels(groups, outer) else inner
    return max(BUFFER, rows * columns * pixel) + PANEL


packed_size, task_memory = jit(_packed), jit(_task_memory)


def _scratch(x_shape: Shape, w_shape: Shape, inner: int, outer: int, groups: int, stride: Pair,
             padding: Pair, dilation: Pair) -> int:  # fmt: skip
    kernel = w_shape[0], w_shape[1]
    products = x_shape[0] * x_shape[1] * x_shape[2] * kernel[0] * kernel[1] * w_shape[2] * w_shape[3]
    tasks = threads() if products > SERIAL * stride[0] * stride[1] else 1
    return _packed(kernel, inner, outer, groups, stride) + tasks * _task_memory(
        kernel, x_shape[2], inner, outer, groups, stride, padding, dilation
    )


def forward_scratch(x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair) -> int:
    return _scratch(x_shape, w_shape, w_shape[2], w_shape[3] // groups, groups, stride, padding, dilation)


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    return _scratch(x_shape, w_shape, w_shape[3] // groups, w_shape[2], groups, stride, padding, dilation)


# -- weights ---------------------------------------------------------------------------------------------------


@jit
def _row_of_outputs(outer: int, groups: int, array: ndarray) -> int:
    """Numbers of the packed weights for one input channel."""
    if by_channels(groups, outer):
        return (groups * outer + lanes(array) - 1) // lanes(array) * lanes(array)
    width = panel_width(array)
    return groups * ((outer + width - 1) // width) * width


@jit
def _weight(weight: ndarray, backward: bool, u: int, v: int, k: int, o: int, inner: int, outer: int) -> float:
    """Of input channel k, within its group, for output channel o."""
    if v < 0 or v >= weight.shape[1]:
        return weight.dtype.type(0)
    if backward:
        return weight[u, v, o % outer, o // outer * inner + k]
    return weight[u, v, k, o]


@apart_jit
def _pack(
    number: int, weight: ndarray, backward: bool, v: Axis, h: Axis, groups: int, inner: int, outer: int, packed: ndarray
) -> None:
    """Panel `number` of a pass: packed (panels, taps, inner, panel_width), outputs beyond the last one 0."""
    if by_channels(groups, outer):
        width, each, first = _row_of_outputs(outer, groups, packed), groups * outer, 0
    else:
        width, panels = panel_width(packed), (h.block * outer + panel_width(packed) - 1) // panel_width(packed)
        first = number % panels * width
        each, first = min(width, h.block * outer - first), number // panels * outer + first
    at = number * v.taps * h.taps * inner * width
    for s in range(v.taps):
        for t in range(h.taps):
            tap_row, tap_column = v.tap + s * v.tap_step, h.tap + t * h.tap_step
            for k in range(inner):
                row = packed[at : at + width]
                for p in range(h.block):
                    part = row[p * outer : p * outer + each // h.block]
                    for j in range(part.size):
                        part[j] = _weight(
                            weight, backward, tap_row, tap_column + p * h.tap_pixel, k, first + j, inner, outer
                        )
                for j in range(each, width):
                    row[j] = 0
                at += width


# -- one task --------------------------------------------------------------------------------------------------


@apart_jit
def _chunk(
    across: bool, taps: int, depth: int, a: ndarray, a_taps: ndarray, a_rows: ndarray, a_at: int, b: ndarray,
    b_taps: ndarray, b_at: int, c: ndarray, c_rows: ndarray, c_at: int, width: int,
) -> None:  # fmt: skip
    """One chunk of pixels and one panel of outputs, in pieces of about DEPTH products."""
    if across:
        channel_panel(a_rows.size, taps, taps < 0, a, a_taps, a_rows, a_at, b, b_taps, b_at, c, c_rows, c_at, width)
        return
    pieces = (taps * depth + DEPTH - 1) // DEPTH
    taps_each = (taps + pieces - 1) // pieces
    pieces = 1 if taps_each > 1 else (depth + DEPTH - 1) // DEPTH
    depth_each = (depth + pieces - 1) // pieces
    one = max(1, 1)  # not a literal: Numba would compile `panel` for it
    for t in range(0, taps, taps_each):
        for k in range(0, depth, depth_each):
            some_taps, some_depth, accumulate = min(taps_each, taps - t), min(depth_each, depth - k), t + k > 0
            panel(a_rows.size, some_taps, some_depth, accumulate, a, a_taps[t:], a_rows, a_at + k, one,
                  b, b_taps[t:], b_at + k * panel_width(b), panel_width(b), c, c_rows, c_at, width)  # fmt: skip


@jit
def block_shape(v: Axis, h: Axis, images: int, pixel: int, pixels: int) -> Pair:
    """How many images, and how many of their rows of outputs, a block has."""
    columns = span(h, h.pixels)
    rows = max(1, min(v.pixels, pixels // h.pixels))
    while rows > 1 and span(v, rows) * columns * pixel > BUFFER:
        rows -= 1
    if rows < v.pixels:
        blocks = (v.pixels + rows - 1) // rows
        return 1, (v.pixels + blocks - 1) // blocks
    copy = span(v, rows) * columns * pixel
    return max(1, min(images, min(pixels // (rows * h.pixels), BUFFER // copy))), rows


@apart_jit
def expand(
    image: ndarray, height: int, width: int, pixel: int, top: int, rows: int, left: int, columns: int,
    inner: int, outer: int, padded: int, target: ndarray,
) -> None:  # fmt: skip
    """target (rows, columns, inner, padded): for each output channel, its group's channels."""
    for i in range(rows):
        for j in range(columns):
            at = (i * columns + j) * inner * padded
            piece = target[at : at + inner * padded]
            if 0 <= top + i < height and 0 <= left + j < width:
                at = ((top + i) * width + left + j) * pixel
                colour = image[at : at + pixel]
                groups = pixel // inner
                for k in range(inner):
                    for g in range(groups):
                        for o in range(outer):
                            piece[k * padded + g * outer + o] = colour[g * inner + k]
                for k in range(inner):
                    for o in range(groups * outer, padded):
                        piece[k * padded + o] = 0
            else:
                for o in range(piece.size):
                    piece[o] = 0


@jit
def _clear(task: int, tasks: int, v: Axis, h: Axis, shortcut: ndarray, out: ndarray) -> None:
    """What no tap reaches is 0 [+ shortcut]."""
    images = out.shape[0]
    for image in range(task * images // tasks, (task + 1) * images // tasks):
        for i in range(v.pixels):
            for j in range(h.pixels):
                at = h.first + j * h.stride
                pixels = out[image, v.first + i * v.stride, at : at + h.block].reshape(-1)
                start = ((image * v.out + v.first + i * v.stride) * h.out + at) * out.shape[3]
                for o in range(pixels.size):
                    pixels[o] = 0
                    if shortcut.size:
                        pixels[o] += shortcut[start + o]


@apart_jit
def _pass(
    task: int, tasks: int, source: ndarray, v: Axis, h: Axis, groups: int, inner: int, outer: int, packed: ndarray,
    memory: ndarray, end: ndarray, finish: bool, shortcut: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """This task's blocks of a pass; end: what `finish_rows` wants, if it is to finish."""
    images, height, width, pixel = source.shape
    if v.taps * h.taps == 0:
        _clear(task, tasks, v, h, shortcut, out)
        return
    x, y = source.reshape(-1), out.reshape(-1)
    outputs = out.shape[3]
    across = by_channels(groups, outer)
    row_of_outputs = _row_of_outputs(h.block * outer, groups, packed)
    expanded = across and inner * outer > 1  # else each channel stands in its output's lane already
    one = groups == 1 or v.taps * h.taps == 1
    in_place = not across and one and inside(v) and inside(h)
    padded = pixel if in_place or across else inner
    if expanded:
        padded = inner * row_of_outputs
    columns = width if in_place else span(h, h.pixels)
    some_images, some_rows = block_shape(
        v, h, images, 0 if in_place else padded, min(PIXELS, max(8, images * v.pixels * h.pixels // (4 * tasks)))
    )
    lines = height if in_place else span(v, some_rows)  # of an image in the buffer

    # where everything is, seen from the block's first pixel; what is left over at the end of each row comes last
    whole = h.pixels - 1 if h.rest < h.block else h.pixels
    a_rows = np.empty(some_images * some_rows * h.pixels, np.int64)
    c_rows = np.empty(a_rows.size, np.int64)
    for line in range(some_images * some_rows):
        image, i = line // some_rows, line % some_rows
        for j in range(h.pixels):
            r = line * whole + j if j < whole else some_images * some_rows * whole + line
            a_rows[r] = ((image * lines + i * v.step) * columns + j * h.step) * padded
            c_rows[r] = ((image * v.out + i * v.stride) * h.out + j * h.stride) * outputs
    side_by_side = not across and (h.spacing == 1 or h.taps == 1)  # the taps of a kernel's row: one depth
    channels, taps_columns = inner if across else 1, 1 if side_by_side else h.taps
    depth = h.taps * inner if side_by_side else inner
    taps = v.taps * taps_columns * channels
    a_taps, b_taps = np.empty(taps, np.int64), np.empty(taps, np.int64)
    for t in range(taps):
        place = t // channels
        row, column = place // taps_columns * v.spacing, place % taps_columns * h.spacing
        a_taps[t] = (row * columns + column) * padded + (t % channels * row_of_outputs if expanded else 0)
        b_taps[t] = t * (row_of_outputs if across else depth * panel_width(packed))

    down = (v.pixels + some_rows - 1) // some_rows
    blocks = (images + some_images - 1) // some_images * down
    for block in range(task * blocks // tasks, (task + 1) * blocks // tasks):
        image, i = block // down * some_images, block % down * some_rows
        rows, count = min(some_rows, v.pixels - i), min(some_images, images - image)
        c_at = ((image * v.out + v.first + i * v.stride) * h.out + h.first) * outputs
        top = i * v.step + v.offset
        for g in range(1 if across else groups):
            if in_place:
                a, a_at = x, ((image * height + top) * width + h.offset) * pixel + g * inner
            else:
                a, a_at = memory, 0
                size = lines * columns * padded
                for n in range(count):
                    pixels_of = x[(image + n) * height * width * pixel : (image + n + 1) * height * width * pixel]
                    if expanded:
                        expand(pixels_of, height, width, pixel, top, span(v, rows), h.offset, columns,
                               inner, outer, row_of_outputs, memory[n * size :])  # fmt: skip
                    else:
                        copy_with_halo(pixels_of, height, width, pixel, top, span(v, rows), h.offset, columns,
                                       g * inner, min(pixel, padded), padded, memory[n * size :])  # fmt: skip
            panel_of = channel_width(packed) if across else panel_width(packed)
            size = panel_of if across else taps * depth * panel_of
            together = outputs if across else h.block * outer
            panels = (together + panel_of - 1) // panel_of
            for p in range(panels):
                number, at = g * panels + p, c_at + g * outer + p * panel_of
                for part in range(1 + h.pixels - whole):
                    begin = part * some_images * some_rows * whole
                    stop = begin + count * rows * (1 if part else whole)
                    wide = h.rest * outer if part else min(panel_of, together - p * panel_of)
                    for first in range(begin, stop, CHUNK):
                        last = min(first + CHUNK, stop)
                        some, to = a_rows[first:last], c_rows[first:last]
                        _chunk(across, taps, depth, a, a_taps, some, a_at + (p * panel_of if across else 0), packed,
                               b_taps, number * size, y, to, at, wide)  # fmt: skip
                        if finish:
                            finish_rows(y, to, at, wide, end, number * panel_of, shortcut)


@jit
def _axes(
    remainder: int, source: ndarray, kernel: Pair, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    backward: bool, out: ndarray,
) -> tuple[Axis, Axis]:  # fmt: skip
    """The two axes of a pass: forward there is one, backward one for each remainder in the two directions.

    With blocks of pixels, that of the horizontal remainder 0 is for all of them.
    """
    high, wide = source.shape[1:3]
    out_high, out_wide = out.shape[1:3]
    block = 1
    if groups == 1 and dilation[1] == 1:
        size, places = (out_wide, wide) if backward else (wide, out_wide)
        block = blocks_of(size, places, kernel, stride[1], padding[1], backward, source.shape[3], out.shape[3], source)
    if backward:
        v = gradient_axis(out_high, high, kernel[0], stride[0], padding[0], dilation[0], remainder // stride[1])
        h = gradient_axis(out_wide, wide, kernel[1], stride[1], padding[1], dilation[1], remainder % stride[1])
        if block > 1:
            h = gradient_blocks(out_wide, wide, kernel[1], stride[1], padding[1], block)
    else:
        v = forward_axis(high, out_high, kernel[0], stride[0], padding[0], dilation[0])
        h = forward_axis(wide, out_wide, kernel[1], stride[1], padding[1], dilation[1])
        if block > 1:
            h = forward_blocks(wide, out_wide, kernel[1], stride[1], padding[1], block)
    return v, h


@apart_jit
def _task(
    phase: int, task: int, tasks: int, each: int, source: ndarray, weight: ndarray, backward: bool,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, memory: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """First some panels of weights are packed, then some blocks of pixels computed."""
    inner, outer = source.shape[3] // groups, out.shape[3] // groups
    v, h = _axes(min(0, 0), source, weight.shape[:2], groups, stride, padding, dilation, backward, out)
    row = _row_of_outputs(h.block * outer, groups, memory)
    end, packed = memory[: 5 * row], memory[5 * row :]
    mine = memory[memory.size - (task + 1) * each : memory.size - task * each]
    across = by_channels(groups, outer)
    panels = 1 if across else row // panel_width(memory)
    if phase == 0 and task == 0:
        fill_end(bias, scale, shift, relu, 1 if across else groups, h.block, end)
    at = 0
    for remainder in range(stride[0] * stride[1] if backward else 1):
        v, h = _axes(remainder, source, weight.shape[:2], groups, stride, padding, dilation, backward, out)
        if h.block > 1 and remainder % stride[1]:
            continue  # the blocks have these pixels, too
        if phase == 0:
            for number in range(task * panels // tasks, (task + 1) * panels // tasks):
                _pack(number, weight, backward, v, h, groups, inner, outer, packed[at:])
        else:
            _pass(task, tasks, source, v, h, groups, inner, outer, packed[at:],
                  mine, end, relu or bias.size + scale.size + shortcut.size > 0, shortcut, out)  # fmt: skip
        at += v.taps * h.taps * inner * row


@parallel_jit
def convolve(
    source: ndarray, weight: ndarray, backward: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """out = y from source = x; backward: out = dx from source = dy, and nothing after it but the shortcut."""
    kernel = weight.shape[:2]
    inner, outer = source.shape[3] // groups, out.shape[3] // groups
    each = task_memory(kernel, out.shape[2] if backward else source.shape[2], inner, outer, groups,
                       stride, padding, dilation)  # fmt: skip
    tasks = (scratch.size - packed_size(kernel, inner, outer, groups, stride)) // each
    memory = aligned(scratch)
    for phase in range(2):
        for task in prange(tasks):
            _task(phase, np.int64(task), tasks, each, source, weight, backward, bias, scale, shift, shortcut, relu,
                  groups, stride, padding, dilation, memory, out)  # fmt: skip
