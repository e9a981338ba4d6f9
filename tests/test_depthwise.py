"""Groups of 1, 2, 4 and 8 channels: y, dx and dweight from images and weights that are read where they are."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases.convolving import between_nan, compute, expected

from minidl.engine.jit import set_threads, threads
from minidl.kernels.conv import rectangles
from minidl.kernels.conv.reference import output_length
from minidl.kernels.conv.sizes import NARROW

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_any_geometry(size: int, dtype: type) -> None:
    """Kernels, strides, dilations and paddings at random, among them pixels without taps; nothing is read or written
    outside."""
    random = np.random.default_rng(size)
    for _ in range(60):
        groups, batch = int(random.integers(2, 80 // size)), int(random.integers(1, 5))
        kernel, image = random.integers(1, 6, 2), random.integers(1, 20, 2)
        limits = (1, 4), (1, 3), (0, 4)
        stride, dilation, padding = (tuple(int(i) for i in random.integers(low, high, 2)) for low, high in limits)
        out = [output_length(*axis) for axis in zip(image, kernel, stride, padding, dilation)]
        if min(out) < 1:
            continue
        channels, options = groups * size, (groups, stride, padding, dilation, True)
        x, dy = (between_nan((batch, *shape, channels), dtype, random) for shape in (image, out))
        weight = between_nan((*kernel, size, channels), dtype, random)
        for found, exact in zip(compute(x, weight, dy, options), expected(x, weight, dy, options)):
            tolerance = (1e-5 if dtype is np.float32 else 1e-13) * max(1, np.abs(exact).max())
            np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance)
        assert rectangles.is_narrow(weight.shape, groups) == (size in NARROW)


@DTYPES
def test_the_end_of_a_layer(dtype: type) -> None:
    """Bias, scale, shift, shortcut and relu; channels that do not fill vectors."""
    for channels in (1, 3, 16, 17, 40, 64, 70):
        random = np.random.default_rng(channels)
        options = (channels * 2, (1, 2), (1, 1), (1, 1), True)
        x, dy = (random.standard_normal((2, 9, wide, channels * 2)).astype(dtype) for wide in (12, 6))
        weight = random.standard_normal((3, 3, 1, channels * 2)).astype(dtype)
        bias, scale, shift = (random.standard_normal(channels * 2).astype(dtype) for _ in range(3))
        of_y, of_dx = dy[::-1], x[::-1]
        y, dx, _ = compute(x, weight, dy, options, (bias, scale, shift, of_y.flatten(), of_dx.flatten()))
        exact_y, exact_dx, _ = expected(x, weight, dy, options)
        tolerance = 1e-4 if dtype is np.float32 else 1e-12
        ended = np.maximum((exact_y + bias) * scale + shift + of_y, 0)
        np.testing.assert_allclose(y, ended, rtol=0, atol=tolerance)
        np.testing.assert_allclose(dx, exact_dx + of_dx, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", [1, 4])
def test_bits_depend_neither_on_the_batch_nor_on_the_threads(size: int) -> None:
    """dweight sums over the images, so it depends on the batch."""
    random, before = np.random.default_rng(0), threads()
    x, dy = (random.standard_normal((40, 14, 15, 64), np.float32) for _ in range(2))
    weight = random.standard_normal((3, 3, size, 64), np.float32)
    options = (64 // size, (1, 1), (1, 1), (1, 1), True)
    many = compute(x, weight, dy, options)
    try:
        for count in {1, min(2, before), before}:
            set_threads(count)
            for found, exact in zip(compute(x, weight, dy, options), many):
                np.testing.assert_array_equal(found, exact)
            for found, exact in zip(compute(x[7:9], weight, dy[7:9], options)[:2], many):
                np.testing.assert_array_equal(found, exact[7:9])
    finally:
        set_threads(before)


@pytest.mark.parametrize("size", NARROW)
def test_nan_stays_in_its_group_and_window(size: int) -> None:
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((2, 9, 9, 32), np.float32), random.standard_normal((3, 3, size, 32), np.float32)
    x[1, 4, 4, 9] = np.nan
    y, _, _ = compute(x, weight, x, (32 // size, (1, 1), (1, 1), (1, 1), size != 8))  # 8: not by Winograd's method
    first, spoiled = 9 // size * size, np.zeros(y.shape, bool)
    spoiled[1, 3:6, 3:6, first : first + size] = True
    np.testing.assert_array_equal(np.isnan(y), spoiled)
