"""The weight gradient in Winograd's form (winograd.py).

It uses V, and the transposes of the steps that compute U, M and y:

    D[k] (tiles, O)  =  A dy AT       dU[k] (C, O) = V[k]^T @ D[k]       dweight = GT dU G

With groups, dU[k] is (C / groups, O): the columns of a group are the product of its channels of V[k] and D[k].
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange, threads
from minidl.kernels.matmul.blocks import LANES, LINE, NR, aligned
from minidl.kernels.matmul.product import count_of_tiles, product_panel, tile_columns
from minidl.kernels.matmul.requests import add_place, divide_places, next_request, no_requests, request_parts
from minidl.kernels.matmul.tile import lanes, panel_width

from .choice import Tiles, count_of, tiles_of
from .forms import Kernel, count_of_pieces, has_eight_points, kernel_of, padding_of_piece, planes_of, tile_of
from .planes import pixels_of, plane_of, round_up, row_of, to_planes
from .reference import Pair, output_size
from .sizes import TILES_EIGHT
from .tall import TALL_MR, tall_tile_side_by_side
from .weights import weight_from_planes
from .winograd import Shape, zeros_of


@helper
def _block(channels: int, groups: int) -> int:
    """Return the block size of the planes of V and D (`block` in to_planes): at most the width of a panel.

    With groups, a plane is a single block, since a group may begin anywhere.
    """
    return min(NR, row_of(channels)) if groups == 1 else row_of(channels)


@helper
def _column(channel: int, block: int, tiles: int) -> int:
    """Return where the numbers of a channel begin in a plane of V or D with this block size (to_planes)."""
    return channel // block * tiles * block + channel % block


@helper
def gradient_sizes(
    form: int, kernel: Kernel, channels: int, outputs: int, groups: int, tiles: int, dilation: Pair
) -> tuple[int, int, int, int, int, int]:
    """Return six numbers: partial sums; tiles in a group; sizes of a plane of dU, of V and of D; size of a patch.

    A small dU is computed as several partial sums, each over a range of tiles. They are added in order. For a large dU
    or few tiles there is only one partial sum. In this case, the threads divide the tiles of a group among themselves
    and transform them, then divide the planes among themselves and multiply. The number of partial sums does not depend
    on the number of threads.

    V and D of a group, and dU, should fit into the second-level cache of most CPUs.
    """
    planes, inner, tiles = planes_of(form), channels // groups, max(1, tiles)
    weights = count_of_pieces(form, kernel) * inner * outputs  # the numbers of dU, divided by the planes
    many = planes > 64  # V and D of a tile need more memory
    group = 32 if many else 48 if planes * (channels + outputs) >= 4096 else 64
    parts = 8 if planes * weights <= 2**16 else 4
    if weights > (4096 if many else 8192) or tiles < group * parts:
        group, parts = min(tiles, 128 if many else 256), 1
    each = (tiles + parts - 1) // parts  # groups of about equal size, without a small one at the end
    group = (each + (each + group - 1) // group - 1) // ((each + group - 1) // group)
    du_plane = plane_of(inner, row_of(outputs))
    v_plane = plane_of(group, round_up(channels, _block(channels, groups)))
    d_plane = plane_of(group, round_up(outputs, _block(outputs, groups)))
    patch = planes * max(row_of(channels), row_of(outputs)) + zeros_of(form, channels, outputs, dilation) * kernel[3]
    return parts, group, du_plane, v_plane, d_plane, patch


@apart_jit
def _gradient_tiles(
    form: int, x: ndarray, dy: ndarray, kernel: Kernel, groups: int, tiles: Tiles, padding: Pair, first: int,
    count: int, at_tile: int, spreads: bool, v: ndarray, v_plane: int, d: ndarray, d_plane: int, own: ndarray,
    before: ndarray,
) -> None:  # fmt: skip
    """Transform `count` tiles, beginning with tile `first`, and write V and, if `spreads`, D to the planes from row
    `at_tile` on.

    before: see Norms.
    """
    planes, channels, outputs = planes_of(form), x.shape[3], dy.shape[3]
    row, none = max(row_of(channels), row_of(outputs)), before[:0]
    patch, zeros = own[: planes * row], own[planes * row :][: zeros_of(form, channels, outputs, tiles[2:]) * kernel[3]]
    zeros[:] = 0
    v_block, d_block = _block(channels, groups), _block(outputs, groups)
    to_planes(form, False, x, kernel[2:], tiles, padding, first, count, v, v_plane, v_block, at_tile, patch, zeros,
              before)  # fmt: skip
    if spreads:
        to_planes(form, True, dy, (1, 1), tiles, (0, 0), first, count, d, d_plane, d_block, at_tile, patch, zeros, none)


@helper
def _add_groups(
    channels: int, outputs: int, groups: int, count: int, kc: int, accumulate: bool, v: ndarray, v_at: int,
    d: ndarray, d_at: int, du: ndarray, du_at: int, requests: ndarray,
) -> None:  # fmt: skip
    """Compute dU[k] (C / groups, O): the columns of a group are a product of its channels of V[k] and of D[k]."""
    inner, outer, columns = channels // groups, outputs // groups, panel_width(v)
    v_row, d_row = row_of(channels), row_of(outputs)
    for g in range(groups):
        o = 0
        while o < outer:
            width = tile_columns(outer - o, v)
            product_panel(inner, width, count, kc, accumulate, v, v_at + g * inner, 1, v_row,
                          d, d_at + g * outer + o, d_row, columns, du, du_at + g * outer + o, d_row, d,
                          d_at + g * outer + o + width, requests)  # fmt: skip
            o += width


@apart_jit
def _gradient_products(
    begin: int, end: int, planes: int, x: ndarray, dy: ndarray, groups: int, x_next: Pair, dy_next: Pair, count: int,
    kc: int, accumulate: bool, v: ndarray, v_plane: int, d: ndarray, d_plane: int, du: ndarray, du_plane: int,
) -> None:  # fmt: skip
    """Compute dU[k] = V[k]^T @ D[k] for begin <= k < end: sums over `count` tiles, kc tiles at a time. If `accumulate`,
    add them to dU[k].

    Beside the products, request what the next group of tiles reads: of x and of dy, the numbers whose begin and count
    are x_next and dy_next. planes: of V
    """
    channels, outputs = x.shape[3], dy.shape[3]
    v_block, d_block = _block(channels, groups), _block(outputs, groups)
    v_tiles = (v_plane - LANES) // round_up(channels, v_block)
    columns, row = panel_width(v), row_of(outputs)
    requests = no_requests()
    idle = no_requests() if groups > 1 else requests
    add_place(requests, v, x.reshape(-1), x_next)
    add_place(requests, v, dy.reshape(-1), dy_next)
    if groups > 1:
        divide_places(requests, (end - begin) * requests[0], 1)
    else:
        tiles = 0
        for first in range(0, channels, v_block):
            some = min(v_block, channels - first)
            tall = some // TALL_MR * TALL_MR if row == lanes(x) else 0
            tiles += tall // TALL_MR * ((count + kc - 1) // kc) + count_of_tiles(some - tall, outputs, v)
        divide_places(requests, (end - begin) * tiles, count)
    for k in range(begin, end):
        if groups > 1:
            request_parts(requests, v)
            _add_groups(channels, outputs, groups, count, kc, accumulate, v, k * v_plane, d, k * d_plane,
                        du, k * du_plane, idle)  # fmt: skip
            continue
        o = 0
        while o < outputs:
            d_at = k * d_plane + _column(o, d_block, v_tiles)
            d_next = k * d_plane + _column(o + columns, d_block, v_tiles)
            width = tile_columns(outputs - o, v)
            for first in range(0, channels, v_block):
                v_at, du_at = k * v_plane + first * v_tiles, k * du_plane + first * row + o
                some = min(v_block, channels - first)
                soon = v_at + (v_plane if o > 0 else v_tiles * v_block)  # of V[k + 1], or the next block of V[k]
                if first + some == channels:  # D follows V in memory
                    later = o + width < outputs
                    soon = planes * v_plane + k * d_plane + (_column(o + width, d_block, v_tiles) if later else d_plane)
                tall = some // TALL_MR * TALL_MR if row == lanes(x) else 0
                for c in range(0, tall, TALL_MR):
                    for t in range(0, count, kc):
                        later, step = next_request(requests)
                        tall_tile_side_by_side(min(kc, count - t), accumulate or t > 0,
                                               v, v_at + c + t * v_block, v_block, d, d_at + t * d_block, d_block,
                                               du, du_at + c * row, row, v, later, step)  # fmt: skip
                product_panel(some - tall, width, count, kc, accumulate, v, v_at + tall, 1, v_block,
                              d, d_at, d_block, d_next - d_at, du, du_at + tall * row, row, v,
                              soon, requests)  # fmt: skip
            o += width


@apart_jit
def _gradient_part(
    form: int, x: ndarray, dy: ndarray, kernel: Kernel, groups: int, tiles: Tiles, padding: Pair, begin: int, end: int,
    group: int, own: ndarray, v_plane: int, d_plane: int, du: ndarray, du_plane: int, before: ndarray,
) -> None:  # fmt: skip
    """Compute one partial sum of all planes: du[k] = V[k]^T @ D[k] for the tiles `begin` to `end` - 1.

    du has these planes for each piece of the kernel (forms.py). The pieces have the same D.
    """
    planes, above = planes_of(form), tile_of(form)[1][0] - 1 - padding[0]
    total = count_of(x.shape[0], tiles)
    v, d = own[: planes * v_plane], own[planes * v_plane : planes * (v_plane + d_plane)]
    patch = own[planes * (v_plane + d_plane) :]
    pieces = count_of_pieces(form, kernel)
    for first in range(begin, end, group):
        count = min(group, end - first)
        for piece in range(pieces):
            shift = padding_of_piece(form, kernel, piece, padding, tiles[2:])
            _gradient_tiles(form, x, dy, kernel, groups, tiles, shift, first, count, 0, piece == 0, v, v_plane, d,
                            d_plane, patch, before)  # fmt: skip
            more = min(group, end - first - count) if piece == pieces - 1 else 0
            x_next = pixels_of(x, first + count, more, total, above)
            dy_next = pixels_of(dy, first + count, more, total, 0)
            _gradient_products(0, planes, planes, x, dy, groups, x_next, dy_next, count, count, first > begin, v,
                               v_plane, d, d_plane, du[piece * planes * du_plane :], du_plane)  # fmt: skip


@parallel_jit
def backward_weight(
    form: int, x: ndarray, dy: ndarray, stride: Pair, padding: Pair, dilation: Pair, before: ndarray, scratch: ndarray,
    dweight: ndarray,
) -> None:  # fmt: skip
    """Compute dweight (kh, kw, C / groups, O) from x (N, H, W, C) and dy (N, Ho, Wo, O). before: as in `forward`."""
    planes, channels, outputs = planes_of(form), x.shape[3], dy.shape[3]
    groups = channels // dweight.shape[2]
    tiles = tiles_of(tile_of(form)[0], dy.shape[1], dy.shape[2], dilation)
    total = count_of(x.shape[0], tiles)
    if total == 0:
        dweight[:] = 0
        return
    kernel = kernel_of(form, dweight.shape[:2], stride)
    pieces = count_of_pieces(form, kernel)
    parts, group, du_plane, v_plane, d_plane, each = gradient_sizes(
        form, kernel, channels, outputs, groups, total, dilation)  # fmt: skip
    part, pair = pieces * planes * du_plane, planes * (v_plane + d_plane)
    memory = aligned(scratch)
    du, shared = memory[: parts * part], memory[parts * part :]  # shared: V and D for all tasks if parts == 1
    own = shared[pair:] if parts == 1 else shared
    each += pair if parts > 1 else 0
    tasks = own.size // each
    # With several partial sums: one step for all of them, then one for dweight. With one partial sum: two steps for
    # each group of tiles and each piece of the kernel (transform, multiply), then one for dweight.
    steps = 2 if parts > 1 else 2 * pieces * ((total + group - 1) // group) + 1
    for step in range(steps):
        end = step == steps - 1
        transform = parts > 1 or step % 2 == 0
        first, piece = step // 2 // pieces * group, step // 2 % pieces
        count = min(group, total - first)
        jobs = dweight.shape[2] if end else tasks
        for job in prange(jobs):
            t = np.int64(job)  # see _convolve
            if end:
                weight_from_planes(form, kernel, parts, du, part, du_plane, t, dweight)
            elif parts > 1:
                for q in range(t * parts // tasks, (t + 1) * parts // tasks):
                    _gradient_part(form, x, dy, kernel, groups, tiles, padding, q * total // parts,
                                   (q + 1) * total // parts, group, own[t * each : (t + 1) * each], v_plane, d_plane,
                                   du[q * part : (q + 1) * part], du_plane, before)  # fmt: skip
            elif transform:
                begin, shift = t * count // tasks, padding_of_piece(form, kernel, piece, padding, dilation)
                _gradient_tiles(form, x, dy, kernel, groups, tiles, shift, first + begin,
                                (t + 1) * count // tasks - begin, begin, piece == 0, shared, v_plane,
                                shared[planes * v_plane :], d_plane, own[t * each : (t + 1) * each],
                                before)  # fmt: skip
            else:
                begin, stop, d = t * planes // tasks, (t + 1) * planes // tasks, shared[planes * v_plane :]
                nothing = 0, 0  # to request: it is not known which thread will read the next tiles
                kc = TILES_EIGHT if has_eight_points(form) else count
                _gradient_products(begin, stop, planes, x, dy, groups, nothing, nothing, count, kc, first > 0,
                                   shared, v_plane, d, d_plane, du[piece * planes * du_plane :], du_plane)  # fmt: skip


def backward_weight_scratch(
    form: int, x_shape: Shape, w_shape: Shape, stride: Pair, padding: Pair, dilation: Pair
) -> int:
    """Return the number of elements of backward_weight's scratch."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    planes, total = planes_of(form), count_of(x_shape[0], tiles_of(tile_of(form)[0], *out, dilation))
    groups = x_shape[3] // w_shape[2]
    kernel = kernel_of(form, w_shape[:2], stride)
    pieces = count_of_pieces(form, kernel)
    parts, _, du_plane, v_plane, d_plane, each = gradient_sizes(
        form, kernel, x_shape[3], w_shape[3], groups, total, dilation)  # fmt: skip
    pair = planes * (v_plane + d_plane)
    tasks = max(1, min(threads(), parts if parts > 1 else planes))
    own = tasks * (pair + each) if parts > 1 else pair + tasks * each
    return int(LINE + parts * pieces * planes * du_plane + own)
