"""Winograd's convolution: the matrices, every form compared with PyTorch in float64, and the rule that selects one."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from ops_helper import torch

from minidl.kernels.conv import winograd, winograd_gradient
from minidl.kernels.conv.choice import DIRECT, F2X2_3X3, F4X4_3X3, F4X4_5X5, winograd_form
from minidl.kernels.conv.transforms import EIGHT_POINTS, FOUR_POINTS, SIX_POINTS, matrices

Arrays = dict[str, np.ndarray]
LIMITS = {F4X4_3X3: 3e-5, F2X2_3X3: 5e-6, F4X4_5X5: 1e-5}  # float32, relative to the largest element
FORMS = list(LIMITS)
Options = tuple[tuple[int, int], tuple[int, int]]  # padding, dilation
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
WIDE = [  # 5 x 5 layers whose errors would exceed LIMITS if all products were added up in a single sum
    (2, 7, 7, 512, 512, (2, 2)),
    (16, 8, 8, 256, 256, (2, 2)),
    (8, 14, 14, 128, 128, (2, 2)),
]


@pytest.mark.parametrize(("points", "m", "r"), [(SIX_POINTS, 4, 3), (EIGHT_POINTS, 4, 5), (FOUR_POINTS, 2, 3)])
def test_matrices_give_the_convolution_exactly(points: Any, m: int, r: int) -> None:
    at, g, bt = (np.array(matrix) for matrix in matrices(points, m, r))  # exact fractions
    for i in range(r):
        for j in range(m + r - 1):
            tap, d = np.eye(r, dtype=int)[i], np.eye(m + r - 1, dtype=int)[j]
            y = at @ ((g @ tap) * (bt @ d))
            assert [int(v) if v == int(v) else v for v in y] == [int(k + i == j) for k in range(m)]


def inputs(form: int, geometry: Any, dtype: str) -> tuple[Arrays, Options]:
    n, height, width, channels, outputs, padding, dilation, groups = geometry + ((1, 1), 1)[len(geometry) - 6 :]
    r = 5 if form == F4X4_5X5 else 3
    rng = np.random.default_rng(0)
    high, wide = height + 2 * padding[0], width + 2 * padding[1]
    out = high - dilation[0] * (r - 1), wide - dilation[1] * (r - 1)
    shapes = dict(x=(n, height, width, channels), weight=(r, r, channels // groups, outputs), dy=(n, *out, outputs),
                  bias=(outputs,), scale=(outputs,), shift=(outputs,), shortcut=(n, *out, outputs))  # fmt: skip
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}, (padding, dilation)


def computed(form: int, a: Arrays, options: Options, finish: bool) -> Arrays:
    shapes = a["x"].shape, a["weight"].shape
    y, dx, dweight = np.full_like(a["dy"], np.nan), np.full_like(a["x"], np.nan), np.full_like(a["weight"], np.nan)

    def scratch(size: Any) -> np.ndarray:
        return np.full(size(form, *shapes, *options), np.nan, y.dtype)

    names, none = ("bias", "scale", "shift", "shortcut"), a["bias"][:0]
    norms = winograd.no_norms(none)
    end = [a[name].reshape(-1) if finish else none for name in names]
    memory = scratch(winograd.forward_scratch)
    winograd.forward(form, a["x"], a["weight"], *end, finish, *options, none, memory, y, norms)
    memory = scratch(winograd.backward_input_scratch)
    winograd.backward_input(form, a["dy"], a["weight"], none, *options, memory, dx, norms)
    memory = scratch(winograd_gradient.backward_weight_scratch)
    winograd_gradient.backward_weight(form, a["x"], a["dy"], *options, norms.before, memory, dweight)
    return dict(y=y, dx=dx, dweight=dweight)


def expected(a: Arrays, options: Options, finish: bool) -> Arrays:
    x = torch.from_numpy(a["x"]).double().permute(0, 3, 1, 2).requires_grad_()
    weight = torch.from_numpy(a["weight"]).double().permute(3, 2, 0, 1).requires_grad_()
    groups = x.shape[1] // weight.shape[1]
    y = torch.nn.functional.conv2d(x, weight, padding=options[0], dilation=options[1], groups=groups)
    y.backward(torch.from_numpy(a["dy"]).double().permute(0, 3, 1, 2))
    out = y.detach().permute(0, 2, 3, 1).numpy()
    if finish:
        out = np.maximum((out + a["bias"]) * a["scale"] + a["shift"] + a["shortcut"], 0)
    return dict(y=out, dx=x.grad.permute(0, 2, 3, 1).numpy(), dweight=weight.grad.permute(2, 3, 1, 0).numpy())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("geometry", GEOMETRIES + GROUPED, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_float64(form: int, geometry: Any, dtype: str) -> None:
    pytest.importorskip("torch")
    a, options = inputs(form, geometry, dtype)
    for finish in (False, True):
        found, right = computed(form, a, options, finish), expected(a, options, finish)
        limit = LIMITS[form] if dtype == "float32" else 1e-12
        for name, array in found.items():
            difference = array - right[name]
            assert abs(difference).max() <= limit * abs(right[name]).max(), name
            assert np.linalg.norm(difference) <= limit / 2 * np.linalg.norm(right[name]), name


@pytest.mark.parametrize("geometry", WIDE, ids=str)
def test_sums_over_many_channels_or_tiles_are_as_accurate(geometry: Any) -> None:
    pytest.importorskip("torch")
    a, options = inputs(F4X4_5X5, geometry, "float32")
    found, right = computed(F4X4_5X5, a, options, False), expected(a, options, False)
    errors = {name: abs(array - right[name]).max() / abs(right[name]).max() for name, array in found.items()}
    assert max(errors.values()) <= LIMITS[F4X4_5X5], errors


def test_an_empty_batch_has_no_gradient() -> None:
    for form in FORMS:
        for channels in (16, 128):
            a, options = inputs(form, (0, 8, 8, channels, channels, (1, 1)), "float32")
            assert not computed(form, a, options, False)["dweight"].any(), (form, channels)


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="needs two cores")
@pytest.mark.parametrize("geometry", GEOMETRIES[-6:] + GROUPED[2::2], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_number_of_threads(form: int, geometry: Any) -> None:
    a, options = inputs(form, geometry, "float32")
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
    assert winograd_form((32, 32), three, 16, 16, one, one, 4) == F4X4_3X3
    assert winograd_form((32, 32), three, 8, 16, one, one, 1) == F4X4_3X3
    assert winograd_form((14, 14), five, 6, 16, one, one, 1) == F4X4_5X5
    for out, kernel, channels, stride, dilation, groups in (
        ((32, 32), three, 7, one, one, 1),
        ((14, 14), five, 5, one, one, 1),
        ((32, 32), three, 16, (2, 2), one, 1),
        ((32, 32), three, 16, one, (16, 32), 1),
        ((32, 32), three, 16, one, one, 16),
        ((32, 32), three, 64, one, one, 8),  # 8 -> 2 channels in a group
        ((32, 32), (3, 5), 16, one, one, 1),
        ((1, 1), three, 64, one, one, 1),
    ):
        assert winograd_form(out, kernel, channels, 16, stride, dilation, groups) == DIRECT
