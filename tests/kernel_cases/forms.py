"""The three passes of a form of Winograd's method, in minidl and in PyTorch's float64."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from ops_helper import torch

from minidl.kernels.conv import winograd, winograd_gradient
from minidl.kernels.conv.choice import (
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
    STRIDE2_3X3,
    STRIDE2_4X4,
    form_of_dx,
)
from minidl.kernels.conv.forms import Kernel, stride_of, tile_of
from minidl.kernels.conv.norms import no_norms

Arrays = dict[str, np.ndarray]
FORMS = [F4X4_3X3, F2X2_3X3, F4X4_5X5, F5X5_2X2, F3X3_4X4, F2X2_7X7]
LINES = [F1X4_1X3, F1X4_1X5, F1X4_1X7, F4X1_3X1, F4X1_5X1, F4X1_7X1]
STRIDE2 = [STRIDE2_3X3, STRIDE2_4X4]
LIMITS = dict.fromkeys([*FORMS, *LINES, *STRIDE2], 1e-5) | {
    F4X4_3X3: 3e-5, F2X2_3X3: 5e-6, F2X2_7X7: 2e-5, F1X4_1X7: 2e-5, F4X1_7X1: 2e-5,  # float32, of the largest element
}  # fmt: skip
Options = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding, dilation


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


def check_agreement(form: int, a: Arrays, options: Options) -> None:
    pytest.importorskip("torch")
    for finish in (False, True):
        found, right = computed(form, a, options, finish), expected(form, a, options, finish)
        limit = LIMITS[form] if a["x"].dtype == np.float32 else 1e-12
        for name, array in found.items():
            difference = array - right[name]
            assert abs(difference).max() <= limit * abs(right[name]).max(), name
            assert np.linalg.norm(difference) <= limit / 2 * np.linalg.norm(right[name]), name


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
