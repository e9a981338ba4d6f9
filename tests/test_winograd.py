"""Winograd's convolution: the matrices, every form compared with PyTorch in float64, and the rule that selects one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numba
import numpy as np
import pytest
from ops_helper import torch

from minidl.kernels.conv import winograd, winograd_gradient
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
    form_of_dx,
    gradient_form,
    input_form,
    winograd_form,
)
from minidl.kernels.conv.forms import Kernel, planes_of, stride_of, tile_of, weight_plane, weight_planes
from minidl.kernels.conv.norms import no_norms
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

Arrays = dict[str, np.ndarray]
FORMS = [F4X4_3X3, F2X2_3X3, F4X4_5X5, F5X5_2X2, F3X3_4X4, F2X2_7X7]
LINES = [F1X4_1X3, F1X4_1X5, F1X4_1X7, F4X1_3X1, F4X1_5X1, F4X1_7X1]
STRIDE2 = [STRIDE2_3X3, STRIDE2_4X4]
LIMITS = dict.fromkeys([*FORMS, *LINES, *STRIDE2], 1e-5) | {
    F4X4_3X3: 3e-5, F2X2_3X3: 5e-6, F2X2_7X7: 2e-5, F1X4_1X7: 2e-5, F4X1_7X1: 2e-5,  # float32, of the largest element
}  # fmt: skip
Options = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding, dilation
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
PIECES = [  # form, taps and stride, and N, H, W, C, O, padding and, if it is not 1, dilation
    (F4X4_3X3, (2, 3, 1, 1), (3, 7, 9, 17, 33, (1, 1))),
    (F4X4_3X3, (3, 5, 1, 1), (2, 14, 13, 40, 16, (1, 2))),
    (F4X4_3X3, (5, 3, 1, 1), (2, 9, 6, 3, 5, (2, 1))),
    (F4X4_3X3, (6, 6, 1, 1), (1, 5, 7, 16, 3, (3, 2))),
    (F4X4_3X3, (6, 6, 1, 1), (16, 16, 16, 16, 16, (2, 3))),  # several partial sums of dweight
    (F4X4_3X3, (9, 8, 1, 1), (2, 12, 11, 24, 24, (4, 4))),
    (F4X4_3X3, (4, 7, 1, 1), (2, 13, 17, 17, 33, (2, 3), (2, 3))),
    (F4X4_3X3, (6, 5, 1, 1), (1, 7, 9, 128, 256, (1, 1))),  # few tiles: the threads divide the outputs, not the tiles
    (F4X4_3X3, (3, 6, 1, 1), (4, 24, 24, 96, 128, (1, 1))),  # one sum of dweight, several groups of tiles
    (F1X4_1X5, (1, 9, 1, 1), (2, 5, 33, 24, 40, (0, 4))),
    (F1X4_1X5, (1, 4, 1, 1), (2, 5, 33, 40, 41, (0, 2))),
    (F4X1_5X1, (8, 1, 1, 1), (3, 21, 5, 19, 24, (3, 0))),
    (F4X1_7X1, (13, 1, 1, 1), (2, 17, 9, 16, 16, (6, 2), (2, 1))),
    (F4X4_3X3, (5, 5, 2, 2), (2, 14, 13, 40, 16, (2, 2))),
    (F4X4_3X3, (5, 5, 2, 2), (16, 32, 31, 16, 16, (2, 1))),  # several partial sums of dweight
    (F4X4_3X3, (7, 7, 2, 2), (1, 15, 16, 17, 33, (3, 3))),  # a phase with an incomplete block, and one without taps
    (F3X3_4X4, (7, 7, 2, 2), (2, 15, 16, 16, 24, (3, 4))),
    (F3X3_4X4, (8, 8, 4, 4), (2, 33, 30, 16, 9, (2, 2))),
    (F4X4_3X3, (3, 6, 1, 3), (2, 9, 19, 12, 20, (0, 2))),
    (F4X4_3X3, (2, 5, 3, 2), (2, 17, 19, 12, 20, (1, 2))),  # some rows are never read
    (F4X4_3X3, (6, 6, 2, 2), (2, 24, 24, 96, 128, (2, 2))),  # one sum of dweight, several groups of tiles
    (F1X4_1X3, (1, 5, 1, 2), (3, 5, 33, 24, 40, (0, 2))),
    (F4X1_5X1, (9, 1, 2, 2), (3, 21, 5, 19, 24, (4, 0))),
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


def inputs(form: int, geometry: Any, dtype: str, kernel: Kernel | None = None) -> tuple[Arrays, Options]:
    n, height, width, channels, outputs, padding, dilation, groups = geometry + ((1, 1), 1)[len(geometry) - 6 :]
    kh, kw, *stride = kernel or (*tile_of(form)[1], *stride_of(form))
    rng = np.random.default_rng(0)
    high, wide = height + 2 * padding[0], width + 2 * padding[1]
    out = (high - dilation[0] * (kh - 1) - 1) // stride[0] + 1, (wide - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    shapes = dict(x=(n, height, width, channels), weight=(kh, kw, channels // groups, outputs), dy=(n, *out, outputs),
                  bias=(outputs,), scale=(outputs,), shift=(outputs,), shortcut=(n, *out, outputs))  # fmt: skip
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return arrays, ((stride[0], stride[1]), padding, dilation)


def computed(form: int, a: Arrays, options: Options, finish: bool) -> Arrays:
    shapes = a["x"].shape, a["weight"].shape
    y, dx, dweight = np.full_like(a["dy"], np.nan), np.full_like(a["x"], np.nan), np.full_like(a["weight"], np.nan)

    def scratch(size: Any) -> np.ndarray:
        return np.full(size(form, *shapes, *options), np.nan, y.dtype)

    names, none = ("bias", "scale", "shift", "shortcut"), a["bias"][:0]
    norms = no_norms(none)
    end = [a[name].reshape(-1) if finish else none for name in names]
    memory = scratch(winograd.forward_scratch)
    winograd.forward(form, a["x"], a["weight"], *end, finish, *options, none, memory, y, norms)
    memory = scratch(winograd_gradient.backward_weight_scratch)
    winograd_gradient.backward_weight(form, a["x"], a["dy"], *options, norms.before, memory, dweight)
    of_dx, (stride, padding, dilation) = form_of_dx(form), options
    even = padding[0] % 2 == 0 or padding[1] % 2 == 0
    if of_dx != form and even:  # no form of dx
        return dict(y=y, dweight=dweight)
    memory = np.full(winograd.backward_input_scratch(of_dx, *shapes, stride, dilation), np.nan, y.dtype)
    shortcut = a["x"].reshape(-1) if finish else none
    winograd.backward_input(of_dx, a["dy"], a["weight"], shortcut, *options, memory, dx, norms)
    return dict(y=y, dx=dx, dweight=dweight)


def expected(form: int, a: Arrays, options: Options, finish: bool) -> Arrays:
    x = torch.from_numpy(a["x"]).double().permute(0, 3, 1, 2).requires_grad_()
    weight = torch.from_numpy(a["weight"]).double().permute(3, 2, 0, 1).requires_grad_()
    groups = x.shape[1] // weight.shape[1]
    y = torch.nn.functional.conv2d(x, weight, None, *options, groups)
    y.backward(torch.from_numpy(a["dy"]).double().permute(0, 3, 1, 2))
    out = y.detach().permute(0, 2, 3, 1).numpy()
    if finish:
        out = np.maximum((out + a["bias"]) * a["scale"] + a["shift"] + a["shortcut"], 0)
    dx = x.grad.permute(0, 2, 3, 1).numpy() + (a["x"] if finish else 0)
    return dict(y=out, dx=dx, dweight=weight.grad.permute(2, 3, 1, 0).numpy())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("form", "geometry"), [*cases(FORMS + LINES, GEOMETRIES + GROUPED), *cases(STRIDE2, STRIDED)], ids=str
)
def test_agrees_with_float64(form: int, geometry: Any, dtype: str) -> None:
    check_agreement(form, *inputs(form, geometry, dtype))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("form", "kernel", "geometry"), PIECES, ids=str)
def test_a_kernel_in_pieces_agrees_with_float64(
    form: int, kernel: Kernel, geometry: Any, dtype: str
) -> None:
    check_agreement(form, *inputs(form, geometry, dtype, kernel))


def check_agreement(form: int, a: Arrays, options: Options) -> None:
    pytest.importorskip("torch")
    for finish in (False, True):
        found, right = computed(form, a, options, finish), expected(form, a, options, finish)
        limit = LIMITS[form] if a["x"].dtype == np.float32 else 1e-12
        for name, array in found.items():
            difference = array - right[name]
            assert abs(difference).max() <= limit * abs(right[name]).max(), name
            assert np.linalg.norm(difference) <= limit / 2 * np.linalg.norm(right[name]), name


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


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="needs two cores")
@pytest.mark.parametrize(("form", "kernel", "geometry"), PIECES[4::2], ids=str)
def test_bits_of_pieces_do_not_depend_on_the_number_of_threads(
    form: int, kernel: Kernel, geometry: Any
) -> None:
    check_threads(form, *inputs(form, geometry, "float32", kernel))


@pytest.mark.parametrize(("form", "kernel", "geometry"), PIECES[1::3], ids=str)
def test_packed_weights_of_pieces_give_the_same_bits(form: int, kernel: Kernel, geometry: Any) -> None:
    a, options = inputs(form, geometry, "float32", kernel)
    shapes, none = (a["x"].shape, a["weight"].shape), a["bias"][:0]
    packed, found = np.zeros(winograd.packed_size(form, *shapes, *options), np.float32), []
    for some in (none, packed, packed):  # packed: filled by the first call, and read by the second
        scratch = np.full(winograd.forward_scratch(form, *shapes, *options), np.nan, np.float32)
        y = np.full_like(a["dy"], np.nan)
        winograd.forward(form, a["x"], a["weight"], *[none] * 4, False, *options, some, scratch, y, no_norms(none))
        found.append(y.tobytes())
    assert len(set(found)) == 1 and packed[-1] == 1


def check_threads(form: int, a: Arrays, options: Options) -> None:
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = computed(form, a, options, True)
        numba.set_num_threads(2)
        together = computed(form, a, options, True)
    finally:
        numba.set_num_threads(before)
    assert {k: v.tobytes() for k, v in alone.items()} == {k: v.tobytes() for k, v in together.items()}


def test_nan_passes_through() -> None:
    a, options = inputs(F4X4_3X3, GEOMETRIES[2], "float32")
    a["x"][0, 3, 3, 0] = np.nan
    assert np.isnan(computed(F4X4_3X3, a, options, True)["y"]).any()


def test_the_rule_that_selects_a_form() -> None:
    one, three, five = (1, 1), (3, 3), (5, 5)
    assert winograd_form((32, 32), three, 16, 16, one, one, 1) == F4X4_3X3
    assert winograd_form((2, 2), three, 64, 64, one, one, 1) == F2X2_3X3
    assert winograd_form((14, 14), five, 32, 64, one, one, 1) == F4X4_5X5
    assert winograd_form((32, 32), three, 16, 16, one, (2, 2), 1) == F4X4_3X3
    assert winograd_form((32, 32), three, 16, 16, one, (1, 16), 1) == F2X2_3X3
    assert winograd_form((32, 32), three, 16, 20, one, one, 4) == F4X4_3X3
    assert winograd_form((32, 32), three, 32, 32, one, one, 4) == F4X4_3X3
    narrow = winograd_form((32, 32), three, 16, 16, one, one, 4)  # 4 channels in a group: depthwise.py
    assert narrow == (DIRECT if 4 in NARROW else F4X4_3X3)
    assert winograd_form((32, 32), three, 8, 16, one, one, 1) == F4X4_3X3
    assert winograd_form((14, 14), five, 6, 16, one, one, 1) == F4X4_5X5
    assert winograd_form((15, 15), (7, 7), 16, 24, one, one, 1) == F2X2_7X7
    assert winograd_form((15, 15), (7, 7), 16, 24, one, (2, 2), 1) == F2X2_7X7
    assert winograd_form((15, 15), (1, 3), 50, 64, one, one, 1) == F1X4_1X3
    assert winograd_form((1, 99), (1, 5), 64, 30, one, (1, 3), 1) == F1X4_1X5
    assert winograd_form((15, 15), (1, 7), 24, 24, one, one, 1) == F1X4_1X7
    assert winograd_form((15, 15), (3, 1), 50, 64, one, one, 1) == F4X1_3X1
    assert winograd_form((99, 1), (5, 1), 64, 30, one, one, 1) == F4X1_5X1
    assert winograd_form((15, 15), (7, 1), 24, 24, one, one, 1) == F4X1_7X1
    for length, form in ((4, F1X4_1X5), (6, F1X4_1X7), (8, F1X4_1X5), (9, F1X4_1X5), (11, F1X4_1X7), (15, F1X4_1X5)):
        assert winograd_form((32, 32), (1, length), 64, 64, one, one, 1) == form
    for kernel in ((2, 3), (3, 5), (6, 6), (11, 11)):
        assert winograd_form((32, 32), kernel, 16, 16, one, one, 1) == F4X4_3X3
    assert winograd_form((15, 15), (8, 8), 16, 16, one, one, 1) == F3X3_4X4
    for kernel, stride, form in (
        (five, (2, 2), F4X4_3X3),
        ((7, 7), (2, 2), F3X3_4X4),
        (three, (1, 2), F4X4_3X3),
        ((8, 8), (4, 4), F4X4_3X3),
        ((1, 5), (2, 2), F1X4_1X3),
    ):
        assert winograd_form((15, 16), kernel, 32, 32, stride, one, 1) == form
        size = 15 * stride[0], 16 * stride[1]
        dx = DIRECT if kernel[0] == 1 else form  # every second row of dx belongs to no tap
        assert input_form(9, size, kernel, 32, 32, stride, one, one, 1) == dx
    two = (2, 2)
    assert winograd_form((32, 32), two, 16, 16, one, one, 1) == F5X5_2X2
    assert winograd_form((32, 32), (4, 4), 16, 16, one, one, 1) == F3X3_4X4
    assert winograd_form((16, 16), three, 16, 16, two, one, 1) == STRIDE2_3X3
    assert winograd_form((16, 16), three, 24, 40, two, one, 1) == STRIDE2_3X3
    assert winograd_form((16, 16), (4, 4), 8, 16, two, one, 1) == STRIDE2_4X4
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
        ((5, 5), 64, (2, 2), 2),
        ((3, 5), 64, one, 2),
        ((7, 1), 64, one, 2),
    ):
        assert winograd_form((16, 16), kernel, channels, 64, stride, one, groups) == DIRECT
    assert winograd_form((16, 2), (1, 7), 64, 64, one, one, 1) == DIRECT  # tiles of four outputs would be half empty
    large = (6, 6), 256, 256
    assert winograd_form((8, 8), *large, one, one, 1) == DIRECT  # one image has too few tiles for the size of U
    assert winograd_form((16, 16), *large, one, one, 1) == F4X4_3X3
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
        assert winograd_form(out, kernel, channels, 16, stride, dilation, groups) == DIRECT
