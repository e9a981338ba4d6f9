"""Kernels of any size and stride in Winograd's method: as pieces of few taps (`pieces_of` in forms.py)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases.convolving import between_nan, compute
from kernel_cases.convolving import expected as exact
from kernel_cases.forms import check_agreement, check_threads, inputs

from minidl.kernels.conv import winograd
from minidl.kernels.conv.choice import F1X4_1X3, F1X4_1X5, F3X3_4X4, F4X1_5X1, F4X1_7X1, F4X4_3X3
from minidl.kernels.conv.forms import Kernel
from minidl.kernels.conv.norms import no_norms
from minidl.kernels.conv.reference import output_size

PIECES = [  # form, taps and stride, and N, H, W, C, O, padding and, if they are not 1, dilation and groups
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
    (F4X4_3X3, (3, 5, 1, 1), (2, 9, 10, 12, 20, (1, 2), (1, 1), 4)),  # groups of 3 and 5 channels
    (F4X4_3X3, (5, 5, 2, 2), (3, 17, 19, 34, 18, (2, 1), (1, 1), 2)),
    (F4X4_3X3, (6, 3, 1, 1), (16, 16, 16, 32, 32, (1, 1), (1, 1), 2)),  # several partial sums of dweight
    (F1X4_1X5, (1, 9, 1, 1), (1, 10, 21, 80, 72, (0, 4), (1, 3), 2)),
    (F1X4_1X3, (1, 5, 1, 2), (3, 5, 33, 24, 40, (0, 2))),
    (F4X1_5X1, (9, 1, 2, 2), (3, 21, 5, 19, 24, (4, 0))),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("form", "kernel", "geometry"), PIECES, ids=str)
def test_a_kernel_in_pieces_agrees_with_float64(
    form: int, kernel: Kernel, geometry: Any, dtype: str
) -> None:
    check_agreement(form, *inputs(form, geometry, dtype, kernel))


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


small, pair = st.integers(1, 3), st.tuples(st.integers(0, 4), st.integers(0, 4))


@settings(max_examples=25, deadline=None)
@given(
    taps=st.tuples(st.integers(1, 9), st.integers(1, 9)), stride=st.tuples(small, small), padding=pair,
    size=st.tuples(st.integers(9, 22), st.integers(9, 22)), channels=st.integers(16, 40), outputs=st.integers(16, 40),
    images=small,
)  # fmt: skip
def test_any_kernel(
    taps: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], size: tuple[int, int], channels: int,
    outputs: int, images: int,
) -> None:  # fmt: skip
    """Nothing is read or written outside, whatever algorithm is chosen."""
    random, options = np.random.default_rng(0), (1, stride, padding, (1, 1), True)
    x = between_nan((images, *size, channels), np.float32, random)
    weight = between_nan((*taps, channels, outputs), np.float32, random)
    dy = between_nan((images, *output_size(x.shape, weight.shape, *options[1:4]), outputs), np.float32, random)
    for found, right in zip(compute(x, weight, dy, options), exact(x, weight, dy, options)):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * np.abs(right).max())
