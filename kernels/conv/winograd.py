"""Winograd's convolution: fewer multiplications, as one matrix product for each place of a transformed tile.

Stride and dilation 1, one group. An image is cut into tiles of m x m outputs; each wants n x n inputs (n = m + r - 1):

    V[k] (tiles, C)  =  BT d B        n n planes k from each tile of the input
    U[k] (C, O)      =  G g GT        and from the weights
    M[k] (tiles, O)  =  V[k] @ U[k]   n n matrix products: this is all the multiplying
    y                =  AT M A        [+ bias] [* scale + shift] [relu], m m outputs from the n n planes

dx is the same with dy as the input, and weights flipped and transposed. dweight goes the other way through U:

    D[k] (tiles, O)  =  A dy AT       dU[k] (C, O) = V[k]^T @ D[k]       dweight = GT dU G

WINOGRAD.md explains it; transforms.py holds the matrices. `form` is an int from choice.py, never DIRECT.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import VECTOR_BYTES, jit, parallel_jit, prange, threads
from minidl.kernels.matmul.tile import lanes, panel, panel_width

from .choice import F2X2_3X3, F4X4_3X3
from .reference import Pair
from .transforms import FOUR_POINTS, SIX_POINTS, make_output_transform, make_transform, matrices, transposed

Shape = tuple[int, int, int, int]
WIDTH = VECTOR_BYTES // 4  # float32 numbers in a vector: rows of planes are whole vectors
PARTS = 8

_AT4, _G3, _BT6 = matrices(SIX_POINTS, 4, 3)
_AT2, _G5, _ = matrices(SIX_POINTS, 2, 5)
_AT2_SMALL, _G3_SMALL, _BT4 = matrices(FOUR_POINTS, 2, 3)
_input6, _input4 = make_transform(_BT6), make_transform(_BT4)
_weight3, _weight5, _weight3_small = make_transform(_G3), make_transform(_G5), make_transform(_G3_SMALL)
_output4, _output2, _output2_small = (make_output_transform(a) for a in (_AT4, _AT2, _AT2_SMALL))
_spread4, _spread2, _spread2_small = (make_transform(transposed(a)) for a in (_AT4, _AT2, _AT2_SMALL))
_gather3, _gather5, _gather3_small = (make_transform(transposed(g)) for g in (_G3, _G5, _G3_SMALL))


# -- sizes -------------------------------------------------------------------------------------------------------


@jit
def _tile(form: int) -> tuple[int, int, int]:
    """m, r, n"""
    if form == F4X4_3X3:
        return 4, 3, 6
    if form == F2X2_3X3:
        return 2, 3, 4
    return 2, 5, 6


@jit
def _up(x: int, step: int) -> int:
    return (x + step - 1) // step * step


@jit
def _row(channels: int) -> int:
    return _up(channels, WIDTH)


@jit
def _plane(rows: int, row: int) -> int:
    """Numbers from one plane to the next: one vector more than they hold.

    A tile's n n vectors go to n n planes. Planes a multiple of 4 KB apart would all fall into the same few places of
    the caches, each pushing out the one before.
    """
    return rows * row + WIDTH


@jit
def _group(planes: int, channels: int, outputs: int, tiles: int) -> int:
    """Tiles that are transformed and multiplied together: V and M of a group stay in a core's second cache."""
    fitting = 200_000 // (planes * (channels + outputs))
    return max(1, min(tiles, max(16, min(64, fitting // 8 * 8))))


@jit
def _aligned(scratch: ndarray) -> int:
    """The first element of scratch on a 64-byte boundary: vectors that straddle two cache lines take twice as long."""
    return -(scratch.ctypes.data // scratch.itemsize) % (64 // scratch.itemsize)


@jit
def _tiles(m: int, height: int, width: int) -> Pair:
    return (height + m - 1) // m, (width + m - 1) // m


# -- tiles, into planes and out of them ---------------------------------------------------------------------------


@jit
def _cut(x: ndarray, image: int, top: int, left: int, side: int, patch: ndarray, step: int) -> None:
    """patch (side, side, step) = x[image, top : top + side, left : left + side], with zeros where x has nothing."""
    height, width, channels = x.shape[1:]
    patch[: side * side * step] = 0
    for i in range(max(0, -top), min(side, height - top)):
        for j in range(max(0, -left), min(side, width - left)):
            target = patch[(i * side + j) * step : (i * side + j) * step + channels]
            source = x[image, top + i, left + j]
            for c in range(channels):
                target[c] = source[c]


@jit
def _to_planes(
    form: int, spread: bool, x: ndarray, tiles: Pair, padding: Pair, first: int, count: int,
    planes: ndarray, plane: int, row: int, patch: ndarray,
) -> None:  # fmt: skip
    """planes[k plane + t row + c] = BT d B of the tiles first ... first + count of x, or (spread) A dy AT.

    A tile that sticks out of the image, or has fewer channels than a vector, is read through `patch`.
    """
    m, _, n = _tile(form)
    height, width, channels = x.shape[1:]
    vector = lanes(x)
    side = m if spread else n
    pixels = x.reshape(-1)
    step = max(channels, vector)
    for t in range(count):
        image, place = divmod(first + t, tiles[0] * tiles[1])
        top, left = place // tiles[1] * m - padding[0], place % tiles[1] * m - padding[1]
        source, at, source_row, source_column = pixels, ((image * height + top) * width + left) * channels, 0, channels
        source_row = width * channels
        outside = top < 0 or left < 0 or top + side > height or left + side > width
        if outside or channels < vector:
            _cut(x, image, top, left, side, patch, step)
            source, at, source_row, source_column = patch, 0, side * step, step
        for begin in range(0, step, vector):
            c = min(begin, step - vector)  # the last vector overlaps the one before
            to = t * row + c
            if not spread:
                if n == 6:
                    _input6(source, at + c, source_row, source_column, planes, to, n * plane, plane)
                else:
                    _input4(source, at + c, source_row, source_column, planes, to, n * plane, plane)
            elif m == 4:
                _spread4(source, at + c, source_row, source_column, planes, to, n * plane, plane)
            elif n == 6:
                _spread2(source, at + c, source_row, source_column, planes, to, n * plane, plane)
            else:
                _spread2_small(source, at + c, source_row, source_column, planes, to, n * plane, plane)


@jit
def _from_planes(
    form: int, planes: ndarray, plane: int, row: int, tiles: Pair, first: int, count: int,
    finish: bool, end: ndarray, patch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """y = AT M A of the tiles first ... first + count, finished with `end` (bias, scale, shift, floor)."""
    m, _, n = _tile(form)
    height, width, outputs = y.shape[1:]
    vector = lanes(y)
    pixels = y.reshape(-1)
    step = max(outputs, vector)
    end_step = _row(outputs)
    for t in range(count):
        image, place = divmod(first + t, tiles[0] * tiles[1])
        top, left = place // tiles[1] * m, place % tiles[1] * m
        target, at, target_row, target_column = pixels, ((image * height + top) * width + left) * outputs, 0, outputs
        target_row = width * outputs
        through = top + m > height or left + m > width or outputs < vector
        if through:
            target, at, target_row, target_column = patch, 0, m * step, step
        for begin in range(0, step, vector):
            o = min(begin, step - vector)
            here = t * row + o
            if m == 4:
                _output4(planes, here, n * plane, plane, target, at + o, target_row, target_column, finish, end, o, end_step)
            elif n == 6:
                _output2(planes, here, n * plane, plane, target, at + o, target_row, target_column, finish, end, o, end_step)
            else:
                _output2_small(
                    planes, here, n * plane, plane, target, at + o, target_row, target_column, finish, end, o, end_step
                )
        if through:
            for i in range(min(m, height - top)):
                for j in range(min(m, width - left)):
                    y[image, top + i, left + j] = patch[(i * m + j) * step : (i * m + j) * step + outputs]


# -- weights --------------------------------------------------------------------------------------------------------


@jit
def _weight_block(form: int, weight: ndarray, flip: bool, block: int, u: ndarray, plane: int) -> None:
    """u = G g GT for one vector's worth of input channels, packed for the micro-kernel: panels (C, panel width).

    flip: for dx. The kernel is turned around, and what were outputs are the channels.
    """
    r = weight.shape[0]
    vector = lanes(weight)
    panel_columns = 2 * vector
    channels, outputs = (weight.shape[3], weight.shape[2]) if flip else (weight.shape[2], weight.shape[3])
    first = block * vector
    count = min(vector, channels - first)
    patch = np.empty(r * r * vector * vector, weight.dtype)  # (r, r, channels, outputs)
    flat = weight.reshape(-1)
    n = _tile(form)[2]
    for o in range(0, outputs, vector):
        through = flip or o + vector > outputs
        if through:
            wide = min(vector, outputs - o)
            patch[:] = 0
            for u_ in range(r):
                for v_ in range(r):
                    part = patch[(u_ * r + v_) * vector * vector :]
                    for c in range(count):
                        for j in range(wide):
                            if flip:
                                part[c * vector + j] = weight[r - 1 - u_, r - 1 - v_, o + j, first + c]
                            else:
                                part[c * vector + j] = weight[u_, v_, first + c, o + j]
        for c in range(count):
            source, at, step = flat, (first + c) * outputs + o, channels * outputs
            if through:
                source, at, step = patch, c * vector, vector * vector
            to = o // panel_columns * panel_columns * channels + (first + c) * panel_columns + o % panel_columns
            if r == 5:
                _weight5(source, at, r * step, step, u, to, n * plane, plane)
            elif n == 6:
                _weight3(source, at, r * step, step, u, to, n * plane, plane)
            else:
                _weight3_small(source, at, r * step, step, u, to, n * plane, plane)


@jit
def _weight_back(form: int, parts: int, du: ndarray, part: int, plane: int, c: int, dweight: ndarray) -> None:
    """dweight[:, :, c] = GT dU G, the partial sums of dU added in their order"""
    _, r, n = _tile(form)
    channels, outputs = dweight.shape[2:]
    vector = lanes(dweight)
    row = _row(outputs)
    flat = dweight.reshape(-1)
    for k in range(n * n):
        total = du[k * plane + c * row : k * plane + c * row + outputs]
        for q in range(1, parts):
            other = du[q * part + k * plane + c * row : q * part + k * plane + c * row + outputs]
            for o in range(outputs):
                total[o] += other[o]
    through = outputs < vector
    patch = np.empty(r * r * vector, dweight.dtype)
    for begin in range(0, max(outputs, vector), vector):
        o = max(0, min(begin, outputs - vector))
        target, at, step = flat, c * outputs + o, channels * outputs
        if through:
            target, at, step = patch, 0, vector
        if r == 5:
            _gather5(du, c * row + o, n * plane, plane, target, at, r * step, step)
        elif n == 6:
            _gather3(du, c * row + o, n * plane, plane, target, at, r * step, step)
        else:
            _gather3_small(du, c * row + o, n * plane, plane, target, at, r * step, step)
    if through:
        for i in range(r):
            for j in range(r):
                dweight[i, j, c] = patch[(i * r + j) * vector : (i * r + j) * vector + outputs]


# -- forward, and the data gradient -------------------------------------------------------------------------------


@jit
def _convolve_sizes(form: int, channels: int, outputs: int, tiles: int) -> tuple[int, int, int, int, int]:
    """Tiles in a group; numbers in a plane of U, V and M; numbers that each task wants"""
    m, _, n = _tile(form)
    group = _group(n * n, channels, outputs, tiles)
    u_plane = _plane(channels, _up(outputs, 2 * WIDTH))
    v_plane, m_plane = _plane(group, _row(channels)), _plane(group, _row(outputs))
    patch = max(n * n * _row(channels), m * m * _row(outputs))
    return group, u_plane, v_plane, m_plane, n * n * (v_plane + m_plane) + patch + WIDTH


@jit
def _convolve_group(
    form: int, x: ndarray, tiles: Pair, padding: Pair, first: int, group: int, count: int, u: ndarray, u_plane: int,
    finish: bool, end: ndarray, own: ndarray, v_plane: int, m_plane: int, y: ndarray,
) -> None:  # fmt: skip
    m, _, n = _tile(form)
    channels, outputs = x.shape[3], y.shape[3]
    vector = lanes(x)
    v = own[: n * n * v_plane]
    products = own[n * n * v_plane : n * n * (v_plane + m_plane)]
    patch = own[n * n * (v_plane + m_plane) :]
    v_row, m_row = _row(channels), _row(outputs)
    v_rows, m_rows, taps = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(1, np.int64)
    for t in range(count):
        v_rows[t], m_rows[t] = t * v_row, t * m_row
    _to_planes(form, False, x, tiles, padding, first, count, v, v_plane, v_row, patch)
    columns = panel_width(x)
    for k in range(n * n):
        for o in range(0, outputs, columns):
            panel(count, 1, channels, False, v, taps, v_rows, k * v_plane, 1,
                  u, taps, k * u_plane + o * channels, columns,
                  products, m_rows, k * m_plane + o, min(columns, outputs - o))  # fmt: skip
    _from_planes(form, products, m_plane, m_row, tiles, first, count, finish, end, patch, y)


@jit
def _fill_end(bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, outputs: int, end: ndarray) -> None:
    """end (4, outputs in whole vectors): what does nothing where something is not wanted. -0 + x is x, whatever x."""
    step = _row(outputs)
    for o in range(outputs):
        end[o] = bias[o] if bias.size else -0.0
        end[step + o] = scale[o] if scale.size else 1.0
        end[2 * step + o] = shift[o] if shift.size else -0.0
        end[3 * step + o] = 0.0 if relu else -np.inf


@parallel_jit
def _convolve(
    form: int, x: ndarray, weight: ndarray, flip: bool, bias: ndarray, scale: ndarray, shift: ndarray, relu: bool,
    padding: Pair, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    m, _, n = _tile(form)
    channels, outputs = x.shape[3], y.shape[3]
    vector = lanes(x)
    tiles = _tiles(m, y.shape[1], y.shape[2])
    total = y.shape[0] * tiles[0] * tiles[1]
    group, u_plane, v_plane, m_plane, each = _convolve_sizes(form, channels, outputs, total)
    start = _aligned(scratch)
    u = scratch[start : start + n * n * u_plane]
    end_size = 4 * _row(outputs)
    end = scratch[start + n * n * u_plane : start + n * n * u_plane + end_size]
    rest = scratch[start + n * n * u_plane + end_size :]
    finish = relu or bias.size > 0 or scale.size > 0
    _fill_end(bias, scale, shift, relu, outputs, end)
    blocks = (channels + vector - 1) // vector
    for block in prange(blocks):
        _weight_block(form, weight, flip, np.int64(block), u, u_plane)
    groups = (total + group - 1) // group
    tasks = rest.size // each
    for task in prange(tasks):
        q = np.int64(task)
        own = rest[q * each : (q + 1) * each]
        for g in range(q * groups // tasks, (q + 1) * groups // tasks):
            first = g * group
            _convolve_group(form, x, tiles, padding, first, group, min(group, total - first), u, u_plane,
                            finish, end, own, v_plane, m_plane, y)  # fmt: skip


@jit
def forward(
    form: int, x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, padding: Pair,
    scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """y (N, Ho, Wo, O) = conv(x, weight) [+ bias] [* scale + shift] [relu]; bias, scale, shift (O,) or size 0"""
    _convolve(form, x, weight, False, bias, scale, shift, relu, padding, scratch, y)


@jit
def backward_input(form: int, dy: ndarray, weight: ndarray, padding: Pair, scratch: ndarray, dx: ndarray) -> None:
    """dx (N, H, W, C) from dy (N, Ho, Wo, O)"""
    r = weight.shape[0]
    none = scratch[:0]
    _convolve(form, dy, weight, True, none, none, none, False, (r - 1 - padding[0], r - 1 - padding[1]), scratch, dx)


def _convolve_scratch(form: int, channels: int, outputs: int, images: int, out: Pair) -> int:
    m, _, n = _tile(form)
    tiles = _tiles(m, *out)
    total = images * tiles[0] * tiles[1]
    group, u_plane, _, _, each = _convolve_sizes(form, channels, outputs, total)
    tasks = max(1, min(threads(), -(-total // group)))
    return int(WIDTH + n * n * u_plane + 4 * _row(outputs) + tasks * each)


def forward_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    """How many numbers `forward` wants as scratch: it depends on the number of threads, the bits of y do not."""
    images, height, width, channels = x_shape
    r = w_shape[0]
    out = height + 2 * padding[0] - r + 1, width + 2 * padding[1] - r + 1
    return _convolve_scratch(form, channels, w_shape[3], images, out)


def backward_input_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    images, height, width, channels = x_shape
    return _convolve_scratch(form, w_shape[3], channels, images, (height, width))


# -- weight gradient ---------------------------------------------------------------------------------------------


@jit
def _gradient_sizes(form: int, channels: int, outputs: int, tiles: int) -> tuple[int, int, int, int, int, int]:
    """Partial sums; tiles in a group; numbers in a plane of dU, V and D; numbers that each task wants"""
    m, _, n = _tile(form)
    group = _group(n * n, channels, outputs, tiles)
    du_plane = _plane(channels, _row(outputs))
    v_plane, d_plane = _plane(group, _row(channels)), _plane(group, _row(outputs))
    patch = max(n * n * _row(channels), m * m * _row(outputs))
    parts = max(1, min(PARTS, tiles // group))
    return parts, group, du_plane, v_plane, d_plane, n * n * (v_plane + d_plane) + patch + WIDTH


@jit
def _gradient_group(
    form: int, x: ndarray, dy: ndarray, tiles: Pair, padding: Pair, first: int, count: int, accumulate: bool,
    own: ndarray, v_plane: int, d_plane: int, du: ndarray, du_plane: int,
) -> None:  # fmt: skip
    m, _, n = _tile(form)
    channels, outputs = x.shape[3], dy.shape[3]
    v = own[: n * n * v_plane]
    d = own[n * n * v_plane : n * n * (v_plane + d_plane)]
    patch = own[n * n * (v_plane + d_plane) :]
    v_row, d_row = _row(channels), _row(outputs)
    v_columns, du_rows, taps = np.empty(channels, np.int64), np.empty(channels, np.int64), np.zeros(1, np.int64)
    for c in range(channels):
        v_columns[c], du_rows[c] = c, c * d_row
    _to_planes(form, False, x, tiles, padding, first, count, v, v_plane, v_row, patch)
    _to_planes(form, True, dy, tiles, (0, 0), first, count, d, d_plane, d_row, patch)
    columns = panel_width(x)
    for k in range(n * n):
        for o in range(0, outputs, columns):
            panel(channels, 1, count, accumulate, v, taps, v_columns, k * v_plane, v_row,
                  d, taps, k * d_plane + o, d_row,
                  du, du_rows, k * du_plane + o, min(columns, outputs - o))  # fmt: skip


@parallel_jit
def backward_weight(form: int, x: ndarray, dy: ndarray, padding: Pair, scratch: ndarray, dweight: ndarray) -> None:
    """dweight (r, r, C, O)"""
    m, _, n = _tile(form)
    channels, outputs = x.shape[3], dy.shape[3]
    tiles = _tiles(m, dy.shape[1], dy.shape[2])
    total = x.shape[0] * tiles[0] * tiles[1]
    parts, group, du_plane, v_plane, d_plane, each = _gradient_sizes(form, channels, outputs, total)
    part = n * n * du_plane
    start = _aligned(scratch)
    du = scratch[start : start + parts * part]
    rest = scratch[start + parts * part :]
    groups = (total + group - 1) // group
    tasks = rest.size // each
    for task in prange(tasks):
        t = np.int64(task)
        own = rest[t * each : (t + 1) * each]
        for q in range(t * parts // tasks, (t + 1) * parts // tasks):
            begin = q * groups // parts
            for g in range(begin, (q + 1) * groups // parts):
                first = g * group
                _gradient_group(form, x, dy, tiles, padding, first, min(group, total - first), g > begin,
                                own, v_plane, d_plane, du[q * part : (q + 1) * part], du_plane)  # fmt: skip
    for c in prange(channels):
        _weight_back(form, parts, du, part, du_plane, np.int64(c), dweight)


def backward_weight_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    images, height, width, channels = x_shape
    m, r, n = _tile(form)
    tiles = _tiles(m, height + 2 * padding[0] - r + 1, width + 2 * padding[1] - r + 1)
    total = images * tiles[0] * tiles[1]
    parts, _, du_plane, _, _, each = _gradient_sizes(form, channels, w_shape[3], total)
    return int(WIDTH + parts * n * n * du_plane + max(1, min(threads(), parts)) * each)
