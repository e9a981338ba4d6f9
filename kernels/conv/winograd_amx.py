"""Winograd's matrix products on AMX (kernels/matmul/amx.py): planes as strips and panels of bfloat16 parts.

U is split into parts once, when it is computed. A plane of V is split right before it is multiplied. It is then in the
nearest caches, and so are its parts. The products are those of winograd.py, in another order.
The weight gradient (winograd_gradient.py) uses vectors: with AMX, it would have to transpose V.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.amx import (
    BLOCK,
    SIDE,
    count_of,
    multiply_streaming,
    parts_size,
    split_panels,
    split_strip,
)
from minidl.kernels.matmul.tile import lanes

from .forms import Kernel, Phase, count_of_pieces, weight_planes
from .planes import plane_of, round_up
from .weights import weight_to_planes


@helper
def weight_memory(form: int, outputs: int) -> int:
    """Return the size of the memory for split_weight."""
    return weight_planes(form) * plane_of(SIDE, round_up(outputs, SIDE))


@apart_jit
def split_weight(
    form: int, weight: ndarray, kernel: Kernel, phase: Phase, flip: bool, block: int, u: ndarray, plane: int,
    memory: ndarray,
) -> None:  # fmt: skip
    """Compute the planes of 32 rows of U, and split them: block number `block` of each panel of u.

    The rows are input channels, or those of all pieces of the kernel (forms.py), one piece after the other. Then a
    piece has whole vectors of channels.
    """
    vector = lanes(weight)
    channels, outputs = (weight.shape[3], weight.shape[2]) if flip else (weight.shape[2], weight.shape[3])
    rows = channels * count_of_pieces(form, kernel)
    depth, own_plane = min(SIDE, rows - block * SIDE), plane_of(SIDE, round_up(outputs, SIDE))
    for c in range(0, depth, vector):
        piece, channel = divmod(block * SIDE + c, channels)
        weight_to_planes(form, weight, kernel, phase, flip, 1, 0, piece, channel // vector, 0, outputs, memory,
                         own_plane, SIDE, c)  # fmt: skip
    for k in range(weight_planes(form)):
        for o in range(0, outputs, SIDE):
            to = k * plane + o // SIDE * parts_size(1, rows) + block * BLOCK
            split_panels(memory, k * own_plane + o * SIDE, SIDE, min(SIDE, outputs - o), depth, u, to)


@apart_jit
def multiply_plane(
    count: int, depth: int, v: ndarray, v_at: int, v_row: int, u: ndarray, u_at: int, begin: int, stop: int,
    m_row: int, strips: ndarray,
) -> None:  # fmt: skip
    """Replace V[k] by the columns [begin, stop) of M[k] = V[k] @ U[k] for `count` tiles.

    Up to 31 rows after the last one get any values. strips: memory for the parts of V[k]
    """
    size = parts_size(1, depth)
    for t in range(0, count, SIDE):
        split_strip(v, v_at + t * v_row, v_row, min(SIDE, count - t), depth, strips, t // SIDE * size)
    for o in range(begin, stop, SIDE):
        for t in range(0, count, SIDE):
            multiply_streaming(count - t, stop - o, count_of(depth), False, strips, t // SIDE * size,
                               u, u_at + o // SIDE * size, v, v_at + t * m_row + o, m_row)  # fmt: skip
