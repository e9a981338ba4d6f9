"""Convolution: strides, paddings and dilations, groups up to depthwise, batch sizes, blocks of pixels, accuracy."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from kernel_cases.convolving import between_nan, compute, expected
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.kernels.conv import cpu
from minidl.kernels.conv.reference import output_size


def check_conv(
    x: tuple[int, ...], weight: tuple[int, ...], bias: bool = True, loops: bool = True, **options: Any
) -> None:
    """Check ops.conv2d with `check_op`; x (N, H, W, C), weight (kh, kw, C / groups, O)."""
    inputs = [x, weight, weight[3:]] if bias else [x, weight]

    def theirs(x: Any, weight: Any, *bias: Any) -> Any:
        y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), *bias, **options)
        return y.permute(0, 2, 3, 1)

    check_op(lambda *tensors: ops.conv2d(*tensors, **options), theirs, *inputs, loops=loops)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(stride=2),
        dict(stride=(1, 3)),
        dict(padding=1),
        dict(padding=(0, 2)),
        dict(padding=4),  # larger than the kernel: some windows contain only padding
        dict(dilation=2),
        dict(dilation=(1, 3)),
        dict(stride=2, padding=(2, 1), dilation=(2, 1)),
        dict(stride=7),  # a single window: the other pixels are not used
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
def test_geometry(options: dict[str, Any], groups: int) -> None:
    check_conv((2, 5, 7, 4), (3, 2, 4 // groups, 6), groups=groups, **options)


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((5, 7), (1, 1), {}),
        ((5, 7), (1, 1), dict(stride=2, padding=1)),
        ((4, 5), (2, 3), {}),
        ((3, 3), (5, 5), dict(padding=2)),  # a kernel larger than the image
        ((3, 3), (3, 3), {}),  # one output pixel
        ((1, 1), (1, 1), {}),
        ((1, 9), (1, 4), dict(stride=2)),
        ((6, 1), (3, 1), dict(padding=(1, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 3])
def test_kernels_and_images(
    image: tuple[int, int], kernel: tuple[int, int], options: dict[str, Any], groups: int
) -> None:
    check_conv((2, *image, 3), (*kernel, 3 // groups, 3), groups=groups, **options)


@pytest.mark.parametrize(
    ("channels", "outputs", "groups"), [(3, 3, 3), (3, 6, 3), (5, 10, 5), (6, 3, 3), (4, 8, 2), (1, 1, 1)]
)
def test_groups(channels: int, outputs: int, groups: int) -> None:
    check_conv((2, 4, 5, channels), (3, 3, channels // groups, outputs), groups=groups, padding=1)


@pytest.mark.parametrize("groups", [4, 8, 16, 32])
def test_as_many_groups_as_a_vector_has_lanes(groups: int) -> None:
    for channels, outputs in ((1, 1), (1, 2), (2, 1), (3, 1)):  # of a group
        check_conv((2, 3, 3, channels * groups), (3, 3, channels, outputs * groups), groups=groups, padding=1,
                   loops=False)  # fmt: skip


@pytest.mark.parametrize("batch", [0, 1, 2, 15, 16, 17, 33])
def test_batch_sizes(batch: int) -> None:
    check_conv((batch, 3, 4, 2), (3, 3, 2, 3), padding=1, bias=batch != 17)


def test_blocks_of_several_images() -> None:
    """With 48 images of 9 pixels, one block of pixels contains several images. With 300 images of one pixel there are
    several such blocks."""
    for batch, size in ((48, 3), (300, 1)):
        check_conv((batch, size, size, 2), (3, 3, 2, 3), padding=1, loops=False)


@pytest.mark.parametrize(
    ("image", "kernel", "channels", "outputs", "options"),
    [
        ((4, 7), (1, 3), 37, 35, dict(padding=(0, 1))),  # whole vectors of channels and a rest, taps in threes
        ((4, 7), (2, 5), 18, 50, dict(padding=(1, 2))),  # threes and twos
        ((5, 6), (3, 3), 40, 36, dict(padding=1, groups=2, stride=(1, 2))),
        ((5, 5), (3, 3), 17, 33, dict(padding=1, stride=3)),
        ((4, 4), (2, 2), 19, 20, dict(stride=2)),  # blocks of several images, in place
        ((2, 2), (1, 1), 34, 40, dict(stride=2)),
        ((3, 2), (1, 1), 33, 37, {}),  # a product of matrices
        ((1, 1), (3, 3), 20, 24, dict(padding=1)),  # one tap reads the image
        ((1, 2), (5, 3), 20, 9, dict(padding=(2, 1), stride=(1, 2))),
        ((3, 3), (3, 3), 16, 18, dict(padding=4, dilation=4)),
        ((1, 1), (2, 2), 16, 16, dict(padding=4, stride=7)),  # no tap reads the image
    ],
    ids=str,
)
def test_many_channels(
    image: tuple[int, int], kernel: tuple[int, int], channels: int, outputs: int, options: dict[str, Any]
) -> None:
    weight = *kernel, channels // options.get("groups", 1), outputs
    for batch in (1, 9):
        check_conv((batch, *image, channels), weight, loops=False, **options)


def test_an_image_with_more_pixels_than_a_block() -> None:
    check_conv((3, 23, 25, 3), (5, 5, 3, 4), padding=2, loops=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("images", "size", "channels", "outputs", "kernel", "stride", "groups"),
    [
        (1, (3, 5), 90, 140, 3, 1, 1),
        (2, (4, 3), 120, 70, 3, 2, 1),  # dx in four passes
        (1, (1, 1), 210, 520, 3, 1, 1),
        (2, (4, 5), 96, 192, 3, 1, 3),
        (1, (9, 8), 256, 5, 5, 1, 1),  # bundles of neighbouring pixels
        (1, (9, 8), 256, 10, 7, 1, 2),
    ],
)
def test_threads_divide_the_panels_of_large_weights(
    images: int, size: tuple[int, int], channels: int, outputs: int, kernel: int, stride: int, groups: int, dtype: type
) -> None:
    """The bits do not depend on the number of tasks, some of which may have nothing to do."""
    random, pad = np.random.default_rng(0), kernel // 2
    options = groups, (stride, stride), (pad, pad), (1, 1), False
    x = between_nan((images, *size, channels), dtype, random)
    weight = between_nan((kernel, kernel, channels // groups, outputs), dtype, random)
    dy = between_nan((images, *output_size(x.shape, weight.shape, *options[1:4]), outputs), dtype, random)
    exact, found = expected(x, weight, dy, options), set()
    for tasks in (1, 2, 3, 8):
        with patch.object(cpu, "threads", lambda tasks=tasks: tasks):
            y, dx, _ = compute(x, weight, dy, options)
        found.add((y.tobytes(), dx.tobytes()))
    assert len(found) == 1
    for one, other in zip((y, dx), exact):
        np.testing.assert_allclose(one, other, rtol=0, atol=(1e-5 if dtype is np.float32 else 1e-13) * abs(other).max())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_one_of_the_gradients(wanted: int, groups: int) -> None:
    """A gradient may be needed without the others: in the first layer, for example, the images need none."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape) for shape in ((3, 5, 4, 2), (3, 3, 2 // groups, 4), (4,))]
    every = [Tensor(array, requires_grad=True) for array in arrays]
    one = [Tensor(array, requires_grad=i == wanted) for i, array in enumerate(arrays)]
    dy = random.standard_normal((3, 3, 2, 4))
    for tensors in (every, one):
        ops.conv2d(*tensors, groups=groups).backward(dy)
    np.testing.assert_array_equal(one[wanted].grad, every[wanted].grad)
    assert [tensor.grad is None for tensor in one] == [i != wanted for i in range(3)]


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((2, 5, 5, 3), (3, 3, 4, 6), {}, r"images \(2, 5, 5, 3\) for a weight \(3, 3, 4, 6\) in 1 group"),
        ((5, 5, 3), (3, 3, 3, 6), {}, r"images \(5, 5, 3\)"),
        ((2, 5, 5, 4), (3, 3, 4, 6), dict(groups=2), r"in 2 group"),
        ((2, 5, 5, 4), (3, 3, 2, 5), dict(groups=2), r"5 output channels do not divide into 2 groups"),
        ((2, 5, 5, 4), (3, 3, 4, 5), dict(groups=0), r"in 0 group"),
        ((2, 5, 5, 3), (3, 3, 3, 6), dict(stride=0), r"stride \(0, 0\)"),
        ((2, 5, 5, 3), (3, 3, 3, 6), dict(padding=-1), r"padding \(-1, -1\)"),
        ((2, 5, 5, 3), (3, 3, 3, 6), dict(dilation=0), r"dilation \(0, 0\)"),
        ((2, 5, 5, 3), (3, 6, 3, 6), {}, r"kernel of \(3, 6\) .* does not fit into images \(2, 5, 5, 3\)"),
        ((2, 5, 5, 3), (3, 3, 3, 6), dict(dilation=3), r"dilation \(3, 3\) does not fit"),
    ],
)
def test_wrong_arguments(x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=f"conv2d: .*{message}"):
        ops.conv2d(Tensor(np.zeros(x)), Tensor(np.zeros(weight)), **options)


