"""Winograd's convolution: fewer multiplications, as one matrix product for each position in a transformed tile.

With dilation, an image consists of several separate images (`tiles_of` in choice.py). The kernel g has r x r taps. An
image is cut into tiles of m x m outputs. Each tile reads a window of inputs d, and transforms it to n x n positions.
With stride 1, n = m + r - 1, and the window has n x n inputs, too. Plane k is a matrix that contains position k of all
tiles (for weights: of all kernels g):

    V[k] (tiles, C)  =  BT d B        from each tile of the input
    U[k] (C, O)      =  G g GT        from the weights
    M[k] (tiles, O)  =  V[k] @ U[k]   n^2 matrix products, with nearly all of the multiplications
    y                =  AT M A        [+ bias] [* scale + shift] [+ shortcut] [relu], m^2 outputs from the n^2 planes

With stride 2, planes that have the same weights share a plane of U (`weight_plane` in forms.py). With groups, U[k]
consists of a matrix (C / groups, O / groups) for each group, and so does the product. A kernel of more taps, or with
another stride, consists of pieces of r taps (`pieces_of` in forms.py): a row of V has the channels of all pieces. dx is
computed in the same way from dy, with flipped and transposed weights and, for stride 2, other matrices.
winograd_gradient.py computes dweight. WINOGRAD.md explains these steps; transforms.py computes the matrices, forms.py,
planes.py and weights.py apply them. `form` is one of the forms in choice.py. For a line of taps, m, r and n differ
along the two axes.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable
from numpy import ndarray

from minidl.engine.jit import HAS_AMX, apart_jit, helper, parallel_jit, prange, threads
from minidl.kernels.matmul.amx import SHAPES, SIDE, begin_tiles, end_tiles, parts_size
from minidl.kernels.matmul.blocks import LANES, LINE, NR, aligned
from minidl.kernels.matmul.product import count_of_tiles, product_panel, tile_columns
from minidl.kernels.matmul.requests import add_place, divide_places, next_request, no_requests, request_parts
from minidl.kernels.matmul.tile import lanes, panel_width

from .choice import SPACED_3X3, Tiles, count_of, on_amx, tiles_of
from .forms import (
    ALL_PIXELS,
    Kernel,
    Phase,
    count_of_pieces,
    depth_of_sums,
    kernel_of,
    kernel_of_dx,
    padding_of_piece,
    planes_of,
    tile_of,
    weight_plane,
    weight_planes,
)
from .geometry import ceildiv
from .norms import Norms, add_rest, add_up
from .planes import (
    divides_outputs,
    from_planes,
    group_of,
    in_place,
    pixels_above,
    pixels_of,
    plane_of,
    round_up,
    row_of,
    row_of_pieces,
    row_of_v,
    to_planes,
)
from .reference import Pair, output_size
from .short import MOST_PRODUCTS, short_tile
from .sizes import WINOGRAD_SERIAL
from .tall import TALL_MR, tall_tile
from .weights import weight_to_planes
from .winograd_amx import multiply_plane, split_weight, weight_memory

Shape = tuple[int, int, int, int]

# -- forward, and the data gradient -------------------------------------------------------------------------------


@helper
def zeros_of(form: int, channels: int, outputs: int, dilation: Pair) -> int:
    """Return the size of the zeros that to_planes reads instead of a row of pixels outside the image."""
    return tile_of(form)[2][1] * dilation[1] * max(row_of(channels), row_of(outputs))


@helper
def _convolve_sizes(
    form: int, kernel: Kernel, channels: int, outputs: int, groups: int, tiles: int, dilation: Pair
) -> tuple[int, int, int, int, int]:
    """Return five numbers: tiles in a group; sizes of a plane of U, of V and of M; size of a task's memory."""
    m, planes, pieces = tile_of(form)[0], planes_of(form), count_of_pieces(form, kernel)
    group = group_of(form, channels, outputs, groups, pieces, tiles)
    u_plane = plane_of(channels * pieces, round_up(outputs // groups, NR))
    v_plane = plane_of(group, row_of_v(form, channels, outputs, groups, pieces))
    m_plane = plane_of(group, row_of(outputs))
    # A tile, or its outputs and the shortcut.
    patch = max(planes, 2 * m[0] * m[1]) * max(row_of(channels), row_of(outputs))
    patch += zeros_of(form, channels, outputs, dilation) * kernel[3]
    least = 0
    # M replaces V. Float64, whose sizes are the same, uses m_plane, as it may without AMX.
    if on_amx(channels, outputs, groups, pieces, tiles):
        u_plane, least = parts_size(outputs, channels * pieces), weight_memory(form, outputs)
        v_plane = plane_of(round_up(group, SIDE), max(row_of_pieces(channels, pieces), row_of(outputs)))
        patch += parts_size(group, channels * pieces)
    return group, u_plane, v_plane, m_plane, max(least, planes * (v_plane + m_plane) + patch + LANES)


@helper
def _multiply_groups(
    count: int, channels: int, outputs: int, groups: int, pieces: int, kc: int, v: ndarray, v_at: int, v_row: int,
    u: ndarray, u_at: int, products: ndarray, m_at: int, m_row: int, requests: ndarray,
) -> None:  # fmt: skip
    """Compute M[k] for `count` tiles: one product for each group of channels and each piece of the kernel."""
    deep, wide, columns = channels // groups, outputs // groups, panel_width(v)
    rows = deep * pieces  # of a panel of U
    for g in range(groups):
        o = 0
        while o < wide:
            left, right, to = v_at + g * deep, u_at + (g * round_up(wide, columns) + o) * rows, m_at + g * wide + o
            width = tile_columns(wide - o, v)
            if pieces == 1 and deep <= MOST_PRODUCTS and width <= lanes(v):
                short_tile(count, deep, v, left, v_row, u, right, columns, products, to, m_row, width)
            else:
                for piece in range(pieces):
                    at = right + piece * deep * columns
                    product_panel(count, width, deep, kc, piece > 0, v, left + piece * channels, v_row, 1, u, at,
                                  columns, columns * rows, products, to, m_row, u, at + width * deep,
                                  requests)  # fmt: skip
            o += width


@apart_jit
def _convolve_group(
    form: int, x: ndarray, kernel: Kernel, groups: int, tiles: Tiles, padding: Pair, first: int, count: int, more: int,
    u: ndarray, u_plane: int, finish: bool, end: ndarray, shortcut: ndarray, own: ndarray, v_plane: int, m_plane: int,
    begin: int, stop: int, phase: Phase, y: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute the outputs [begin, stop) of y for `count` tiles, beginning with tile `first`.

    Beside the products, request the lines of the shortcut, of a batch norm's input and of y, and the pixels that the
    next `more` tiles read.
    """
    planes, above = planes_of(form), tile_of(form)[1][0] - 1 - padding[0]
    channels, outputs, pieces = x.shape[3], y.shape[3], count_of_pieces(form, kernel)
    deep = channels * pieces
    v = own[: planes * v_plane]
    products = own[planes * v_plane : planes * (v_plane + m_plane)]
    patch = own[planes * (v_plane + m_plane) :]
    zeros = own[own.size - zeros_of(form, channels, outputs, tiles[2:]) * kernel[3] :]
    zeros[:] = 0
    v_row, m_row = row_of_v(form, channels, outputs, groups, pieces), row_of(outputs)
    for piece in range(pieces):
        shifted = padding_of_piece(form, kernel, piece, padding, tiles[2:])
        to_planes(form, False, x, kernel[2:], tiles, shifted, first, count,
                  v[piece * channels :], v_plane, v_row, 0, patch, zeros, norms.before)  # fmt: skip
    columns, kc = panel_width(x), depth_of_sums(form, deep, outputs, groups)
    if in_place(form, channels, outputs, groups, pieces, lanes(x)) and stop - begin == outputs:
        products, m_plane, m_row = v, v_plane, v_row
    narrow = groups == 1 and v_row == lanes(x) and m_row == lanes(x)
    tall = count // TALL_MR * TALL_MR if narrow else 0  # rows for tall_tile
    total = count_of(x.shape[0], tiles)
    amx = on_amx(channels, outputs, groups, pieces, total) and lanes(x) == LANES
    here, requests = pixels_of(y, first, count, total, 0), no_requests()
    idle = no_requests() if groups > 1 else requests
    add_place(requests, u, x.reshape(-1), pixels_of(x, first + count, more, total, above))
    add_place(requests, u, shortcut, here if shortcut.size else (0, 0))
    add_place(requests, u, norms.x, here if norms.x.size else (0, 0))
    if amx or groups > 1:
        divide_places(requests, planes * requests[0], 1)
    else:
        add_place(requests, u, y.reshape(-1), here if stop - begin == outputs else (0, 0))
        divide_places(requests, planes * (tall // TALL_MR + count_of_tiles(count - tall, stop - begin, x)), deep)
    if HAS_AMX and amx:
        begin_tiles(SHAPES)
        for k in range(planes):
            request_parts(requests, u)
            u_at = weight_plane(form, k) * u_plane
            multiply_plane(count, deep, v, k * v_plane, v_row, u, u_at, begin, stop, m_row, patch)
        end_tiles(SHAPES)
        products, m_plane = v, v_plane
    for k in range(0 if amx else planes):
        u_at = weight_plane(form, k) * u_plane
        if groups > 1:
            request_parts(requests, u)
            _multiply_groups(count, channels, outputs, groups, pieces, kc, v, k * v_plane, v_row, u, u_at,
                             products, k * m_plane, m_row, idle)  # fmt: skip
            continue
        o = begin
        while o < stop:
            width = tile_columns(stop - o, x)
            last = o + width == stop  # then the next product begins with the next plane
            next_u = weight_plane(form, (k + 1) % planes) * u_plane
            soon = next_u + begin * deep if last else u_at + (o + width) * deep
            for t in range(0, tall, TALL_MR):
                later, step = next_request(requests)
                tall_tile(deep, False, v, k * v_plane + t * v_row, 1, u, u_at, columns,
                          products, k * m_plane + t * m_row, m_row, u, later, step)  # fmt: skip
            if tall < count:
                product_panel(count - tall, width, deep, kc, False,
                              v, k * v_plane + tall * v_row, v_row, 1, u, u_at + o * deep, columns,
                              columns * deep, products, k * m_plane + tall * m_row + o, m_row,
                              u, soon, requests)  # fmt: skip
            o += width
    from_planes(form, products, m_plane, m_row, 0, tiles, first, count, finish, end, shortcut, patch, begin, stop,
                phase, y)  # fmt: skip


def adds_up(
    form: int, images: int, out: Pair, kernel: Kernel, channels: int, outputs: int, groups: int, dilation: Pair
) -> bool:
    """Return whether the tasks can add up their outputs for a batch norm: they write successive rows of all outputs."""
    tiles, deep = count_of(images, tiles_of(tile_of(form)[0], *out, dilation)), channels * count_of_pieces(form, kernel)
    return bool(tiles > 0 and dilation == (1, 1) and not divides_outputs(form, deep, outputs, groups, tiles))


@apart_jit
def _weight_job(
    job: int, jobs: int, form: int, weight: ndarray, kernel: Kernel, phase: Phase, flip: bool, groups: int, blocks: int,
    amx: bool, u: ndarray, u_plane: int, own: ndarray,
) -> None:  # fmt: skip
    """Compute U for the job's share of all blocks of its rows: a vector of a piece's channels or, on AMX, 32 rows.

    blocks: the number of blocks in each group of channels
    """
    inner, outer = weight.shape[2], weight.shape[3] // groups
    channels, outputs = (outer, inner) if flip else (inner, outer)
    pieces = count_of_pieces(form, kernel)
    each = blocks // pieces  # blocks of a piece
    for number in range(job * groups * blocks // jobs, (job + 1) * groups * blocks // jobs):
        group, block = number // blocks, number % blocks
        if HAS_AMX and amx:  # a constant: without AMX, Numba leaves this branch out
            split_weight(form, weight, kernel, phase, flip, block, u, u_plane, own)
        else:
            piece, vector, rows = block // each, block % each, channels * pieces
            weight_to_planes(form, weight, kernel, phase, flip, groups, group, piece, vector, 0, outputs,
                             u[group * rows * round_up(outputs, panel_width(u)) :], u_plane, rows,
                             piece * channels + vector * lanes(weight))  # fmt: skip


@apart_jit
def _convolve_job(
    job: int, tasks: int, parts: int, form: int, x: ndarray, kernel: Kernel, groups: int, tiles: Tiles, padding: Pair,
    group: int, u: ndarray, u_plane: int, finish: bool, end: ndarray, shortcut: ndarray, own: ndarray, v_plane: int,
    m_plane: int, phase: Phase, y: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute one part of the outputs for one of `tasks` ranges of groups of tiles.

    A job has a number: task * parts + part.
    """
    total, outputs = count_of(x.shape[0], tiles), y.shape[3]
    ranges, panels = (total + group - 1) // group, (outputs + NR - 1) // NR
    task, part = job // parts, job % parts
    begin, stop = part * panels // parts * NR, min(outputs, (part + 1) * panels // parts * NR)
    m, start = tile_of(form)[0], task * ranges // tasks * group
    since = pixels_above(ceildiv(start, tiles[1]), m, tiles, y) if norms.sums.size else 0
    for g in range(task * ranges // tasks, (task + 1) * ranges // tasks):
        first, last = g * group, min(total, (task + 1) * ranges // tasks * group)
        count = min(group, last - first)
        more = min(group, last - first - count)
        _convolve_group(form, x, kernel, groups, tiles, padding, first, count, more, u, u_plane, finish, end, shortcut,
                        own, v_plane, m_plane, begin, stop, phase, y, norms)  # fmt: skip
        if norms.sums.size:
            since = add_up(y, since, pixels_above((first + count) // tiles[1], m, tiles, y), norms)


@helper
def fill_end(bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, outputs: int, end: ndarray) -> None:
    """Fill the four rows of `end` with bias, scale, shift and the least value of y (0 with relu, else -infinity).

    A missing scale is 1. A missing bias or shift is -0: -0 + x is x for every x, including -0.
    """
    step = row_of(outputs)
    for o in range(outputs):
        end[o] = bias[o] if bias.size else -0.0
        end[step + o] = scale[o] if scale.size else 1.0
        end[2 * step + o] = shift[o] if shift.size else -0.0
        end[3 * step + o] = 0.0 if relu else -np.inf


@parallel_jit
def _convolve(
    form: int, x: ndarray, weight: ndarray, kernel: Kernel, phase: Phase, flip: bool, bias: ndarray, scale: ndarray,
    shift: ndarray, shortcut: ndarray, relu: bool, padding: Pair, dilation: Pair, packed: ndarray, scratch: ndarray,
    y: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute y from x as in `forward`, or, with `flip`, dx (passed as y) from dy (passed as x)."""
    channels, outputs = x.shape[3], y.shape[3]
    groups, vector = (outputs if flip else channels) // weight.shape[2], lanes(x)
    tiles = tiles_of(tile_of(form)[0], ceildiv(y.shape[1], phase[0]), ceildiv(y.shape[2], phase[1]), dilation)
    total, pieces = count_of(y.shape[0], tiles), count_of_pieces(form, kernel)
    group, u_plane, v_plane, m_plane, each = _convolve_sizes(form, kernel, channels, outputs, groups, total, dilation)
    memory = aligned(scratch)
    size = weight_planes(form) * u_plane
    u, rest = aligned(packed if packed.size else scratch)[:size], memory[size:]
    first_step = 1 if packed.size and packed[packed.size - 1] else 0  # whether U is in `packed` already
    end, rest = rest[: 4 * row_of(outputs)], rest[4 * row_of(outputs) :]
    finish = relu or bias.size + scale.size > 0
    fill_end(bias, scale, shift, relu, outputs, end)
    amx = on_amx(channels, outputs, groups, pieces, total) and vector == LANES
    blocks = ceildiv(channels * pieces, SIDE) if amx else pieces * ceildiv(channels // groups, vector)
    jobs = rest.size // each
    parts = jobs if divides_outputs(form, channels * pieces, outputs, groups, total) else 1
    if jobs == 1:  # without a parallel loop, no other thread has to wake up
        if first_step == 0:
            _weight_job(0, 1, form, weight, kernel, phase, flip, groups, blocks, amx, u, u_plane, rest)
        _convolve_job(0, 1, 1, form, x, kernel, groups, tiles, padding, group, u, u_plane, finish, end, shortcut, rest,
                      v_plane, m_plane, phase, y, norms)  # fmt: skip
        first_step = 2
    for step in range(first_step, 2):  # one parallel loop for both: each parallel loop costs a second of compile time
        for job in prange(jobs):
            q = np.int64(job)  # a prange index is unsigned: Numba would compute unsigned + signed in float64
            own = rest[q * each : (q + 1) * each]
            if step == 0:
                _weight_job(q, jobs, form, weight, kernel, phase, flip, groups, blocks, amx, u, u_plane, own)
            else:
                _convolve_job(q, jobs // parts, parts, form, x, kernel, groups, tiles, padding, group, u, u_plane,
                              finish, end, shortcut, own, v_plane, m_plane, phase, y, norms)  # fmt: skip
    add_rest(y, norms)
    if packed.size:
        packed[packed.size - 1] = 1


@register_jitable(inline="always")  # Numba copies this call into cpu.py's function, and compiles no function for it
def forward(
    form: int, x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray,
    relu: bool, stride: Pair, padding: Pair, dilation: Pair, packed: ndarray, scratch: ndarray, y: ndarray,
    norms: Norms,
) -> None:  # fmt: skip
    """Compute y (N, Ho, Wo, O) = conv(x, weight) [+ bias] [* scale + shift] [+ shortcut] [relu].

    bias, scale, shift: (O,) or of size 0; shortcut: a vector with the layout of y, or of size 0; packed: of size 0, or
    memory for U (see reference.py); norms.before and norms.sums may be used
    """
    kernel = kernel_of(form, weight.shape[:2], stride)
    _convolve(form, x, weight, kernel, ALL_PIXELS, False, bias, scale, shift, shortcut, relu, padding, dilation, packed,
              scratch, y, norms)  # fmt: skip


@helper
def padding_of_dx(form: int, kernel: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Return the padding of dy in the convolution that computes dx."""
    flipped = (kernel[0] - 1) * dilation[0] - padding[0], (kernel[1] - 1) * dilation[1] - padding[1]
    return (flipped[0] // 2, flipped[1] // 2) if form >= SPACED_3X3 else flipped  # there, a pixel of dy counts as two


@register_jitable(inline="always")
def backward_input(
    form: int, dy: ndarray, weight: ndarray, shortcut: ndarray, stride: Pair, padding: Pair, dilation: Pair,
    scratch: ndarray, dx: ndarray, norms: Norms,
) -> None:  # fmt: skip
    """Compute dx (N, H, W, C) [+ shortcut] from dy (N, Ho, Wo, O). norms.before must be of size 0."""
    none, step = scratch[:0], kernel_of(form, weight.shape[:2], stride)[2:]
    kernel = kernel_of_dx(form, weight.shape[:2], stride)
    for row in range(step[0]):
        for column in range(step[1]):
            before = row + padding[0], column + padding[1]
            phase = step[0], step[1], row, column, before[0] % step[0], before[1] % step[1]
            shifted = padding_of_dx(form, kernel[:2], (before[0] // step[0], before[1] // step[1]), dilation)
            _convolve(form, dy, weight, kernel, phase, True, none, none, none, shortcut, False, shifted, dilation, none,
                      scratch, dx, norms)  # fmt: skip


def _convolve_scratch(
    form: int, kernel: Kernel, channels: int, outputs: int, groups: int, images: int, out: Pair, dilation: Pair
) -> int:
    tiles = tiles_of(tile_of(form)[0], *out, dilation)
    total = count_of(images, tiles)
    group, u_plane, _, _, each = _convolve_sizes(form, kernel, channels, outputs, groups, total, dilation)
    pieces = count_of_pieces(form, kernel)
    divides = divides_outputs(form, channels * pieces, outputs, groups, total)
    jobs = max(1, min(threads(), outputs // NR if divides else -(-total // group)))
    jobs = 1 if planes_of(form) * total * channels * pieces * outputs // groups < WINOGRAD_SERIAL else jobs
    return int(LINE + weight_planes(form) * u_plane + 4 * row_of(outputs) + jobs * each)


def packed_size(form: int, x_shape: Shape, w_shape: Shape, stride: Pair, padding: Pair, dilation: Pair) -> int:
    """Return the number of elements of forward's `packed`: U, and whether it is there."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    total = count_of(x_shape[0], tiles_of(tile_of(form)[0], *out, dilation))
    groups = x_shape[3] // w_shape[2]
    kernel = kernel_of(form, w_shape[:2], stride)
    u_plane = _convolve_sizes(form, kernel, x_shape[3], w_shape[3], groups, total, dilation)[1]
    return int(LINE + weight_planes(form) * u_plane + 1)


def forward_scratch(form: int, x_shape: Shape, w_shape: Shape, stride: Pair, padding: Pair, dilation: Pair) -> int:
    """Return the number of elements of forward's scratch."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    groups = x_shape[3] // w_shape[2]
    kernel = kernel_of(form, w_shape[:2], stride)
    return _convolve_scratch(form, kernel, x_shape[3], w_shape[3], groups, x_shape[0], out, dilation)


def backward_input_scratch(form: int, x_shape: Shape, w_shape: Shape, stride: Pair, dilation: Pair) -> int:
    """Return the number of elements of backward_input's scratch."""
    groups, kernel = x_shape[3] // w_shape[2], kernel_of_dx(form, w_shape[:2], stride)
    step = kernel_of(form, w_shape[:2], stride)[2:]
    out = ceildiv(x_shape[1], step[0]), ceildiv(x_shape[2], step[1])
    return _convolve_scratch(form, kernel, w_shape[3], x_shape[3], groups, x_shape[0], out, dilation)
