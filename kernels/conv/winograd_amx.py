"""Winograd's matrix products on AMX (kernels/matmul/amx.py): planes as strips and panels of bfloat16 parts.

U is split into parts once, when it is computed. A plane of V is split right before it is multiplied. It is then in the
nearest caches, and so are its parts. The products are those of winograd.py and winograd_gradient.py, in another order.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.amx import (
    BLOCK,
    SHAPES,
    SIDE,
    SQUARE,
    begin_tiles,
    count_of,
    end_tiles,
    multiply,
    multiply_streaming,
    parts_size,
    split_panels,
    split_strip,
    split_transposed,
)
from minidl.kernels.matmul.blocks import LANES
from minidl.kernels.matmul.tile import lanes

from .forms import weight_planes
from .planes import plane_of, round_up, row_of, weight_to_planes


@helper
def weight_memory(form: int, outputs: int) -> int:
    """Return the size of the memory for split_weight."""
    return weight_planes(form) * plane_of(SIDE, round_up(outputs, SIDE))


@apart_jit
def split_weight(form: int, weight: ndarray, flip: bool, block: int, u: ndarray, plane: int, memory: ndarray) -> None:
    """Compute the planes of U for 32 input channels, and split them: block number `block` of each panel of u."""
    vector = lanes(weight)
    channels, outputs = (weight.shape[3], weight.shape[2]) if flip else (weight.shape[2], weight.shape[3])
    depth, own_plane = min(SIDE, channels - block * SIDE), plane_of(SIDE, round_up(outputs, SIDE))
    for c in range(0, depth, vector):
        weight_to_planes(form, weight, flip, 1, 0, (block * SIDE + c) // vector, 0, outputs, memory, own_plane, SIDE,
                         c)  # fmt: skip
    for k in range(weight_planes(form)):
        for o in range(0, outputs, SIDE):
            to = k * plane + o // SIDE * parts_size(1, channels) + block * BLOCK
            split_panels(memory, k * own_plane + o * SIDE, SIDE, min(SIDE, outputs - o), depth, u, to)


@apart_jit
def multiply_plane(
    count: int, channels: int, v: ndarray, v_at: int, v_row: int, u: ndarray, u_at: int, begin: int, stop: int,
    m_row: int, strips: ndarray,
) -> None:  # fmt: skip
    """Replace V[k] by the columns [begin, stop) of M[k] = V[k] @ U[k] for `count` tiles.

    Up to 31 rows after the last one get any values. strips: memory for the parts of V[k]
    """
    size = parts_size(1, channels)
    for t in range(0, count, SIDE):
        split_strip(v, v_at + t * v_row, v_row, min(SIDE, count - t), channels, strips, t // SIDE * size)
    for o in range(begin, stop, SIDE):
        for t in range(0, count, SIDE):
            multiply_streaming(count - t, stop - o, count_of(channels), False, strips, t // SIDE * size,
                               u, u_at + o // SIDE * size, v, v_at + t * m_row + o, m_row)  # fmt: skip


@apart_jit
def add_gradient_planes(
    begin: int, end: int, channels: int, outputs: int, count: int, accumulate: bool, v: ndarray, v_plane: int,
    d: ndarray, d_plane: int, du: ndarray, du_plane: int, memory: ndarray,
) -> None:  # fmt: skip
    """Compute dU[k] = V[k]^T @ D[k] for begin <= k < end, sums over `count` tiles, or add them to dU[k].

    V and D consist of blocks of 32 channels (`block` in to_planes). Up to 31 rows after those of dU[k] get any values.
    memory: a square, the parts of V[k], and the parts of a block of D[k]
    """
    size, tiles = parts_size(1, count), (v_plane - LANES) // round_up(channels, SIDE)
    square, strips, panel = memory[:SQUARE], memory[SQUARE:], memory[SQUARE + parts_size(channels, count) :]
    row = row_of(outputs)
    begin_tiles(SHAPES)
    for k in range(begin, end):
        for c in range(0, channels, SIDE):
            split_transposed(v, k * v_plane + c * tiles, SIDE, min(SIDE, channels - c), count, square, strips,
                             c // SIDE * size)  # fmt: skip
        for o in range(0, outputs, SIDE):
            split_panels(d, k * d_plane + o * tiles, SIDE, min(SIDE, outputs - o), count, panel, 0)
            for c in range(0, channels, SIDE):
                multiply(channels - c, outputs - o, count_of(count), accumulate, strips, c // SIDE * size, panel, 0,
                         du, k * du_plane + c * row + o, row)  # fmt: skip
    end_tiles(SHAPES)
