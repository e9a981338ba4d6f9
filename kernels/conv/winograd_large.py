"""Winograd's convolution of large layers with few tiles: neither U nor dU is ever in memory as a whole.

With 512 -> 512 channels and F(4x4,3x3), U has 38 MB, four times as much as the weights. winograd.py writes U to memory,
and each group of tiles reads it from there. With few tiles this takes longer than the products. But then V and M are
small. So here a block of U is computed for all tiles, and the next block takes its place in the second-level cache:

    V of all tiles                                      the threads divide the tiles
    for each panel of outputs:                          the threads divide the panels
        for each block of input channels:
            U of this block and panel, in all planes
            M[k] += V[k] @ U[k], for each plane k
        y of this panel, from M

For dweight, a block of dU is complete after its products, since they add up all tiles:

    V and D of all tiles                                the threads divide the tiles
    for each panel of outputs, block of channels:       the threads divide the panels and blocks
        dU[k] = V[k]^T @ D[k], for each plane k
        dweight of this block and panel, from dU
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange, threads
from minidl.kernels.matmul.blocks import LANES, LINE, NR, aligned
from minidl.kernels.matmul.product import product_panel, tile_columns
from minidl.kernels.matmul.requests import no_requests
from minidl.kernels.matmul.tile import lanes, panel_width

from .choice import Tiles, count_of, tiles_of
from .forms import (
    ALL_PIXELS,
    depth_of_sums,
    gather_transform,
    has_eight_points,
    kernel_of,
    planes_of,
    stride_of,
    tile_of,
    weight_plane,
    weight_planes,
)
from .geometry import ceildiv
from .planes import from_planes, plane_of, round_up, row_of, to_planes
from .reference import Pair, output_size
from .sizes import KC_LARGE, TILES_EIGHT
from .weights import weight_to_planes
from .winograd import Shape, fill_end, padding_of_dx, zeros_of
from .winograd_gradient import gradient_sizes

DEEP = NR  # channels of a block of dU


@helper
def width_of(outputs: int, depth: int) -> int:
    """Return the number of outputs in a panel, for blocks of U or dU with `depth` channels: a block has about half of
    the second-level cache, and there are at least four panels for the threads."""
    return 2 * NR if outputs >= 8 * NR and depth <= KC_LARGE else NR


@helper
def _sizes(form: int, channels: int, outputs: int, tiles: int, dilation: Pair) -> tuple[int, int, int, int]:
    """Return the sizes of a plane of V, of a block of U and of M, and of a task's memory."""
    m, planes = tile_of(form)[0], planes_of(form)
    kc = depth_of_sums(form, channels, outputs, 1)
    width = width_of(outputs, kc)
    v_plane = plane_of(tiles, round_up(channels, row_of(kc)))
    u_plane, m_plane = plane_of(kc, width), plane_of(tiles, width)
    patch = max(planes, 2 * m[0] * m[1]) * max(row_of(channels), row_of(outputs))
    patch += zeros_of(form, channels, outputs, dilation)
    return v_plane, u_plane, m_plane, max(weight_planes(form) * u_plane + planes * m_plane, patch) + patch + LANES


