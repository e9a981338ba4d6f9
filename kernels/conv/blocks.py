"""Blocks: how the outputs of a pass (geometry.py) are divided, and the copy of the pixels that a block reads.

A block is some rows of outputs of one image, or the outputs of several small images. The pixels that these outputs read
are copied into memory that stays in the core's cache. Around them the copy has a halo of zeros, so no sum has to test
for borders. If direct.py or weight_gradient.py finds that no copy is needed, blocks read the source in place.
"""

from __future__ import annotations

from typing import NamedTuple

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.blocks import MR
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import MOST_VECTORS, lanes, whole_vectors

from .geometry import Axis, Layer, by_channels, ceildiv, span
from .reference import Pair
from .sizes import MAX_BUNDLE, MAX_COPY, NR


class Cut(NamedTuple):
    """How a pass is cut into blocks. A block reads an array (the source or a copy) with the layout (images, lines,
    columns, pixel)."""

    layer: Layer
    v: Axis  # the vertical axis
    h: Axis  # the horizontal axis
    batch: int  # images of the pass
    blocks: int
    images: int  # images of a block
    rows: int  # rows of outputs of each of these images
    in_place: bool  # blocks read the source, not a copy
    lines: int
    columns: int
    pixel: int  # the distance from one pixel to the next, in numbers
    channel: int  # the distance from one input channel to the next, in numbers


class Block(NamedTuple):
    """The outputs of a block: some rows of each of some images."""

    image: int  # the first image
    images: int
    row: int  # the first row of outputs of each image
    rows: int


@helper
def copy_size(layer: Layer, width: int, gap: int) -> Pair:
    """Return upper limits for the columns and the size of a block's copy.

    width: pixels in a line of x; gap: unused numbers after each pixel of the copy
    """
    rows = (layer.kernel[0] - 1) * layer.dilation[0] + 1  # lines that a block of one row of outputs reads
    window = (layer.kernel[1] - 1) * layer.dilation[1] + 2 * MAX_BUNDLE * layer.stride[1]
    columns = width + 2 * layer.padding[1] + window
    pixel = layer.inner * (layer.groups * layer.outer + NR) if by_channels(layer) else layer.inner + gap
    return columns, max(MAX_COPY, rows * columns * pixel) + NR


@helper
def row_of_outputs(layer: Layer, bundle: int, array: ndarray) -> int:
    """Return the size of a row that holds all outputs of a bundle (geometry.py), rounded up.

    If vectors extend across groups, the row is a whole number of vectors. Otherwise each group is a whole number of
    vectors.
    """
    if by_channels(layer):
        return whole_vectors(layer.groups * layer.outer, array)
    return layer.groups * whole_vectors(bundle * layer.outer, array)


