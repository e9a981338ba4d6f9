"""Winograd's forms: the matrices of each form, functions that multiply by them, and sizes that follow from them.

choice.py numbers the forms, transforms.py computes matrices, and planes.py uses them.
"""

from __future__ import annotations

from minidl.engine.jit import helper
from minidl.kernels.matmul.blocks import LANES

from .choice import (
    F2X2_3X3,
    F2X2_7X7,
    F3X3_4X4,
    F4X4_3X3,
    F4X4_5X5,
    F5X5_2X2,
    SPACED_3X3,
    SPACED_4X4,
    STRIDE2_3X3,
    STRIDE2_4X4,
)
from .reference import Pair
from .sizes import KC_EIGHT, KC_LARGE, LARGE_U, LEAST_OUTPUTS, MOST_IN_ONE_GO, U_PER_TILE
from .transforms import (
    EIGHT_POINTS,
    FOUR_POINTS,
    SIX_POINTS,
    distinct,
    make_normalizing_transform,
    make_output_transform,
    make_transform,
    matrices,
    rows_among,
    spaced,
    strided,
    transposed,
)

_FORMS = {
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
_AT, _G, _BT = ({form: each[i] for form, each in (_FORMS | _SPACED).items()} for i in range(3))
input_transform = make_transform(_BT)
normalizing_transform = make_normalizing_transform(_BT[F4X4_3X3])
weight_transform = make_transform({form: distinct(g) for form, g in _G.items()})
output_transform = make_output_transform(_AT)
spread_transform = make_transform({form: transposed(_AT[form]) for form in _FORMS})  # for dweight: A dy AT
gather_transform = make_transform({form: transposed(_G[form]) for form in _FORMS})  # GT dU G

# Sizes for each form; form 0 is DIRECT.
_TILES = ((0, 0, 0), *((len(_AT[form]), len(_G[form][0]), len(_G[form])) for form in sorted(_AT)))  # m, r, n
_STEPS = {form: 2 * len(_AT[form]) for form in (STRIDE2_3X3, STRIDE2_4X4)} | dict.fromkeys(_SPACED, 4)
_WINDOWS = ((0, 0), *((len(_BT[form][0]), _STEPS.get(form, len(_AT[form]))) for form in sorted(_BT)))
_SIDES = (0, *(len(distinct(_G[form])) for form in sorted(_G)))  # planes of U along an axis
_MOST = max(len(g) for g in _G.values())
_ROWS = ((0,) * _MOST, *(rows_among(distinct(_G[form]), _G[form], _MOST) for form in sorted(_G)))


@helper
def tile_of(form: int) -> tuple[int, int, int]:
    """Return m, r and n of a form (choice.py): tiles of m x m outputs and n x n positions, kernels of r x r."""
    return _TILES[form]


@helper
def window_of(form: int) -> tuple[int, int]:
    """Return how many inputs a tile reads along an axis, and how many inputs further the next tile begins."""
    return _WINDOWS[form]


@helper
def weight_side(form: int) -> int:
    """Return the number of planes of U along an axis. In some forms, several positions have the same weights."""
    return _SIDES[form]


@helper
def weight_planes(form: int) -> int:
    """Return the number of planes of U."""
    return _SIDES[form] ** 2


@helper
def weight_plane(form: int, k: int) -> int:
    """Return which plane of U the plane k of V is multiplied by."""
    if form < STRIDE2_3X3:  # each plane of V has its own; the tables below would slow down small layers
        return k
    n, rows = tile_of(form)[2], _ROWS[form]
    return rows[k // n] * _SIDES[form] + rows[k % n]


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
