"""Transforms of tiles into Winograd's planes and back (weights.py: of weights). winograd.py explains the formulas.

An image is cut into tiles of m[0] x m[1] outputs. Each reads a window of inputs, which becomes n[0] x n[1] positions. A
plane holds one position (i, j) of all transformed tiles, so V and M have n[0] * n[1] planes; U may have fewer. A plane
of tiles is a matrix (tiles, channels). A plane of weights is a matrix (channels / groups, outputs). Rows are padded to
whole vectors.
"""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.blocks import LANES, NR, PANELS
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.tile import lanes

from .choice import Tiles, on_amx
from .forms import (
    Phase,
    depth_of_sums,
    input_transform,
    normalizing_transform,
    output_transform,
    planes_of,
    spread_transform,
    tile_of,
    weight_planes,
    window_of,
)
from .reference import Pair
from .sizes import DIVIDED_U, FEW_TILES, GROUP_IN_PLACE, GROUP_SIZE, LEAST_TILES

# -- sizes -------------------------------------------------------------------------------------------------------


@helper
def round_up(x: int, step: int) -> int:
    """Round x up to a multiple of `step`."""
    return (x + step - 1) // step * step


@helper
def row_of(channels: int) -> int:
    """Return the length of a row: `channels`, rounded up to whole vectors."""
    return round_up(channels, LANES)


@helper
def row_of_pieces(channels: int, pieces: int) -> int:
    """Return the length of a row of V, which has the channels of all pieces, one after the other (forms.py).

    The last vector of a piece may have zeros after its channels. The next piece overwrites them.
    """
    return round_up((pieces - 1) * channels + row_of(channels), LANES)


@helper
def plane_of(rows: int, row: int) -> int:
    """Return the distance from one plane to the next: the size of a plane plus one vector.

    A tile has a vector in each plane. If the planes were a multiple of 4 KB apart, these vectors would map to the same
    few sets of the caches and evict one another.
    """
    return rows * row + LANES


@helper
def divides_outputs(form: int, channels: int, outputs: int, groups: int, tiles: int) -> bool:
    """Return whether the threads divide the outputs among themselves, not the tiles, for few tiles and many weights.

    Then each thread reads its columns of U once. Otherwise, each of them would read the whole U for each of its groups.
    """
    u = weight_planes(form) * channels * outputs
    return groups == 1 and 0 < tiles <= FEW_TILES and u >= DIVIDED_U and outputs % NR == 0


@helper
def in_place(form: int, channels: int, outputs: int, groups: int, pieces: int, vector: int) -> bool:
    """Return whether M[k] replaces V[k]. `vector`: how many numbers a vector holds.

    A tile of a product reads some rows of V[k], and then writes the same rows of M[k]. So it must have all outputs, and
    sum all channels in one go.
    """
    deep, similar = channels * pieces, row_of(outputs) <= 2 * row_of_pieces(channels, pieces)
    whole = outputs <= 2 * PANELS * vector and deep <= depth_of_sums(form, deep, outputs, groups)
    return groups == 1 and similar and whole


@helper
def row_of_v(form: int, channels: int, outputs: int, groups: int, pieces: int) -> int:
    """Return the length of a row of V: the channels of all pieces or, if M replaces V, the outputs if they are more."""
    row = row_of_pieces(channels, pieces)
    return max(row, row_of(outputs)) if in_place(form, channels, outputs, groups, pieces, LANES) else row


