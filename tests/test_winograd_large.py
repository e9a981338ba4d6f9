"""Large layers with few tiles: Winograd's method without U or dU in memory."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from kernel_cases.convolving import between_nan, compute, expected
from quick import quick

from minidl.engine.jit import set_threads, threads
from minidl.kernels.conv import cpu
from minidl.kernels.conv.reference import output_size
from minidl.kernels.conv.sizes import LEAST_OUTPUTS
from minidl.kernels.matmul.blocks import LANES
from minidl.program.precompile import Kernel

LAYERS = [  # images, height, width, channels of x and y, kernel, stride, padding, dilation
    (3, 4, 4, 120, 320, 3, 1, 1, 1),
    (6, 3, 3, 320, 128, 3, 1, 1, 1),
    (2, 9, 7, 97, 336, 3, 1, 0, 1),  # channels of x that do not fill vectors
    (2, 9, 7, 160, 208, 3, 1, 2, 2),
    (1, 14, 15, 72, 272, 5, 1, 2, 1),
    (8, 11, 12, 96, 256, 5, 1, 2, 1),  # more tiles than dweight sums in one go
    (2, 11, 12, 200, 160, 2, 1, 0, 1),
    (2, 8, 7, 176, 176, 4, 1, 1, 1),
    (9, 14, 15, 272, 512, 3, 2, 1, 1),
    (9, 14, 16, 272, 512, 4, 2, 1, 1),
]
TOLERANCE = {np.float32: 2e-5, np.float64: 3e-14}  # relative to the largest number


def names(x: np.ndarray, weight: np.ndarray, dy: np.ndarray, options: tuple) -> list[str]:
    """Return the algorithms of y, dx and dweight."""
    none = x.reshape(-1)[:0]
    arguments = {
        "forward": (x, weight, none, none, none, none, False, *options, none, none, dy),
        "backward_input": (dy, weight, none, *options, none, x),
        "backward_weight": (x, dy, *options, none, weight),
    }
    return [Kernel.of("cpu", "conv", name, given).name.split("_")[0] for name, given in arguments.items()]


@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("layer", LAYERS)
def test_any_form(layer: tuple[int, ...], dtype: type) -> None:
    """Nothing is read or written outside, with bias, scale, shift, shortcut and relu, and without."""
    images, height, width, channels, outputs, k, s, p, d = layer
    random, options = np.random.default_rng(k), (1, (s, s), (p, p), (d, d), True)
    x = between_nan((images, height, width, channels), dtype, random)
    weight = between_nan((k, k, channels, outputs), dtype, random)
    dy = between_nan((images, *output_size(x.shape, weight.shape, *options[1:4]), outputs), dtype, random)
    found = names(x, weight, dy, options)
    assert found[0] == found[2] == "large"
    assert found[1] == ("large" if channels % LANES == 0 and channels >= LEAST_OUTPUTS else "winograd")
    exact = expected(x, weight, dy, options)
    for one, other in zip(compute(x, weight, dy, options), exact):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype] * np.abs(other).max())
    bias, scale, shift = (random.standard_normal(outputs).astype(dtype) for _ in range(3))
    of_y, of_dx = dy[::-1].flatten(), x[::-1].flatten()
    y, dx, _ = compute(x, weight, dy, options, (bias, scale, shift, of_y, of_dx))
    ended = np.maximum((exact[0] + bias) * scale + shift + of_y.reshape(dy.shape), 0)
    np.testing.assert_allclose(y, ended, rtol=0, atol=TOLERANCE[dtype] * np.abs(ended).max())
    np.testing.assert_allclose(dx, exact[1] + of_dx.reshape(x.shape), rtol=0, atol=TOLERANCE[dtype] * np.abs(dx).max())


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[1], LAYERS[5], LAYERS[8]])
def test_bits_are_those_of_winograd_py(layer: tuple[int, ...]) -> None:
    """So they do not depend on the number of threads, nor those of y on the number of images, if the form is the same:
    one image of the other layers has too few pixels."""
    images, height, width, channels, outputs, k, s, p, d = layer
    random, options, before = np.random.default_rng(k), (1, (s, s), (p, p), (d, d), True), threads()
    x, weight = (random.standard_normal(shape, np.float32)
                 for shape in ((images, height, width, channels), (k, k, channels, outputs)))  # fmt: skip
    out = output_size(x.shape, weight.shape, *options[1:4])
    dy = random.standard_normal((images, *out, outputs), np.float32)
    with patch.object(cpu, "uses_blocks", lambda *_: False):
        others = compute(x, weight, dy, options)
    try:
        for count in {1, before}:
            set_threads(count)
            for one, other in zip(compute(x, weight, dy, options), others):
                np.testing.assert_array_equal(one, other)
            if layer is LAYERS[5]:
                y, _, _ = compute(x[:1], weight, dy[:1], options)
                np.testing.assert_array_equal(y, others[0][:1])
    finally:
        set_threads(before)