def test_a_bias_of_the_wrong_length() -> None:
    with pytest.raises(ShapeError, match=r"conv2d: bias \(5,\) for a weight \(3, 3, 3, 6\)"):
        ops.conv2d(*(Tensor(np.zeros(shape)) for shape in ((2, 5, 5, 3), (3, 3, 3, 6), (5,))))


@pytest.mark.parametrize(
    ("image", "kernel", "outputs", "groups", "stride", "padding", "dilation"),
    [
        ((9, 8, 8, 256), 3, 40, 1, 1, 1, 1),  # each output is a sum of 2304 products
        ((20, 16, 16, 16), 3, 33, 1, 1, 1, 1),  # 5120 pixels
        ((3, 17, 16, 64), 3, 64, 64, 1, 1, 1),
        ((3, 17, 16, 24), 3, 48, 12, 2, 1, 1),
        ((5, 15, 16, 7), 5, 48, 1, 2, 3, 2),
        ((4, 16, 16, 96), 1, 70, 2, 3, 0, 1),
        ((64, 6, 6, 3), 3, 5, 1, 1, 2, 1),
        ((9, 15, 31, 24), 5, 40, 4, 1, 2, 1),
        ((9, 17, 19, 40), 5, 72, 8, 2, 1, 1),
    ],
)
def test_direct_convolution_is_accurate(
    image: tuple[int, ...], kernel: int, outputs: int, groups: int, stride: int, padding: int, dilation: int
) -> None:
    """Compare results in float32 with results in float64.

    Both use the same kernels. The tests above compare these kernels with the plain loops at smaller sizes.
    """
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape) for shape in (image, (kernel, kernel, image[3] // groups, outputs))]
    options = dict(groups=groups, stride=stride, padding=padding, dilation=dilation)
    found: dict[str, list[np.ndarray]] = {}
    ops.conv.winograd(False)
    try:
        for dtype in ("float32", "float64"):
            x, weight = (Tensor(array.astype(np.float32).astype(dtype), requires_grad=True) for array in arrays)
            y = ops.conv2d(x, weight, **options)
            y.backward(np.random.default_rng(1).standard_normal(y.shape).astype(np.float32).astype(dtype))
            found[dtype] = [y.numpy(), x.grad, weight.grad]
    finally:
        ops.conv.winograd(True)
    for ours, exact in zip(found["float32"], found["float64"]):
        error = ours - exact
        assert np.max(abs(error)) < 2e-6 * np.max(abs(exact))
        assert np.linalg.norm(error) < 5e-7 * np.linalg.norm(exact)