@apart_jit
def _panel_job(
    panel: int, form: int, weight: ndarray, flip: bool, tiles: Tiles, v: ndarray, v_plane: int, u_plane: int,
    m_plane: int, finish: bool, end: ndarray, shortcut: ndarray, own: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute a panel of the outputs of all tiles."""
    planes, outputs, columns, vector = planes_of(form), y.shape[3], panel_width(y), lanes(y)
    channels, count = weight.shape[3] if flip else weight.shape[2], count_of(y.shape[0], tiles)
    kc = depth_of_sums(form, channels, outputs, 1)
    row = width_of(outputs, kc)
    kernel = kernel_of(form, weight.shape[:2], (1, 1))
    begin, stop = panel * row, min(outputs, (panel + 1) * row)
    u, products = own, own[weight_planes(form) * u_plane :]
    patch, requests = products[planes * m_plane :], no_requests()
    for c in range(0, channels, kc):
        deep = min(kc, channels - c)
        for block in range(c // vector, ceildiv(c + deep, vector)):
            weight_to_planes(form, weight, kernel, ALL_PIXELS, flip, 1, 0, 0, block, begin, stop, u, u_plane, deep,
                             block * vector - c)  # fmt: skip
        for k in range(planes):
            u_at, v_at = weight_plane(form, k) * u_plane, k * v_plane + c * count
            o = 0
            while o < stop - begin:
                width = tile_columns(stop - begin - o, y)
                product_panel(count, width, deep, deep, c > 0, v, v_at, row_of(kc), 1, u, u_at + o * deep, columns,
                              columns * deep, products, k * m_plane + o, row, v, v_at + v_plane,
                              requests)  # fmt: skip
                o += width
    from_planes(form, products, m_plane, row, begin, tiles, 0, count, finish, end, shortcut, patch, begin, stop,
                ALL_PIXELS, y)  # fmt: skip


@apart_jit
def _tiles_job(
    task: int, tasks: int, form: int, spread: bool, x: ndarray, tiles: Tiles, padding: Pair, v: ndarray, v_plane: int,
    block: int, own: ndarray, outputs: int,
) -> None:  # fmt: skip
    """Transform this task's share of all tiles to V or, with `spread`, to D."""
    count = count_of(x.shape[0], tiles)
    first, last = task * count // tasks, (task + 1) * count // tasks
    size = zeros_of(form, x.shape[3], outputs, tiles[2:])
    zeros, patch = own[:size], own[size:]
    zeros[:] = 0
    to_planes(form, spread, x, (1, 1), tiles, padding, first, last - first, v, v_plane, block, first, patch, zeros,
              zeros[:0].reshape(0, 1))  # fmt: skip


@parallel_jit
def _divide(
    form: int, x: ndarray, weight: ndarray, flip: bool, finish: bool, end: ndarray, shortcut: ndarray,
    padding: Pair, dilation: Pair, memory: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Divide the tiles, and then the panels, among the threads."""
    planes, channels, outputs = planes_of(form), x.shape[3], y.shape[3]
    tiles = tiles_of(tile_of(form)[0], y.shape[1], y.shape[2], dilation)
    v_plane, u_plane, m_plane, each = _sizes(form, channels, outputs, count_of(y.shape[0], tiles), dilation)
    v, rest = memory[: planes * v_plane], memory[planes * v_plane :]
    kc = depth_of_sums(form, channels, outputs, 1)
    tasks, panels = rest.size // each, ceildiv(outputs, width_of(outputs, kc))
    for phase in range(2):
        for task in prange(tasks):
            q = np.int64(task)  # a prange index is unsigned
            own = rest[q * each : (q + 1) * each]
            if phase == 0:
                _tiles_job(q, tasks, form, False, x, tiles, padding, v, v_plane, row_of(kc), own, outputs)
            else:
                for panel in range(q * panels // tasks, (q + 1) * panels // tasks):
                    _panel_job(panel, form, weight, flip, tiles, v, v_plane, u_plane, m_plane, finish, end, shortcut,
                               own, y)  # fmt: skip


@helper
def _convolve(
    form: int, x: ndarray, weight: ndarray, flip: bool, bias: ndarray, scale: ndarray, shift: ndarray,
    shortcut: ndarray, relu: bool, padding: Pair, dilation: Pair, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute y from x or, with `flip`, dx (passed as y) from dy (passed as x)."""
    memory, outputs = aligned(scratch), y.shape[3]
    end, rest = memory[: 4 * row_of(outputs)], memory[4 * row_of(outputs) :]
    fill_end(bias, scale, shift, relu, outputs, end)
    finish = relu or bias.size + scale.size > 0
    _divide(form, x, weight, flip, finish, end, shortcut, padding, dilation, rest, y)


@helper
def forward(
    form: int, x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray,
    relu: bool, padding: Pair, dilation: Pair, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute y as winograd.py does."""
    _convolve(form, x, weight, False, bias, scale, shift, shortcut, relu, padding, dilation, scratch, y)


@helper
def backward_input(
    form: int, dy: ndarray, weight: ndarray, shortcut: ndarray, padding: Pair, dilation: Pair, scratch: ndarray,
    dx: ndarray,
) -> None:  # fmt: skip
    """Compute dx [+ shortcut] as winograd.py does."""
    none, flipped = scratch[:0], padding_of_dx(form, weight.shape[:2], padding, dilation)
    _convolve(form, dy, weight, True, none, none, none, shortcut, False, flipped, dilation, scratch, dx)


def _convolve_scratch(form: int, channels: int, outputs: int, images: int, out: Pair, dilation: Pair) -> int:
    planes, tiles = planes_of(form), count_of(images, tiles_of(tile_of(form)[0], *out, dilation))
    v_plane, _, _, each = _sizes(form, channels, outputs, tiles, dilation)
    return int(LINE + 4 * row_of(outputs) + planes * v_plane + threads() * each)


def forward_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair, dilation: Pair) -> int:
    """Return the number of elements of forward's scratch."""
    out = output_size(x_shape, w_shape, stride_of(form), padding, dilation)
    return _convolve_scratch(form, x_shape[3], w_shape[3], x_shape[0], out, dilation)


def backward_input_scratch(form: int, x_shape: Shape, w_shape: Shape, dilation: Pair) -> int:
    """Return the number of elements of backward_input's scratch."""
    return _convolve_scratch(form, w_shape[3], x_shape[3], x_shape[0], (x_shape[1], x_shape[2]), dilation)


# -- the weight gradient ------------------------------------------------------------------------------------------


@helper
def _gradient_sizes(form: int, channels: int, outputs: int, tiles: int, dilation: Pair) -> tuple[int, int, int, int]:
    """Return the sizes of a plane of V, of D and of a block of dU, and of a task's memory."""
    planes = planes_of(form)
    v_plane, d_plane = plane_of(tiles, round_up(channels, DEEP)), plane_of(tiles, round_up(outputs, NR))
    patch = planes * max(row_of(channels), row_of(outputs)) + zeros_of(form, channels, outputs, dilation)
    du_plane = plane_of(DEEP, width_of(outputs, DEEP))
    return v_plane, d_plane, du_plane, max(planes * du_plane, patch) + LANES


@apart_jit
def _block_job(
    job: int, form: int, count: int, kc: int, v: ndarray, v_plane: int, d: ndarray, d_plane: int, du: ndarray,
    du_plane: int, dweight: ndarray,
) -> None:  # fmt: skip
    """Compute a block of dweight: DEEP input channels and a panel of outputs. The blocks vary fastest.

    kc: the number of tiles that are summed in one go
    """
    planes, n = planes_of(form), tile_of(form)[2]
    (wide, channels, outputs), columns = dweight.shape[1:], panel_width(dweight)
    blocks, row, flat = ceildiv(channels, DEEP), width_of(outputs, DEEP), dweight.reshape(-1)
    first, begin = job % blocks * DEEP, job // blocks * row
    deep, width, requests = min(DEEP, channels - first), min(row, outputs - begin), no_requests()
    for k in range(planes):
        v_at, d_at, o = k * v_plane + first * count, k * d_plane + begin * count, 0
        while o < width:
            some = tile_columns(width - o, dweight)
            at = d_at + o // NR * NR * count + o % NR
            after = NR * count if columns == NR else columns  # to the next panel of D
            product_panel(deep, some, count, kc, False, v, v_at, 1, DEEP, d, at, NR, after,
                          du, k * du_plane + o, row, v, v_at + v_plane, requests)  # fmt: skip
            o += some
    for c in range(deep):
        for o in range(0, width, lanes(dweight)):
            gather_transform(form, du, c * row + o, n[1] * du_plane, du_plane, (0, n[0]), (0, n[1]), du,
                             flat, (first + c) * outputs + begin + o, wide * channels * outputs,
                             channels * outputs)  # fmt: skip


@parallel_jit
def backward_weight(
    form: int, x: ndarray, dy: ndarray, padding: Pair, dilation: Pair, scratch: ndarray, dweight: ndarray
) -> None:
    """Compute dweight as in winograd_gradient.py. The threads divide the tiles, and then the blocks."""
    planes, channels, outputs = planes_of(form), x.shape[3], dy.shape[3]
    tiles = tiles_of(tile_of(form)[0], dy.shape[1], dy.shape[2], dilation)
    count = count_of(x.shape[0], tiles)
    v_plane, d_plane, du_plane, each = _gradient_sizes(form, channels, outputs, count, dilation)
    memory = aligned(scratch)
    v, d = memory[: planes * v_plane], memory[planes * v_plane : planes * (v_plane + d_plane)]
    rest = memory[planes * (v_plane + d_plane) :]
    tasks, jobs = rest.size // each, ceildiv(channels, DEEP) * ceildiv(outputs, width_of(outputs, DEEP))
    kernel = kernel_of(form, dweight.shape[:2], (1, 1))
    group = gradient_sizes(form, kernel, channels, outputs, 1, count, dilation)[1]
    kc = TILES_EIGHT if has_eight_points(form) else group
    for phase in range(2):
        for task in prange(tasks):
            q = np.int64(task)
            own = rest[q * each : (q + 1) * each]
            if phase == 0:
                _tiles_job(q, tasks, form, False, x, tiles, padding, v, v_plane, DEEP, own, outputs)
                _tiles_job(q, tasks, form, True, dy, tiles, (0, 0), d, d_plane, NR, own, channels)
            else:
                for job in range(q * jobs // tasks, (q + 1) * jobs // tasks):
                    _block_job(job, form, count, kc, v, v_plane, d, d_plane, own, du_plane, dweight)


def backward_weight_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair, dilation: Pair) -> int:
    """Return the number of elements of backward_weight's scratch."""
    planes, out = planes_of(form), output_size(x_shape, w_shape, stride_of(form), padding, dilation)
    tiles = count_of(x_shape[0], tiles_of(tile_of(form)[0], *out, dilation))
    v_plane, d_plane, _, each = _gradient_sizes(form, x_shape[3], w_shape[3], tiles, dilation)
    return int(LINE + planes * (v_plane + d_plane) + threads() * each)