@helper
def group_of(form: int, channels: int, outputs: int, groups: int, pieces: int, tiles: int) -> int:
    """Return the number of tiles in a group: tiles that are transformed and multiplied together.

    The number of groups is a multiple of 4 if possible, so that two or four threads have equal work. On AMX, a group is
    a multiple of 16 tiles, as many as a tile of AMX has rows.
    """
    deep = channels * pieces
    if divides_outputs(form, deep, outputs, groups, tiles):
        return tiles
    amx = on_amx(channels, outputs, groups, pieces, tiles)
    u, each = weight_planes(form) * deep * outputs // groups, planes_of(form) * (deep + outputs)
    size = GROUP_SIZE
    if in_place(form, channels, outputs, groups, pieces, LANES) and not amx:
        each, size = planes_of(form) * max(deep, outputs), GROUP_IN_PLACE
    if u > GROUP_SIZE:
        beside_u = 2 * GROUP_SIZE - u
        size = beside_u if beside_u >= LEAST_TILES * each else 3 * GROUP_SIZE
    fitting = size // each
    step = 16 if amx else 8
    group = max(LEAST_TILES, min(64, fitting // step * step))
    groups = max(1, round_up((tiles + group - 1) // group, 4))
    return max(1, min(tiles, round_up((tiles + groups - 1) // groups, step)))


# -- tiles, into planes and out of them ---------------------------------------------------------------------------


def _make_copy(fills: bool) -> Any:
    """Return the copy of a line of pixels; if `fills`, zeros follow each pixel, up to the end of its last vector."""

    @instructions
    def copy_pixels(
        e: Emitter, count: Value, vectors: Value, tail: Value, source: Value, at: Value, step: Value, target: Value,
        target_at: Value, target_step: Value,
    ) -> None:  # fmt: skip
        """Copy `count` pixels, at least one: each has `vectors` whole vectors and `tail` numbers."""
        mask, last = e.mask(0, tail), e.times(vectors, e.lanes)

        def copy_pixel(_: Sums, number: Value, source_at: Value, to: Value) -> Sums:
            pixel, there = e.at(source, source_at), e.at(target, to)

            def copy_vector(_: Sums, number: Value, c: Value) -> Sums:
                e.store(e.load(pixel, c), there, c)
                return {}

            with e.builder.if_then(e.builder.icmp_signed(">", vectors, e.integer(0))):
                e.loop(vectors, [(0, e.lanes)], {}, copy_vector)
            rest = e.load_masked(pixel, last, mask)
            if fills:
                e.store(rest, there, last)
            else:
                e.store_masked(rest, there, last, mask)
            return {}

        e.loop(count, [(at, step), (target_at, target_step)], {}, copy_pixel)

    return copy_pixels


_copy_pixels, _copy_pixels_and_zeros = _make_copy(False), _make_copy(True)


@helper
def _copy_tile(
    pixels: ndarray, at: int, x_row: int, x_column: int, channels: int, rows: Pair, columns: Pair, patch: ndarray,
    row: int,
) -> None:  # fmt: skip
    """Copy a tile of C channels: patch[i * row + j * step + c] = pixels[at + i * x_row + j * x_column + c].

    i is in the range `rows`, j in the range `columns`. step is C, rounded up to whole vectors of float32. From c = C to
    the end of the last vector that contains channels, the patch is 0. What follows (float64) is not used.
    """
    step, vector = row_of(channels), lanes(pixels)
    if columns[0] >= columns[1]:  # the tile is outside; with wide padding, even columns[0] > columns[1]
        return
    for i in range(rows[0], rows[1]):
        _copy_pixels_and_zeros(columns[1] - columns[0], channels // vector, channels % vector,
                               pixels, at + i * x_row + columns[0] * x_column, x_column,
                               patch, i * row + columns[0] * step, step)  # fmt: skip


@helper
def _next_tile(image: int, down: int, across: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return the tile after (image, down, across), without divisions: for a small tile, they would take too long.

    With dilation, `image` counts the dv x dh separate images of each image (tiles_of).
    """
    across += 1
    if across == tiles[1]:
        down, across = down + 1, 0
        if down == tiles[0]:
            image, down = image + 1, 0
    return image, down, across


@helper
def _separate(image: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return which image a separate image belongs to, and its first row and column of outputs in that image."""
    if tiles[2] * tiles[3] == 1:
        return image, 0, 0
    return image // (tiles[2] * tiles[3]), image // tiles[3] % tiles[2], image % tiles[3]


@helper
def _inside(size: int, first: int, dilation: int, side: int) -> Pair:
    """Return the range of i < side for which pixel first + i * dilation is inside an image of `size` pixels."""
    if dilation == 1:  # without divisions
        return max(0, -first), min(side, size - first)
    return max(0, -(first // dilation)), min(side, -((first - size) // dilation))


@helper
def pixels_of(array: ndarray, first: int, count: int, total: int, ahead: int) -> Pair:
    """Return where the numbers of some tiles begin in an array, and how many they are, roughly.

    These are `count` of `total` tiles, beginning with tile `first`. Tiles are numbered in the order of memory. The
    range is shifted by `ahead` rows of pixels.
    """
    each = array.size // total
    return each * first + ahead * array.shape[2] * array.shape[3], each * count


@helper
def pixels_above(row: int, m: Pair, tiles: Tiles, y: ndarray) -> int:
    """Return how many pixels of y (N, H, W, O) are above a row of tiles; rows are counted from image to image."""
    return (row // tiles[0] * y.shape[1] + min(y.shape[1], row % tiles[0] * m[0])) * y.shape[2]


@apart_jit
def to_planes(
    form: int, spread: bool, x: ndarray, stride: Pair, tiles: Tiles, padding: Pair, first: int, count: int,
    planes: ndarray, plane: int, block: int, at_tile: int, patch: ndarray, zeros: ndarray, before: ndarray,
) -> None:  # fmt: skip
    """Transform `count` tiles of x, beginning with tile `first`, and write them to the planes from row `at_tile` on.

    stride: between neighbouring pixels of a tile (kernel_of). A tile d becomes BT d B. If `spread`, x is dy, and d
    becomes A d AT. The layout of a plane is (channels / block, tiles, block). If the channels do not fill whole
    vectors, each tile is first copied to `patch`. If they do, the pixels can be normalised and rectified as they are
    read: see Norms (norms.py) for `before`.
    """
    m, _, n = tile_of(form)
    height, width, channels = x.shape[1:]
    side, move = window_of(form)  # along both axes, like m and n
    if spread:
        side, move = m, m
    pixels = x.reshape(-1)
    step = row_of(channels)
    image, place = divmod(first, tiles[0] * tiles[1])
    down, across = divmod(place, tiles[1])
    block_step = (plane - LANES) // round_up(channels, block) * block
    through, constants = step != channels, before.reshape(-1)
    apart = stride[0] * tiles[2], stride[1] * tiles[3]  # the pixels of a tile
    row_step, column_step = apart[0] * width * channels, apart[1] * channels
    source, x_row, x_column = (patch, side[1] * step, step) if through else (pixels, row_step, column_step)
    for t in range(at_tile, at_tile + count):
        whole, row, column = _separate(image, tiles)
        top, left = row + down * move[0] * apart[0] - padding[0], column + across * move[1] * apart[1] - padding[1]
        rows, columns = _inside(height, top, apart[0], side[0]), _inside(width, left, apart[1], side[1])
        at = ((whole * height + top) * width + left) * channels
        if through:
            _copy_tile(pixels, at, row_step, column_step, channels, rows, columns, patch, x_row)
            at = 0
        to, next_block = t * block, block
        for c in range(0, step, lanes(x)):
            if c == next_block:
                to, next_block = to + block_step - block, next_block + block
            if before.size:
                normalizing_transform(source, at + c, x_row, x_column, rows, columns, zeros, planes, to,
                                      n[1] * plane, plane, constants, c, channels)  # fmt: skip
            elif spread:
                spread_transform(form, source, at + c, x_row, x_column, rows, columns, zeros, planes, to,
                                 n[1] * plane, plane)  # fmt: skip
            else:
                input_transform(form, source, at + c, x_row, x_column, rows, columns, zeros, planes, to,
                                n[1] * plane, plane)  # fmt: skip
            to += lanes(x)
        image, down, across = _next_tile(image, down, across, tiles)


@helper
def _place(
    y: ndarray, phase: Phase, tiles: Tiles, m: Pair, image: int, down: int, across: int
) -> tuple[int, int, int]:
    """Return a tile's rows and columns of outputs, and where it begins in y. No rows or columns: it is outside."""
    height, width, outputs = y.shape[1:]
    whole, row, column = _separate(image, tiles)
    apart = phase[0] * tiles[2], phase[1] * tiles[3]
    top, left = phase[2] + row + down * m[0] * apart[0], phase[3] + column + across * m[1] * apart[1]
    rows, columns = _inside(height, top, apart[0], m[0])[1], _inside(width, left, apart[1], m[1])[1]
    return rows, columns, ((whole * height + top) * width + left) * outputs


@apart_jit
def from_planes(
    form: int, planes: ndarray, plane: int, row: int, left: int, tiles: Tiles, first: int, count: int,
    finish: bool, end: ndarray, shortcut: ndarray, patch: ndarray, begin: int, stop: int, phase: Phase, y: ndarray,
) -> None:  # fmt: skip
    """Compute the outputs [begin, stop) of y = AT M A [+ shortcut] from the planes M of `count` tiles, beginning with
    tile `first`. If these are not all outputs, they are whole vectors. left: the first output in the planes.

    If `finish`, also apply bias, scale, shift and floor, which `end` contains (`fill_end` in winograd.py).
    """
    m, _, n = tile_of(form)
    width, outputs = y.shape[2:]
    vector = lanes(y)
    pixels = y.reshape(-1)
    step, adds = max(outputs, vector), shortcut.size > 0
    whole, tail = (stop - begin) // vector, (stop - begin) % vector
    image, place = divmod(first, tiles[0] * tiles[1])
    down, across = divmod(place, tiles[1])
    next_rows, next_columns, following = _place(y, phase, tiles, m, image, down, across)
    for t in range(count):
        rows, columns, there = next_rows, next_columns, following
        image, down, across = _next_tile(image, down, across, tiles)
        next_rows, next_columns, following = _place(y, phase, tiles, m, image, down, across)
        # y ends within the tile or vector: write to the patch
        through = rows < m[0] or columns < m[1] or outputs < vector
        row_step, column_step = phase[0] * tiles[2] * width * outputs, phase[1] * tiles[3] * outputs
        at, y_row, y_column = (0, m[1] * step, step) if through else (there, row_step, column_step)
        for i in range(rows if through and adds and columns > 0 else 0):
            _copy_pixels(columns, whole, tail, shortcut, there + i * row_step + begin, column_step,
                         patch, (m[0] + i) * y_row + begin, step)  # fmt: skip
        for place_of_vector in range(begin, max(stop, vector), vector):
            o = min(place_of_vector, step - vector)  # the last vector may overlap the previous one
            here = t * row + o - left
            output_transform(form, planes, here, n[1] * plane, plane, pixels, patch, through, at + o, y_row, y_column,
                             following + o, finish, end, o, row_of(outputs), shortcut, adds)  # fmt: skip
        for i in range(rows if through and columns > 0 else 0):
            _copy_pixels(columns, whole, tail, patch, i * y_row + begin, step,
                         pixels, there + i * row_step + begin, column_step)  # fmt: skip