@helper
def cut_into_blocks(
    layer: Layer, v: Axis, h: Axis, batch: int, in_place: bool, gap: int, pixels: int, tasks: int, array: ndarray
) -> Cut:
    """Cut a pass into blocks of up to `pixels` outputs, but at least one row of outputs each; gap: as in copy_size.

    tasks: among which the blocks are divided evenly; 0: a block has as many images as possible
    """
    pixel, channel = layer.groups * layer.inner, 1
    if by_channels(layer):
        if layer.inner * layer.outer > 1:  # else each number of x is already in its output's lane
            channel = row_of_outputs(layer, 1, array)
            pixel = layer.inner * channel
    elif not in_place:
        pixel = layer.inner + gap
    columns = h.source if in_place else span(h, h.pixels)
    line = 0 if in_place else columns * pixel  # numbers that are copied for each line
    images, rows = 1, max(1, min(v.pixels, pixels // h.pixels))
    while rows > 1 and span(v, rows) * line > MAX_COPY:
        rows -= 1
    if rows < v.pixels:
        rows = ceildiv(v.pixels, ceildiv(v.pixels, rows))
    else:
        images = max(1, min(batch, pixels // (rows * h.pixels)))
        if not in_place:
            images = max(1, min(images, MAX_COPY // (span(v, rows) * line)))
        if tasks > 0:
            images = _images_of_block(batch, images, rows * h.pixels, tasks)
    lines, blocks = v.source if in_place else span(v, rows), ceildiv(batch, images) * ceildiv(v.pixels, rows)
    return Cut(layer, v, h, batch, blocks, images, rows, in_place, lines, columns, pixel, channel)


@helper
def _images_of_block(batch: int, most: int, pixels: int, tasks: int) -> int:
    """Return how many images, at most `most`, a block should have, so that the busiest task has few tiles.

    pixels: of an image. The last tile of a block is seldom full. A block costs about a quarter of a tile.
    """
    best, least = most, 0
    for images in range(most, 0, -1):
        cost = ceildiv(ceildiv(batch, images), tasks) * (4 * ceildiv(images * pixels, MR) + 1)
        if cost < least or images == most:
            best, least = images, cost
    return best


@helper
def block_at(cut: Cut, number: int) -> Block:
    """Return block `number`; blocks are counted from top to bottom in an image, then from image to image."""
    down = ceildiv(cut.v.pixels, cut.rows)
    image, row = number // down * cut.images, number % down * cut.rows
    return Block(image, min(cut.images, cut.batch - image), row, min(cut.rows, cut.v.pixels - row))


@helper
def place(cut: Cut, image: int, line: int, column: int) -> int:
    """Return the offset of a pixel in the source or copy that a block reads."""
    return ((image * cut.lines + line) * cut.columns + column) * cut.pixel


@apart_jit
def gather(cut: Cut, block: Block, group: int, source: ndarray, memory: ndarray) -> tuple[ndarray, int]:
    """Return the array that a block reads for a group, and the offset of the first pixel that the block reads. The
    array is the source or a copy in `memory`."""
    inner, outer, height, width = cut.layer.inner, cut.layer.outer, cut.v.source, cut.h.source
    top, left, channel = block.row * cut.v.step + cut.v.offset, cut.h.offset, group * inner
    if cut.in_place:
        return source, place(cut, block.image, top, left) + channel
    pixel, padded, columns = cut.layer.groups * inner, cut.pixel, cut.columns
    channels, spread = pixel if by_channels(cut.layer) else inner, cut.channel > 1
    first = min(max(0, -left), columns)  # columns [first, last) are within the image, the others are 0
    last = max(first, min(columns, width - left))
    for image in range(block.images):
        for i in range(span(cut.v, block.rows)):
            at = place(cut, image, i, 0)
            line = memory[at : at + columns * padded]
            if top + i < 0 or top + i >= height:
                clear(line)
                continue
            clear(line[: first * padded])
            at = (((block.image + image) * height + top + i) * width + left + first) * pixel + channel
            if channels == pixel and channels == padded and not spread:
                copy(source[at : at + (last - first) * pixel], line[first * padded : last * padded])
            elif spread:
                for j in range(first, last):
                    _expand(source[at : at + channels], inner, outer, line[j * padded : (j + 1) * padded])
                    at += pixel
            else:
                copy_pixels(last - first, channels, source, at, pixel, line[first * padded :], padded)
            clear(line[last * padded :])
    return memory, 0


@helper
def _expand(colour: ndarray, inner: int, outer: int, target: ndarray) -> None:
    """Copy a pixel for vectors across groups: target[k, j] = channel k of the group that output j belongs to.

    Beyond the last output, target[k, j] = 0.
    """
    size, groups = target.size // inner, colour.size // inner
    for k in range(inner):
        row = target[k * size : (k + 1) * size]
        for g in range(groups):
            for o in range(outer):
                row[g * outer + o] = colour[g * inner + k]
        clear(row[groups * outer :])


@instructions
def _copy_vectors(
    e: Emitter, pixels: Value, channels: Value, source: Value, at: Value, step: Value, target: Value, width: Value
) -> None:  # fmt: skip
    """Copy `pixels` pixels as whole vectors: at least one pixel, and at most three vectors of channels."""

    def copy_all(e: Emitter, vectors: int) -> None:
        def pixel(_: Sums, number: Value, source_at: Value, target_at: Value) -> Sums:
            for v, column in enumerate(e.columns(e.at(source, source_at), vectors)):
                e.store(column, e.at(target, target_at), v * e.lanes)
            return {}

        e.loop(pixels, [(at, step), (0, width)], {}, pixel)

    e.narrowest(channels, MOST_VECTORS, copy_all)


@helper
def copy_pixels(
    pixels: int, channels: int, source: ndarray, at: int, step: int, target: ndarray, width: int
) -> None:  # fmt: skip
    """Copy target[i * width + c] = source[at + i * step + c] for all i < pixels and c < channels.

    Few channels are copied as whole vectors: fewer than a vector of numbers after each pixel of the target get any
    value. So the target is written from its beginning to its end, and there must be memory after its end.
    """
    fast = 0
    if channels <= MOST_VECTORS * lanes(source):
        fast = max(0, min(pixels, (source.size - whole_vectors(channels, source) - at) // step + 1))
    if fast > 0:
        _copy_vectors(fast, channels, source, at, step, target, width)
    for i in range(fast, pixels):
        copy(source[at + i * step : at + i * step + channels], target[i * width : i * width + channels])


@helper
def copy(source: ndarray, target: ndarray) -> None:
    for i in range(target.size):
        target[i] = source[i]


@helper
def clear(target: ndarray) -> None:
    for i in range(target.size):
        target[i] = 0
