"""Winograd's convolution: the matrices, every form compared with PyTorch in float64, and the rule that selects one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numba
import numpy as np
import pytest
from kernel_cases.forms import (
    FORMS,
    LIMITS,
    LINES,
    STRIDE2,
    check_agreement,
    check_threads,
    computed,
    expected,
    inputs,
)

from minidl.kernels.conv.choice import (
    DIRECT,
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
    gradient_form,
    input_form,
    winograd_form,
)
from minidl.kernels.conv.forms import planes_of, tile_of, weight_plane, weight_planes
from minidl.kernels.conv.sizes import NARROW
from minidl.kernels.conv.transforms import (
    EIGHT_POINTS,
    FOUR_POINTS,
    SIX_POINTS,
    TEN_POINTS,
    matrices,
    spaced,
    strided,
)

GEOMETRIES = [  # N, H, W, C, O, padding and, if it is not 1, dilation
    (1, 5, 7, 1, 1, (1, 0)),
    (2, 9, 6, 3, 5, (0, 0)),
    (3, 7, 7, 17, 33, (1, 1)),
    (1, 6, 6, 16, 48, (4, 5)),  # padding wider than a 3 x 3 kernel, and as wide as a 5 x 5 kernel
    (2, 14, 13, 40, 16, (2, 1)),
    (16, 16, 16, 32, 32, (1, 1)),  # several partial sums of dweight
    (1, 9, 9, 17, 20, (1, 5)),  # whole tiles outside the image
    (2, 13, 11, 17, 33, (2, 3), (2, 3)),
    (1, 10, 21, 5, 16, (4, 1), (1, 5)),
    (16, 16, 16, 32, 32, (2, 2), (2, 2)),
    (1, 7, 9, 128, 256, (1, 1)),  # few tiles: the threads divide the outputs, not the tiles
    (4, 24, 24, 96, 128, (1, 1)),  # one sum of dweight, several groups of tiles
]
GROUPED = [  # the same, with padding, dilation and groups
    (2, 9, 10, 12, 20, (1, 1), (1, 1), 4),  # 3 and 5 channels in a group
    (3, 7, 9, 34, 18, (2, 1), (1, 1), 2),  # 17 and 9: more than a vector, or more products than short.py's tile has
    (1, 10, 21, 40, 72, (2, 1), (2, 3), 4),
    (2, 14, 14, 96, 160, (1, 1), (1, 1), 2),  # several panels in a group
    (16, 16, 16, 32, 32, (1, 1), (1, 1), 8),  # several partial sums of dweight
    (1, 7, 9, 128, 256, (1, 1), (1, 1), 4),  # few tiles
    (4, 24, 24, 192, 256, (1, 1), (1, 1), 2),  # one sum of dweight, several groups of tiles
]
STRIDED = [  # N, H, W, C, O, padding, dilation, groups
    (1, 5, 7, 1, 1, (1, 1), (1, 1), 1),
    (2, 9, 6, 3, 5, (1, 3), (1, 1), 1),
    (3, 17, 16, 17, 33, (1, 1), (1, 1), 1),
    (1, 6, 7, 16, 48, (5, 3), (1, 1), 1),  # padding wider than the kernel
    (2, 14, 23, 40, 16, (1, 1), (1, 1), 1),
    (16, 32, 32, 32, 32, (1, 1), (1, 1), 1),  # several partial sums of dweight
    (1, 14, 18, 128, 256, (1, 1), (1, 1), 1),  # few tiles: the threads divide the outputs, not the tiles
    (8, 32, 32, 96, 128, (1, 1), (1, 1), 1),  # one sum of dweight, several groups of tiles
    (2, 18, 20, 12, 20, (1, 1), (1, 1), 4),
    (3, 15, 17, 34, 18, (3, 1), (1, 1), 2),
    (3, 18, 17, 16, 32, (0, 2), (1, 1), 1),  # even paddings
    (16, 16, 16, 128, 130, (1, 1), (1, 1), 1),  # one sum of dweight, outputs that do not fill vectors
]
WIDE = [  # 5 x 5 and 7 x 7 layers whose errors would exceed LIMITS if all products were added up in a single sum
    (2, 7, 7, 512, 512, (2, 2)),
    (16, 8, 8, 256, 256, (2, 2)),
    (8, 14, 14, 128, 128, (2, 2)),
]


def cases(forms: list[int], geometries: list[Any]) -> list[tuple[int, Any]]:
    """Return all pairs of a form and a geometry in which the kernel fits into the image."""
    pairs = []
    for form, geometry in product(forms, geometries):
        size, padding, dilation = geometry[1:3], geometry[5], (*geometry, (1, 1))[6]
        reach = [d * (r - 1) for d, r in zip(dilation, tile_of(form)[1], strict=True)]
        if all(n + 2 * p > more for n, p, more in zip(size, padding, reach, strict=True)):
            pairs.append((form, geometry))
    return pairs


@pytest.mark.parametrize(
    ("points", "m", "r"),
    [
        (SIX_POINTS, 4, 3),
        (EIGHT_POINTS, 4, 5),
        (FOUR_POINTS, 2, 3),
        (SIX_POINTS, 5, 2),
        (SIX_POINTS, 3, 4),
        (EIGHT_POINTS, 2, 7),
        (TEN_POINTS, 4, 7),
    ],
)
def test_matrices_give_the_convolution_exactly(points: Any, m: int, r: int) -> None:
    at, g, bt = (np.array(matrix) for matrix in matrices(points, m, r))  # exact fractions
    for i in range(r):
        for j in range(m + r - 1):
            tap, d = np.eye(r, dtype=int)[i], np.eye(m + r - 1, dtype=int)[j]
            y = at @ ((g @ tap) * (bt @ d))
            assert [int(v) if v == int(v) else v for v in y] == [int(k + i == j) for k in range(m)]


@pytest.mark.parametrize("r", [3, 4, 5])
def test_matrices_for_stride_2_give_the_convolution_exactly(r: int) -> None:
    m, one = 4, np.eye(20, dtype=int)
    for i in range(r):
        at, g, bt = (np.array(matrix) for matrix in strided(m, r))
        for j in range(bt.shape[1]):
            y = at @ ((g @ one[i, :r]) * (bt @ one[j, : bt.shape[1]]))
            assert y.tolist() == [int(2 * k + i == j) for k in range(m)]
        for padding in range(r):
            at, g, bt = (np.array(matrix) for matrix in spaced(m, r, padding))
            shift = r - 1 - padding
            first = -(shift // 2)  # of the inputs: 2 * input = pixel + tap - shift
            for j in range(bt.shape[1]):
                y = at @ ((g @ one[i, :r]) * (bt @ one[j, : bt.shape[1]]))
                assert y.tolist() == [int(p + i - shift == 2 * (first + j)) for p in range(2 * m)]


@pytest.mark.parametrize("form", [*FORMS, *LINES, *STRIDE2, SPACED_3X3, SPACED_4X4])
def test_planes_with_the_same_weights_share_a_plane_of_u(form: int) -> None:
    points = {4: FOUR_POINTS, 6: SIX_POINTS, 8: EIGHT_POINTS, 10: TEN_POINTS}
    both = []
    for m, r, n in zip(*tile_of(form), strict=True):
        if form in STRIDE2:
            both.append(strided(4, r)[1])
        elif form in (SPACED_3X3, SPACED_4X4):
            both.append(spaced(4, r, 1)[1])
        else:
            both.append(matrices(points[n], m, r)[1] if r > 1 else [[1]])
    (g, h), columns = both, tile_of(form)[2][1]
    found = [weight_plane(form, k) for k in range(planes_of(form))]
    assert set(found) == set(range(weight_planes(form)))
    for k, plane in enumerate(found):
        for other in range(planes_of(form)):
            same = g[k // columns] == g[other // columns] and h[k % columns] == h[other % columns]
            assert same == (plane == found[other])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("form", "geometry"), [*cases(FORMS + LINES, GEOMETRIES + GROUPED), *cases(STRIDE2, STRIDED)], ids=str
)
def test_agrees_with_float64(form: int, geometry: Any, dtype: str) -> None:
    check_agreement(form, *inputs(form, geometry, dtype))


@pytest.mark.parametrize("geometry", WIDE, ids=str)
def test_sums_over_many_channels_or_tiles_are_as_accurate(geometry: Any) -> None:
    pytest.importorskip("torch")
    for form in (F4X4_5X5, F2X2_7X7, F1X4_1X5, F1X4_1X7):
        a, options = inputs(form, geometry, "float32")
        found, right = computed(form, a, options, False), expected(form, a, options, False)
        errors = {name: abs(array - right[name]).max() / abs(right[name]).max() for name, array in found.items()}
        assert max(errors.values()) <= LIMITS[form], (form, errors)


def test_an_empty_batch_has_no_gradient() -> None:
    for form in [*FORMS, *LINES, *STRIDE2]:
        for channels in (16, 128):
            a, options = inputs(form, (0, 8, 8, channels, channels, (1, 1)), "float32")
            assert not computed(form, a, options, False)["dweight"].any(), (form, channels)


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("form", "geometry"),
    [*cases(FORMS + LINES[2::3], GEOMETRIES[-6:] + GROUPED[2::2]), *cases(STRIDE2, STRIDED[4:9])],
    ids=str,
)
def test_bits_do_not_depend_on_the_number_of_threads(form: int, geometry: Any) -> None:
    check_threads(form, *inputs(form, geometry, "float32"))


def test_nan_passes_through() -> None:
    a, options = inputs(F4X4_3X3, GEOMETRIES[2], "float32")
    a["x"][0, 3, 3, 0] = np.nan
    assert np.isnan(computed(F4X4_3X3, a, options, True)["y"]).any()


def test_the_rule_that_selects_a_form() -> None:
    one, three, five = (1, 1), (3, 3), (5, 5)
    assert winograd_form(64, (32, 32), three, 16, 16, one, one, 1) == F4X4_3X3
    assert winograd_form(64, (2, 2), three, 64, 64, one, one, 1) == F2X2_3X3
    assert winograd_form(64, (14, 14), five, 32, 64, one, one, 1) == F4X4_5X5
    assert winograd_form(64, (32, 32), three, 16, 16, one, (2, 2), 1) == F4X4_3X3
    assert winograd_form(64, (32, 32), three, 16, 16, one, (1, 16), 1) == F2X2_3X3
    assert winograd_form(64, (32, 32), three, 16, 20, one, one, 4) == F4X4_3X3
    assert winograd_form(64, (32, 32), three, 32, 32, one, one, 4) == F4X4_3X3
    narrow = winograd_form(64, (32, 32), three, 16, 16, one, one, 4)  # 4 channels in a group: depthwise.py
    assert narrow == (DIRECT if 4 in NARROW else F4X4_3X3)
    assert winograd_form(64, (32, 32), three, 8, 16, one, one, 1) == F4X4_3X3
    assert winograd_form(64, (14, 14), five, 6, 16, one, one, 1) == F4X4_5X5
    assert winograd_form(64, (15, 15), (7, 7), 16, 24, one, one, 1) == F2X2_7X7
    assert winograd_form(64, (15, 15), (7, 7), 16, 24, one, (2, 2), 1) == F2X2_7X7
    assert winograd_form(64, (15, 15), (1, 3), 50, 64, one, one, 1) == F1X4_1X3
    assert winograd_form(64, (1, 99), (1, 5), 64, 30, one, (1, 3), 1) == F1X4_1X5
    assert winograd_form(64, (15, 15), (1, 7), 24, 24, one, one, 1) == F1X4_1X7
    assert winograd_form(64, (15, 15), (3, 1), 50, 64, one, one, 1) == F4X1_3X1
    assert winograd_form(64, (99, 1), (5, 1), 64, 30, one, one, 1) == F4X1_5X1
    assert winograd_form(64, (15, 15), (7, 1), 24, 24, one, one, 1) == F4X1_7X1
    for length, form in ((4, F1X4_1X5), (6, F1X4_1X7), (8, F1X4_1X5), (9, F1X4_1X5), (11, F1X4_1X7), (15, F1X4_1X5)):
        assert winograd_form(64, (32, 32), (1, length), 64, 64, one, one, 1) == form
    for kernel in ((2, 3), (3, 5), (6, 6), (11, 11)):
        assert winograd_form(64, (32, 32), kernel, 16, 16, one, one, 1) == F4X4_3X3
    assert winograd_form(64, (15, 15), (8, 8), 16, 16, one, one, 1) == F3X3_4X4
    for kernel, stride, form in (
        (five, (2, 2), F4X4_3X3),
        ((7, 7), (2, 2), F3X3_4X4),
        ((5, 6), (1, 2), F4X4_3X3),
        ((1, 5), (2, 2), F1X4_1X3),
    ):
        assert winograd_form(64, (15, 16), kernel, 32, 32, stride, one, 1) == form
        size = 15 * stride[0], 16 * stride[1]
        dx = DIRECT if kernel[0] == 1 else form  # every second row of dx belongs to no tap
        assert input_form(9, size, kernel, 32, 32, stride, one, one, 1) == dx
    two = (2, 2)
    assert winograd_form(64, (32, 32), two, 16, 16, one, one, 1) == F5X5_2X2
    assert winograd_form(64, (32, 32), (4, 4), 16, 16, one, one, 1) == F3X3_4X4
    assert winograd_form(64, (16, 16), three, 16, 16, two, one, 1) == STRIDE2_3X3
    assert winograd_form(64, (16, 16), three, 24, 40, two, one, 1) == STRIDE2_3X3
    assert winograd_form(64, (16, 16), (4, 4), 8, 16, two, one, 1) == STRIDE2_4X4
    assert input_form(9, (32, 32), three, 16, 16, two, one, one, 1) == SPACED_3X3
    assert input_form(9, (31, 32), (4, 4), 16, 8, two, (3, 1), one, 1) == SPACED_4X4
    assert input_form(9, (32, 32), three, 16, 16, two, (0, 1), one, 1) == DIRECT  # even padding
    assert input_form(9, (32, 32), three, 16, 16, one, (0, 0), one, 1) == F4X4_3X3
    for images, form in ((5, DIRECT), (100, F4X4_3X3)):  # of 3 x 3 pixels: for few, U costs more than it saves
        assert input_form(images, (3, 3), three, 512, 512, one, one, one, 1) == form
        assert gradient_form(images, (3, 3), three, 512, 512, one, one, 1) == form
    for images, form in ((20, DIRECT), (100, F4X4_3X3)):  # U is stored
        assert gradient_form(images, (3, 3), three, 512, 520, one, one, 1) == form
        assert gradient_form(images, (3, 3), three, 1024, 1024, one, one, 2) == form
    assert gradient_form(1, (8, 8), three, 256, 256, one, one, 1) == F4X4_3X3
    assert gradient_form(15, (4, 4), three, 256, 512, two, one, 1) == DIRECT
    assert gradient_form(64, (4, 4), three, 256, 512, two, one, 1) == STRIDE2_3X3
    for kernel, channels, stride, groups in (
        ((1, 3), 49, one, 1),
        ((5, 1), 29, one, 1),
        ((1, 7), 21, one, 1),
        ((1, 1), 64, one, 1),
        ((2, 1), 128, one, 1),
        ((6, 6), 15, one, 1),
        ((7, 1), 64, (4, 4), 1),  # four phases with one or two taps
        ((5, 5), 64, (2, 2), 8),
        ((8, 8), 64, (4, 4), 1),  # 16 phases of 2 x 2 taps
        ((3, 5), 47, one, 2),
        ((7, 1), 42, one, 2),
    ):
        assert winograd_form(64, (16, 16), kernel, channels, 64, stride, one, groups) == DIRECT
    assert winograd_form(64, (16, 2), (1, 7), 64, 64, one, one, 1) == DIRECT  # tiles of four would be half empty
    large = (6, 6), 256, 256
    assert winograd_form(1, (8, 8), *large, one, one, 1) == DIRECT  # one image has too few tiles for the size of U
    assert winograd_form(64, (8, 8), *large, one, one, 1) == F4X4_3X3
    assert winograd_form(1, (16, 16), *large, one, one, 1) == F4X4_3X3
    few = (4, 4), three, 256, 128  # a large layer: the transform of its weights must pay
    assert winograd_form(2, *few, one, one, 1) == gradient_form(2, *few, one, one, 1) == DIRECT
    assert winograd_form(3, *few, one, one, 1) == gradient_form(3, *few, one, one, 1) == F4X4_3X3
    assert winograd_form(15, *few, (2, 2), one, 1) == DIRECT and winograd_form(16, *few, (2, 2), one, 1) == STRIDE2_3X3
    assert winograd_form(1, (4, 4), three, 64, 128, one, one, 1) == F4X4_3X3
    assert gradient_form(3, (8, 8), *large, one, one, 1) == DIRECT
    assert gradient_form(4, (8, 8), *large, one, one, 1) == F4X4_3X3
    for out, kernel, channels, stride, dilation, groups in (
        ((32, 32), three, 7, one, one, 1),
        ((14, 14), five, 5, one, one, 1),
        ((16, 16), three, 15, (2, 2), one, 1),
        ((16, 16), three, 23, (2, 2), one, 1),
        ((16, 16), three, 64, (2, 2), one, 2),
        ((16, 16), three, 16, (2, 2), (2, 2), 1),
        ((7, 7), three, 64, (2, 2), one, 1),  # four tiles of 4 x 4 outputs: too many multiplications
        ((16, 16), (2, 2), 64, (2, 2), one, 1),
        ((16, 16), (7, 7), 15, one, one, 1),
        ((16, 16), three, 16, (3, 3), one, 1),
        ((32, 32), three, 16, one, (16, 32), 1),
        ((32, 32), three, 16, one, one, 16),
        ((32, 32), three, 64, one, one, 8),  # 8 -> 2 channels in a group
        ((1, 1), three, 64, one, one, 1),
    ):
        assert winograd_form(64, out, kernel, channels, 16, stride, dilation, groups) == DIRECT
