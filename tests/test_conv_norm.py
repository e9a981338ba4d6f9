"""Batch norms that are merged with convolutions: the bits stay those of the tape, and the kernels are really used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.device import Device
from minidl.engine.tensor import Tensor
from minidl.kernels.conv.reference import output_size
from minidl.ops.conv import with_winograd
from minidl.program.replay import Gradient

CPU = Device("cpu")


@pytest.fixture(autouse=True)
def winograd() -> Iterator[None]:
    """Allow Winograd's method, whatever other tests of this process have set."""
    with with_winograd(True):
        yield



def conv(channels: int, outputs: int, **options: int) -> nn.Conv2d:
    return nn.Conv2d(channels, outputs, 3, padding=1, bias=False, **options)


class Net(nn.Module):
    """A convolution and batch norm, then `middle`, then the mean of all pixels and a linear layer."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor]) -> None:
        nn.seed(3)
        self.first, self.norm1 = conv(3, 16), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = conv(16, 32), nn.BatchNorm2d(32)
        self.conv3, self.norm3 = conv(32, 32), nn.BatchNorm2d(32)
        self.other, self.each = conv(16, 32), conv(32, 32, groups=32)
        self.product = nn.Conv2d(32, 32, 1, bias=False)
        self.fc = nn.Linear(32, 4)
        self.middle = middle
        for norm in (self.norm1, self.norm2, self.norm3):
            norm.weight.data[...] = np.linspace(-1, 2, norm.weight.size)
            norm.bias.data[...] = np.linspace(1, -1, norm.bias.size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(ops.flatten(ops.global_avg_pool2d(self.middle(self, self.norm1(self.first(x))))))


def plain(net: Net, x: Tensor) -> Tensor:
    return ops.relu(net.norm3(net.conv3(ops.relu(net.norm2(net.conv2(ops.relu(x)))))))


def residual(net: Net, x: Tensor) -> Tensor:
    x = net.conv2(ops.relu(x))
    x = ops.relu(x + net.norm3(net.conv3(ops.relu(net.norm2(x)))))
    return ops.relu(net.norm3(net.conv3(x)) + x)


def before_activation(net: Net, x: Tensor) -> Tensor:
    x = net.conv2(ops.relu(x))
    x = x + net.conv3(ops.relu(net.norm2(x)))
    return ops.relu(net.norm3(x))


def read_by_two(net: Net, x: Tensor) -> Tensor:
    x = ops.relu(x)
    return net.norm3(net.conv2(x) + net.other(x))


def read_by_others(net: Net, x: Tensor) -> Tensor:
    y = ops.relu(net.norm2(net.conv2(ops.relu(x))))
    return net.norm3(net.conv3(y)) * y


def without_relu(net: Net, x: Tensor) -> Tensor:
    return ops.gelu(net.norm3(net.conv3(net.norm2(net.conv2(x)))))


def depthwise(net: Net, x: Tensor) -> Tensor:
    return net.norm3(net.product(ops.relu(net.norm2(net.each(net.conv2(ops.relu(x)))))))


EVERY = dict(forward=3, batch_norm=3, backward_input=2, batch_norm_backward=2, backward_weight=2)
# (middle, image size, images) -> how often each kernel of conv_norm is used
USES = {
    (plain, 32, 8): EVERY,
    (plain, 16, 32): EVERY,
    (residual, 16, 32): dict(forward=4, batch_norm=4, backward_input=3, batch_norm_backward=3, backward_weight=2),
    (before_activation, 32, 8): dict(forward=3, batch_norm=3),
    (read_by_two, 32, 8): dict(forward=3, batch_norm=2, backward_input=1, batch_norm_backward=1, backward_weight=2),
    (read_by_others, 32, 8): dict(forward=3, batch_norm=3),
    (without_relu, 32, 8): dict(forward=3, batch_norm=3),
    (plain, 28, 8): EVERY,  # 7 tiles in a row
    (plain, 30, 5): EVERY,  # tiles reach beyond the image
    (plain, 8, 3): EVERY,  # 192 rows: a block and a half
    # The depthwise convolution normalises what it reads, the product (1 x 1) does not.
    (depthwise, 29, 5): dict(forward=4, batch_norm=3, backward_input=2, batch_norm_backward=2, backward_weight=1),
}


@pytest.mark.parametrize(("middle", "size", "images"), USES)
def test_bits_are_those_of_the_tape(middle: Callable[[Net, Tensor], Tensor], size: int, images: int) -> None:
    found, calls = [], []
    for replay in (True, False):
        net = Net(middle)
        gradient = Gradient(net, ops.cross_entropy)
        for step in range(2):
            x = np.random.default_rng(step).standard_normal((images, size, size, 3)).astype(np.float32)
            y = np.arange(images) % 4
            loss = gradient(x, y) if replay else gradient.by_tape(x, y)
            found.append((loss, net.flatten().grad.tobytes(), net.statistics.theta.tobytes()))
        calls += [program.calls for program in gradient.programs.values()]
    assert found[:2] == found[2:]
    used = Counter(name.partition(".")[2] for name in calls[0] if name.startswith("conv_norm."))
    expected = USES[middle, size, images]
    assert {name: used[name] for name in expected} == expected


@pytest.mark.parametrize("images", [2, 16])
@pytest.mark.parametrize("features", [8, 16, 64, 1024, 2048])
def test_a_norm_of_other_channels_stays_separate(features: int, images: int) -> None:
    """A reshape lies between the norm and the convolutions beside it: as in the decoder of a GAN."""

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            nn.seed(4)
            self.before, self.norm, self.after = conv(16, 32), nn.BatchNorm1d(features), conv(32, 32)
            self.fc = nn.Linear(32, 4)
            self.norm.weight.data[...] = np.linspace(-1, 2, features)
            self.norm.bias.data[...] = np.linspace(1, -1, features)

        def forward(self, x: Tensor) -> Tensor:
            y = ops.relu(self.norm(ops.reshape(self.before(x), (-1, features))))
            return self.fc(ops.flatten(ops.global_avg_pool2d(self.after(ops.reshape(y, (images, 8, 8, 32))))))

    x, y = np.random.default_rng(0).standard_normal((images, 8, 8, 16)).astype(np.float32), np.arange(images) % 4
    found = []
    for replay in (True, False):
        net = Reshaped()
        gradient = Gradient(net, ops.cross_entropy)
        for _ in range(2):
            loss = gradient(x, y) if replay else gradient.by_tape(x, y)
            found.append((loss, net.flatten().grad.tobytes(), net.statistics.theta.tobytes()))
        assert np.isfinite(net.flatten().grad).all()
    assert found[:2] == found[2:]


def test_a_shared_layer_and_a_smaller_batch() -> None:
    """The same layers in two places, and a program for another number of images."""

    def twice(net: Net, x: Tensor) -> Tensor:
        x = net.conv2(ops.relu(x))
        for _ in range(2):
            x = net.conv3(ops.relu(net.norm2(x)))
        return x

    net = Net(twice)
    gradient = Gradient(net, ops.cross_entropy)
    for images in (8, 4, 8):
        x = np.random.default_rng(images).standard_normal((images, 32, 32, 3)).astype(np.float32)
        y = np.arange(images) % 4
        statistics = net.flatten() and net.statistics.theta.copy()
        gradient.by_tape(x, y)
        expected = net.flatten().grad.tobytes(), net.statistics.theta.tobytes()
        net.statistics.theta[:] = statistics
        gradient(x, y)
        assert (net.flatten().grad.tobytes(), net.statistics.theta.tobytes()) == expected


LAYERS = [  # shape of x, O, taps in a square, or the height and width; stride, padding, groups
    ((8, 32, 32, 16), 32, 3, 1, 1, 1),  # several groups of tiles, several partial sums of the weight gradient
    ((32, 16, 16, 32), 16, 3, 1, 1, 1),
    ((72, 8, 8, 64), 64, 3, 1, 1, 1),
    ((5, 31, 29, 24), 40, 3, 1, 1, 1),  # tasks begin and end within a block of rows
    ((7, 30, 31, 16), 16, 3, 2, 1, 1),
    ((3, 15, 13, 16), 24, 7, 1, 3, 1),
    ((5, 31, 29, 24), 24, 3, 1, 1, 24),
    ((3, 57, 41, 40), 40, 5, 2, 2, 40),  # several bands
    ((3, 57, 41, 40), 40, 3, 1, 0, 40),
    ((9, 13, 7, 32), 32, 3, 1, 1, 8),
    ((5, 31, 29, 3), 20, 5, 1, 2, 1),
    ((5, 31, 29, 32), 40, (1, 7), 1, 3, 1),
    ((5, 31, 29, 50), 64, (3, 1), 1, 1, 1),
    ((5, 31, 29, 24), 20, (3, 5), 1, 2, 1),
    ((5, 31, 29, 24), 20, 5, 2, 2, 1),
    ((5, 31, 29, 20), 12, 1, 1, 0, 1),
    ((5, 31, 29, 40), 72, 1, 1, 0, 1),  # products
    ((3, 40, 40, 300), 65, 1, 1, 0, 1),  # sums in two pieces
    ((1, 5, 5, 8), 8, 3, 1, 1, 8),  # fewer rows than a block
]


@pytest.mark.parametrize(("shape", "outputs", "kernel", "stride", "padding", "groups"), LAYERS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_kernels_have_the_bits_of_separate_kernels(
    shape: tuple[int, ...], outputs: int, kernel: int | tuple[int, int], stride: int, padding: int, groups: int,
    dtype: str,
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    channels, options = shape[3], (groups, (stride, stride), (padding, padding), (1, 1), True)
    taps = (kernel, kernel) if isinstance(kernel, int) else kernel
    weight = rng.standard_normal((*taps, channels // groups, outputs)).astype(dtype)
    size = output_size(shape, weight.shape, *options[1:4])
    x, y = (rng.standard_normal(s).astype(dtype) for s in (shape, (shape[0], *size, outputs)))
    mean, gamma, beta = rng.standard_normal((3, channels)).astype(dtype)
    rstd, none = abs(mean) + mean.dtype.type(0.5), x[:0].reshape(0)
    rows, normalizes = x.reshape(-1, channels), CPU.conv_norm.normalizes(shape, weight.shape, *options)
    z, norm = x, (none, none, none, none)
    if normalizes:
        z, norm = np.empty_like(x), (gamma, beta, mean, rstd)
        CPU.norm.affine(rows - mean, rstd * gamma, beta, True, z.reshape(rows.shape))

    def scratch(kernel: str, merged: bool) -> np.ndarray:
        size = getattr(CPU.conv_norm if merged else CPU.conv, f"{kernel}_scratch")(x.shape, weight.shape, *options)
        return np.full(size, np.nan, dtype)

    expected, found = np.empty_like(y), np.empty_like(y)
    blocks = CPU.norm.parts(y.size // outputs, outputs)
    sums, moments = np.full((blocks, 2, outputs), np.nan), np.empty((blocks, 2, outputs))
    assert CPU.conv_norm.adds_up("y", shape, weight.shape, *options)
    for end in ((none, none, none, none), (beta[:1].repeat(outputs), none, none, y.reshape(-1))):  # bias, shortcut
        CPU.conv.forward(z, weight, *end, False, *options, none, scratch("forward", False), expected)
        CPU.conv_norm.forward(x, *norm, weight, *end, False, *options, none, scratch("forward", True), found, sums)
        CPU.norm._moments(expected.reshape(-1, outputs), moments)
        assert found.tobytes() == expected.tobytes() and sums.tobytes() == moments.tobytes()

    if normalizes:
        dw, with_norm = np.empty_like(weight), np.empty_like(weight)
        CPU.conv.backward_weight(z, y, *options, scratch("backward_weight", False), dw)
        CPU.conv_norm.backward_weight(x, *norm, y, *options, scratch("backward_weight", True), with_norm)
        assert with_norm.tobytes() == dw.tobytes()

    if not CPU.conv_norm.adds_up("dx", shape, weight.shape, *options):
        assert stride > 1
        return
    blocks = CPU.norm.parts(len(rows), channels)
    for relu, after in ((True, none), (False, np.maximum(x.reshape(-1) - 1, 0))):
        dx, merged = np.empty_like(x), np.empty_like(x)
        sums, separate = np.full((blocks, 2, channels), np.nan), np.empty((blocks, 2, channels))
        shortcut = z.reshape(-1) if after.size else none
        CPU.conv.backward_input(y, weight, shortcut, *options, scratch("backward_input", False), dx)
        if after.size:
            CPU.activation.relu_backward(dx.reshape(-1), after, dx.reshape(-1))
        constants = CPU.norm.constants_of(mean, rstd * gamma, beta)
        CPU.norm._gradient_moments(dx.reshape(-1, channels), rows, constants, relu, separate)
        CPU.conv_norm.backward_input(y, weight, shortcut, rows, gamma, beta, mean, rstd, relu, after, *options,
                                     scratch("backward_input", True), merged, sums)  # fmt: skip
        assert merged.tobytes() == dx.tobytes() and sums.tobytes() == separate.tobytes()


@pytest.mark.parametrize(
    ("shape", "outputs", "padding", "dilation"),
    [
        ((3, 9, 14, 48), 17, (1, 1), (1, 1)),  # tiles reach beyond the image
        ((2, 9, 13, 16), 32, (0, 2), (1, 1)),
        ((1, 30, 31, 32), 33, (2, 3), (2, 3)),
        ((2, 8, 8, 128), 128, (1, 1), (1, 1)),  # the threads divide the outputs
        ((40, 8, 8, 128), 128, (1, 1), (1, 1)),  # one sum of the weight gradient
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_normalising_any_shape(
    shape: tuple[int, ...], outputs: int, padding: tuple[int, int], dilation: tuple[int, int], dtype: str
) -> None:
    """Tiles overlap and reach beyond the image, where z is 0. NaN stays NaN."""
    rng, channels = np.random.default_rng(1), shape[3]
    x, weight = rng.standard_normal(shape).astype(dtype), rng.standard_normal((3, 3, channels, outputs)).astype(dtype)
    x[0, 0, 0, 0] = np.nan
    mean, gamma, beta = rng.standard_normal((3, channels)).astype(dtype)
    gamma[:3] = 0
    rstd, none, z = abs(mean) + mean.dtype.type(0.5), x[:0].reshape(0), np.empty_like(x)
    CPU.norm.affine(x.reshape(-1, channels) - mean, rstd * gamma, beta, True, z.reshape(-1, channels))
    options = 1, (1, 1), padding, dilation, True
    assert CPU.conv_norm.normalizes(shape, weight.shape, *options)
    size = [side + 2 * p - 2 * d for side, p, d in zip(shape[1:3], padding, dilation, strict=True)]
    y = rng.standard_normal((shape[0], *size, outputs)).astype(dtype)

    sizes = (CPU.conv_norm.forward_scratch, CPU.conv_norm.backward_weight_scratch)
    forward, backward = (np.empty(scratch(shape, weight.shape, *options), dtype) for scratch in sizes)
    expected, found = np.empty_like(y), np.empty_like(y)
    CPU.conv.forward(z, weight, none, none, none, none, False, *options, none, forward, expected)
    CPU.conv_norm.forward(x, gamma, beta, mean, rstd, weight, none, none, none, none, False, *options, none, forward,
                          found, np.empty((0, 2, 0)))  # fmt: skip
    assert np.isnan(expected).any() and np.array_equal(found, expected, equal_nan=True)

    dw, with_norm = np.empty_like(weight), np.empty_like(weight)
    CPU.conv.backward_weight(z, y, *options, backward, dw)
    CPU.conv_norm.backward_weight(x, gamma, beta, mean, rstd, y, *options, backward, with_norm)
    assert np.isnan(dw).any() and np.array_equal(with_norm, dw, equal_nan=True)


def test_which_shapes_are_normalised() -> None:
    def answer(images: int, height: int, width: int, channels: int, outputs: int, **changed: object) -> bool:
        options = dict(groups=1, stride=(1, 1), padding=(1, 1), dilation=(1, 1), winograd=True) | changed
        return bool(CPU.conv_norm.normalizes((images, height, width, channels), (3, 3, channels, outputs), **options))

    assert answer(128, 32, 32, 16, 16)
    assert not answer(128, 32, 32, 16, 16, winograd=False)
    assert answer(1, 30, 31, 16, 17, dilation=(2, 2), padding=(2, 0))
    assert not answer(128, 32, 32, 12, 16)
    assert not answer(128, 32, 32, 16, 16, stride=(2, 2), padding=(0, 0))
    assert not answer(128, 2, 32, 16, 16)  # F(2x2,3x3)
