"""Winograd's forms: the matrices of each form, functions that multiply by them, and sizes that follow from them.

choice.py numbers the forms, transforms.py computes matrices, and planes.py uses them.
"""

from __future__ import annotations

from minidl.engine.jit import helper
from minidl.kernels.matmul.blocks import LANES

from .choice import (
    F1X4_1X3,
    F1X4_1X5,
    F1X4_1X7,
    F2X2_3X3,
    F2X2_7X7,
    F3X3_4X4,
    F4X1_3X1,
    F4X1_5X1,
    F4X1_7X1,
    F4X4_3X3,
    F4X4_5X5,
    F5X5_2X2,
    SPACED_3X3,
    SPACED_4X4,
    STRIDE2_3X3,
    STRIDE2_4X4,
    pieces_along,
)
from .geometry import ceildiv
from .reference import Pair
from .sizes import KC_EIGHT, KC_LARGE, LARGE_U, LEAST_OUTPUTS, MOST_IN_ONE_GO, U_PER_TILE
from .transforms import (
    EIGHT_POINTS,
    FOUR_POINTS,
    SIX_POINTS,
    TEN_POINTS,
    Both,
    Matrices,
    Matrix,
    distinct,
    make_normalizing_transform,
    make_output_transform,
    make_transform,
    matrices,
    one_tap,
    spaced,
    strided,
    transposed,
)

Kernel = tuple[int, int, int, int]  # height and width in taps, vertical and horizontal stride (kernel_of)
# Which pixels of y or dx a call computes: their vertical and horizontal distance, the first row and column, and the
# first row and column of the taps that belong to them. These taps have the same distance. With stride s, dx has s x s
# phases, one for each s-th row and column.
Phase = tuple[int, int, int, int, int, int]
ALL_PIXELS = (1, 1, 0, 0, 0, 0)


def _lengths(both: Both) -> Pair:
    return len(both[0]), len(both[1])


def _widths(both: Both) -> Pair:
    return len(both[0][0]), len(both[1][0])


def _rows_among(rows: Matrix, matrix: Matrix, length: int) -> tuple[int, ...]:
    """Return which of `rows` each row of the matrix is, and then zeros up to this length."""
    found = [rows.index(row) for row in matrix]
    return tuple(found + [0] * (length - len(found)))


def _transposed(of: Matrices) -> Matrices:
    """Return the transposed matrices of the forms of dweight."""
    return {form: (transposed(a), transposed(b)) for form, (a, b) in of.items() if form not in _SPACED}


_SQUARE = {  # the same matrices along both axes
    F4X4_3X3: matrices(SIX_POINTS, 4, 3),
    F2X2_3X3: matrices(FOUR_POINTS, 2, 3),
    F4X4_5X5: matrices(EIGHT_POINTS, 4, 5),
    F5X5_2X2: matrices(SIX_POINTS, 5, 2),
    F3X3_4X4: matrices(SIX_POINTS, 3, 4),
    F2X2_7X7: matrices(EIGHT_POINTS, 2, 7),
    STRIDE2_3X3: strided(4, 3),
    STRIDE2_4X4: strided(4, 4),
}
_SPACED = {SPACED_3X3: spaced(4, 3, 1), SPACED_4X4: spaced(4, 4, 1)}
_LINE = {
    (F1X4_1X3, F4X1_3X1): matrices(SIX_POINTS, 4, 3),
    (F1X4_1X5, F4X1_5X1): matrices(EIGHT_POINTS, 4, 5),
    (F1X4_1X7, F4X1_7X1): matrices(TEN_POINTS, 4, 7),
}
_BOTH = {form: (each, each) for form, each in (_SQUARE | _SPACED).items()}  # vertical, horizontal
_BOTH |= {form: (one_tap(1), each) for (form, _), each in _LINE.items()}
_BOTH |= {form: (each, one_tap(1)) for (_, form), each in _LINE.items()}
_ALL = sorted(_BOTH)
_AT, _G, _BT = ({form: (_BOTH[form][0][i], _BOTH[form][1][i]) for form in _ALL} for i in range(3))
input_transform = make_transform(_BT)
normalizing_transform = make_normalizing_transform(_BT[F4X4_3X3])
_DISTINCT_G = {form: (distinct(a), distinct(b)) for form, (a, b) in _G.items()}
weight_transform = make_transform(_DISTINCT_G)
output_transform = make_output_transform(_AT)
spread_transform = make_transform(_transposed(_AT))  # for dweight: A dy AT
gather_transform = make_transform(_transposed(_G))  # GT dU G

# Sizes for each form along both axes; form 0 is DIRECT.
_NONE = (0, 0)
_TILES = (
    (_NONE, _NONE, _NONE),
    *((_lengths(_AT[form]), _widths(_G[form]), _lengths(_G[form])) for form in _ALL),  # m, r, n
)
_STEPS = dict.fromkeys((STRIDE2_3X3, STRIDE2_4X4), (8, 8)) | dict.fromkeys(_SPACED, (4, 4))
_WINDOWS = ((_NONE, _NONE), *((_widths(_BT[form]), _STEPS.get(form, _lengths(_AT[form]))) for form in _ALL))
_SIDES = (_NONE, *(_lengths(_DISTINCT_G[form]) for form in _ALL))  # planes of U
_MOST = max(len(g) for g, _ in _G.values())
_ROWS = ((0,) * _MOST, *(_rows_among(_DISTINCT_G[form][0], _G[form][0], _MOST) for form in _ALL))


@helper
def tile_of(form: int) -> tuple[Pair, Pair, Pair]:
    """Return m, r and n of a form along both axes: a tile has m outputs and n positions, a kernel has r taps."""
    return _TILES[form]


