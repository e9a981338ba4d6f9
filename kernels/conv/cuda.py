"""Convolutions on a GPU: matrix products whose first matrix is read from the image (cuda_convolve.py), or Winograd's
form, where it is predicted to take less time (cuda_winograd.py)."""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.engine.cuda import launch
from minidl.engine.device import address

from ..matmul.cuda import TILES as TILES_OF_PRODUCTS
from ..matmul.cuda import narrowest
from ..matmul.cuda_loader import DEPTH, THREADS
from ..matmul.cuda_tile import Tile
from . import cuda_winograd as winograd_form
from .cuda_channels import COLUMNS, convolve_channels, weight_gradient_channels
from .cuda_convolve import convolution
from .cuda_geometry import Pass, passes
from .cuda_taps import MOST
from .cuda_weight import Gradient, Runs, gradient_of, sum_parts, weight_gradient
from .reference import Pair, Shape, output_size
from .reference import __all__ as __all__

FEW_OUTPUTS = 4  # with up to so many outputs in each of several groups, cuda_channels.py computes y or dx,
FEW_PRODUCTS = 16  # and with up to so many weights in a tap of a group, dweight
MEDIUM = Tile(128, 64, 8, 8, blocks=3)  # of 128 threads: each finds more pixels, but loads less for a multiply-add
WIDEST = Tile(128, 128, 8, 8)
SIXTEEN, EIGHT = Tile(256, 16, 8, 8, blocks=6), Tile(512, 8, 8, 4, blocks=3)
EIGHT_UNALIGNED = Tile(512, 8, 8, 8, blocks=6)  # a thread keeps half as many rows as if it copied them by 16 bytes
TILES = {  # bytes of an element -> tiles of y and dx, from narrow to wide. In float32, of 64 to 256 threads
    4: (EIGHT, SIXTEEN, Tile(256, 32, 8, 8, blocks=3), MEDIUM, WIDEST),
    8: TILES_OF_PRODUCTS[8],
}
WEIGHT_TILES = {  # bytes of an element -> tiles of dweight. Of those with the fewest sums, the first is used
    4: (MEDIUM, SIXTEEN, Tile(128, 32, 8, 8, blocks=6), Tile(64, 64, 8, 8, blocks=6)),
    8: (Tile(128, 32, 4, 4), Tile(64, 64, 4, 4)),
}


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of scratch: planes of Winograd's form, or 0."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    fewer = winograd and winograd_form.pays(out, w_shape[:2], x_shape[3], w_shape[3], stride, dilation, groups)
    return winograd_form.forward_scratch(x_shape, w_shape, padding) if fewer else 0


def packed_size(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's `packed`: 0, since these kernels keep no weights."""
    return 0


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_input's scratch."""
    fewer = winograd and winograd_form.pays(x_shape[1:3], w_shape[:2], w_shape[3], x_shape[3], stride, dilation, groups)
    return winograd_form.backward_input_scratch(x_shape, w_shape, padding) if fewer else 0


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_weight's scratch: the gradients of all parts, if there are several."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    parts = gradient_of(x_shape, w_shape, out, groups, stride, padding, dilation).parts
    return parts * math.prod(w_shape) if parts > 1 else 0


def _wide(channels: int, *arrays: ndarray) -> bool:
    """Return whether so many channels of a group, in all of these arrays, can be accessed by 16 bytes."""
    return channels % 4 == 0 and all(address(x) % 16 == 0 for x in arrays)


def _convolve(
    source: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    out: ndarray, g: Pass, backward: bool,
) -> None:  # fmt: skip
    if (g.groups > 1 and g.outer <= FEW_OUTPUTS) or max(g.taps_h, g.taps_w) > MOST:
        arguments = source, weight, bias, scale, shift, shortcut, relu, out
        launch(convolve_channels(backward), -(-g.rows * g.groups * g.outer // THREADS), *arguments, *g)
        return
    tile, size, whole = narrowest(TILES[out.itemsize], g.outer), min(g.inner, DEPTH), g.inner % DEPTH == 0
    wide = _wide(g.outer, out) if backward else _wide(g.outer, out, weight)
    if tile == WIDEST and backward and not (whole and wide):  # it has too few registers for more tests
        tile = MEDIUM
    has_few = not backward and g.inner < DEPTH
    by_rows = out.itemsize == 4 and not has_few and tile != WIDEST and _wide(g.inner, source)
    if tile == EIGHT and not (has_few or by_rows):
        tile = EIGHT_UNALIGNED
    compute = convolution(tile, has_few, size, whole, by_rows, backward, wide, out.itemsize)
    blocks = -(-g.rows // tile.rows), -(-g.outer // tile.columns), g.groups
    launch(compute, blocks, source, weight, bias, scale, shift, shortcut, relu, out, *g)


def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    out = y.shape[1], y.shape[2]
    if winograd and winograd_form.pays(out, weight.shape[:2], x.shape[3], y.shape[3], stride, dilation, groups):
        winograd_form.forward(x, weight, bias, scale, shift, shortcut, relu, padding, scratch, y)
        return
    for g in passes(x.shape, weight.shape, out, False, groups, stride, padding, dilation):
        _convolve(x, weight, bias, scale, shift, shortcut, relu, y, g, False)


def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    out, none = (dy.shape[1], dy.shape[2]), dy[:0]
    size = dx.shape[1], dx.shape[2]
    if winograd and winograd_form.pays(size, weight.shape[:2], dy.shape[3], dx.shape[3], stride, dilation, groups):
        winograd_form.backward_input(dy, weight, shortcut, padding, scratch, dx)
        return
    for g in passes(dx.shape, weight.shape, out, True, groups, stride, padding, dilation):
        _convolve(dy, weight, none, none, none, shortcut, False, dx, g, True)


def _rows(g: Gradient, run: int) -> int:
    """Return the rows of dweight for a group, if `run` channels follow one another in a tile."""
    return g.taps_h * g.taps_w * -(-g.inner // run) * run


def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    out = dy.shape[1], dy.shape[2]
    g = gradient_of(x.shape, dweight.shape, out, groups, stride, padding, dilation)
    partial = scratch[: g.parts * dweight.size] if g.parts > 1 else dweight
    if (groups > 1 and g.inner * g.outer <= FEW_PRODUCTS) or max(g.taps_h, g.taps_w) > MOST:
        blocks = g.rows, -(-dweight.shape[3] // COLUMNS), g.parts
        launch(weight_gradient_channels, blocks, x, dy, partial, *g)
    else:
        _weight_product(x, dy, partial, g)
    if g.parts > 1:
        launch(sum_parts, -(-dweight.size // THREADS), partial, dweight)


def _weight_product(x: ndarray, dy: ndarray, out: ndarray, g: Gradient) -> None:
    item, vector = x.itemsize, 16 // x.itemsize
    rows, aligned, wide = _rows(g, vector), _wide(g.inner, x), _wide(g.outer, dy, out)

    def sums(tile: Tile) -> int:
        return -(-rows // tile.rows) * tile.rows * (-(-g.outer // tile.columns) * tile.columns)

    tile = min(WEIGHT_TILES[item], key=sums)
    most = tile.rows * DEPTH // tile.threads  # channels of a pixel for each thread
    run = next(run for run in (8, 4, 2) if run <= most and _rows(g, run) == rows)
    compute = weight_gradient(tile, Runs(run, min(run, g.inner), vector if aligned else 1), wide, item)
    launch(compute, (-(-rows // tile.rows), -(-g.outer // tile.columns), g.groups * g.parts), x, dy, out, *g)
