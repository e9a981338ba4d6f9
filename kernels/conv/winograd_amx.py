"""Winograd's matrix products on AMX (kernels/matmul/amx.py): planes as strips and panels of bfloat16 parts.

U is split into parts once, when it is computed. A plane of V is split right before it is multiplied. It is then in the
nearest caches, and so are its parts. The products are those of winograd.py and winograd_gradient.py, in another order.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import apart_jit, jit
from minidl.kernels.matmul.amx import (
    BLOCK,
    SIDE,
    count_of,
    multiply,
    multiply_streaming,
    parts_size,
    split_panels,
    split_strip,
)
from minidl.kernels.matmul.pack import pack_columns
from minidl.kernels.matmul.tile import lanes

from .planes import plane_of, round_up, tile_of, weight_to_planes

SQUARE = SIDE * SIDE + 2 * SIDE  # memory for a square of V, transposed


@jit
def weight_memory(form: int, outputs: int) -> int:
    """Return the size of the memory for split_weight."""
    n = tile_of(form)[2]
    return n * n * plane_of(SIDE, round_up(outputs, SIDE))


@apart_jit
def split_weight(form: int, weight: ndarray, flip: bool, block: int, u: ndarray, plane: int, memory: ndarray) -> None:
    """Compute the planes of U for 32 input channels, and split them: block number `block` of each panel of u."""
    n, vector = tile_of(form)[2], lanes(weight)
    channels, outputs = (weight.shape[3], weight.shape[2]) if flip else (weight.shape[2], weight.shape[3])
    depth, own_plane = min(SIDE, channels - block * SIDE), plane_of(SIDE, round_up(outputs, SIDE))
    for c in range(0, depth, vector):
        weight_to_planes(form, weight, flip, (block * SIDE + c) // vector, memory, own_plane, SIDE, c)
    for k in range(n * n):
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
def add_gradient_plane(
    channels: int, outputs: int, count: int, accumulate: bool, v: ndarray, v_at: int, v_block: int, v_tiles: int,
    d: ndarray, d_at: int, d_block: int, du: ndarray, du_at: int, du_row: int, memory: ndarray,
) -> None:  # fmt: skip
    """Compute dU[k] = V[k]^T @ D[k], or add it to dU[k]; up to 31 rows more get any values.

    v, d: planes in blocks of v_block and d_block channels (`block` in to_planes), with v_tiles rows. A block fills a
    strip or panel. memory: a square, and the parts of V and of a panel of D.
    """
    size = parts_size(1, count)
    square, strips, panel = memory[:SQUARE], memory[SQUARE:], memory[SQUARE + parts_size(channels, count) :]
    for c in range(0, channels, SIDE):
        for t in range(0, count, SIDE):
            some, deep, to = min(SIDE, channels - c), min(SIDE, count - t), c // SIDE * size + t // SIDE * BLOCK
            pack_columns(v, v_at + c * v_tiles + t * v_block, v_block, some, deep, square, SIDE)
            split_strip(square, 0, SIDE, some, deep, strips, to)
    for o in range(0, outputs, SIDE):
        split_panels(d, d_at + o * v_tiles, d_block, min(SIDE, outputs - o), count, panel, 0)
        for c in range(0, channels, SIDE):
            multiply(channels - c, outputs - o, count_of(count), accumulate, strips, c // SIDE * size, panel, 0,
                     du, du_at + c * du_row + o, du_row)  # fmt: skip