@helper
def kernel_of(form: int, taps: Pair, stride: Pair) -> Kernel:
    """Return a layer's taps, and the stride with which a tile reads its window. Some forms have a stride built in."""
    step = (1, 1) if form >= STRIDE2_3X3 else stride
    return taps[0], taps[1], step[0], step[1]


@helper
def kernel_of_dx(form: int, taps: Pair, stride: Pair) -> Kernel:
    """Return the kernel that computes a phase of dx from dy. With stride s, a pixel of dx belongs to every s-th tap."""
    step = kernel_of(form, taps, stride)[2:]
    return ceildiv(taps[0], step[0]), ceildiv(taps[1], step[1]), 1, 1


@helper
def _blocks_of(form: int, kernel: Kernel) -> Pair:
    """Return how many blocks of r taps each phase of a kernel has along both axes (pieces_of)."""
    r = _TILES[form][1]
    return ceildiv(ceildiv(kernel[0], kernel[2]), r[0]), ceildiv(ceildiv(kernel[1], kernel[3]), r[1])


@helper
def pieces_of(form: int, kernel: Kernel) -> Pair:
    """Return how many pieces a kernel has along both axes. Each piece is a kernel of r taps, and y is their sum.

    With stride s, an output reads every s-th pixel with every s-th tap, beginning with each of the first s taps. So the
    taps have s phases along an axis, and each phase has blocks of r taps. The last block may be incomplete.
    """
    r = _TILES[form][1]
    return pieces_along(kernel[0], kernel[2], r[0]), pieces_along(kernel[1], kernel[3], r[1])


@helper
def count_of_pieces(form: int, kernel: Kernel) -> int:
    """Return the number of pieces of a kernel."""
    pieces = pieces_of(form, kernel)
    return pieces[0] * pieces[1]


@helper
def first_tap(form: int, kernel: Kernel, piece: int) -> Pair:
    """Return the row and the column of the first tap of a piece."""
    r, blocks, across = _TILES[form][1], _blocks_of(form, kernel), pieces_of(form, kernel)[1]
    down, right = piece // across, piece % across
    return (
        down // blocks[0] + down % blocks[0] * r[0] * kernel[2],
        right // blocks[1] + right % blocks[1] * r[1] * kernel[3],
    )


@helper
def rows_and_columns(form: int, kernel: Kernel, piece: int) -> Pair:
    """Return how many rows and columns of taps a piece has: r, or fewer if the kernel ends. They are not negative."""
    r, first = _TILES[form][1], first_tap(form, kernel, piece)
    return (
        max(0, min(r[0], ceildiv(kernel[0] - first[0], kernel[2]))),
        max(0, min(r[1], ceildiv(kernel[1] - first[1], kernel[3]))),
    )


@helper
def padding_of_piece(form: int, kernel: Kernel, piece: int, padding: Pair, dilation: Pair) -> Pair:
    """Return the padding of x for a piece of a kernel: it may be negative."""
    first = first_tap(form, kernel, piece)
    return padding[0] - first[0] * dilation[0], padding[1] - first[1] * dilation[1]


@helper
def planes_of(form: int) -> int:
    """Return the number of positions of a tile: planes of V and M."""
    n = _TILES[form][2]
    return n[0] * n[1]


@helper
def window_of(form: int) -> tuple[Pair, Pair]:
    """Return how many inputs a tile reads along both axes, and how many inputs further the next tile begins."""
    return _WINDOWS[form]


@helper
def weight_side(form: int) -> int:
    """Return the number of planes of U along a row. In some forms, several positions have the same weights."""
    return _SIDES[form][1]


@helper
def weight_planes(form: int) -> int:
    """Return the number of planes of U."""
    side = _SIDES[form]
    return side[0] * side[1]


@helper
def weight_plane(form: int, k: int) -> int:
    """Return which plane of U the plane k of V is multiplied by."""
    if form < STRIDE2_3X3:  # each plane of V has its own; the tables below would slow down small layers
        return k
    n, rows = tile_of(form)[2][1], _ROWS[form]
    return rows[k // n] * weight_side(form) + rows[k % n]


@helper
def has_eight_points(form: int) -> bool:
    """Return whether a form's transforms enlarge rounding errors so much that sums are split into short pieces."""
    return form in (F4X4_5X5, F2X2_7X7)


def stride_of(form: int) -> Pair:
    """Return the stride of the layers that use a form of y and dweight."""
    return (2, 2) if form >= STRIDE2_3X3 else (1, 1)


@helper
def is_large(form: int, channels: int, outputs: int, groups: int) -> bool:
    """Return whether a layer has many weights. It does not depend on the number of tiles."""
    return groups == 1 and weight_planes(form) * channels * outputs >= LARGE_U


@helper
def uses_blocks(form: int, channels: int, outputs: int, groups: int, tiles: int) -> bool:
    """Return whether winograd_large.py computes y, dx or dweight: all tiles are few beside the size of U."""
    few = 0 < tiles <= weight_planes(form) * channels * outputs // U_PER_TILE
    whole = outputs >= LEAST_OUTPUTS and outputs % LANES == 0
    return few and whole and is_large(form, channels, outputs, groups)


@helper
def depth_of_sums(form: int, channels: int, outputs: int, groups: int) -> int:
    """Return over how many channels y and dx are summed in one go, in winograd_large.py and in winograd.py."""
    if has_eight_points(form):
        return KC_EIGHT
    return KC_LARGE if channels > MOST_IN_ONE_GO and is_large(form, channels, outputs, groups) else channels
