"""A Prediction keeps packed weights of convolutions and products, and never uses them after a change."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from quick import quick

import minidl
from minidl import models, nn, ops, optim
from minidl.engine.device import Device
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient, Prediction

CONV, MATMUL = Device("cpu").conv, Device("cpu").matmul
LAYERS = {  # image, kernel, outputs, groups, stride, padding, winograd
    "F(4x4,3x3)": ((2, 9, 7, 16), (3, 3), 33, 1, (1, 1), (1, 1), True),
    "F(2x2,3x3)": ((3, 4, 4, 20), (3, 3), 16, 1, (1, 1), (0, 0), True),
    "F(4x4,5x5)": ((1, 9, 9, 17), (5, 5), 18, 1, (1, 1), (2, 2), True),
    "3x3, stride 2": ((2, 17, 16, 16), (3, 3), 33, 1, (2, 2), (1, 1), True),
    "4x4, stride 2": ((2, 16, 16, 16), (4, 4), 33, 1, (2, 2), (1, 1), True),
    "F(3x3,4x4)": ((2, 9, 10, 16), (4, 4), 33, 1, (1, 1), (1, 1), True),
    "direct": ((2, 9, 7, 16), (3, 3), 33, 1, (2, 2), (1, 1), True),
    "1x1": ((2, 5, 5, 40), (1, 1), 70, 1, (1, 1), (0, 0), False),
    "few outputs": ((2, 12, 12, 3), (3, 3), 4, 1, (1, 1), (1, 1), False),
    "groups": ((2, 6, 6, 8), (3, 3), 12, 2, (1, 1), (1, 1), False),
    "depthwise": ((2, 7, 7, 37), (3, 3), 37, 37, (1, 1), (1, 1), False),
}


@pytest.mark.parametrize("dtype", quick(["float32", "float64"], "float32"))
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernel_reads_packed_weights_and_gives_the_same_bits(name: str, dtype: str) -> None:
    """The first call packs, the second one reads: it ignores `weight`. bias and scale are read in each call."""
    image, kernel, outputs, groups, stride, padding, winograd = LAYERS[name]
    random = np.random.default_rng(0)
    x, weight = (
        random.standard_normal(shape).astype(dtype) for shape in (image, (*kernel, image[3] // groups, outputs))
    )
    options = groups, stride, padding, (1, 1), winograd
    none, scratch = np.empty(0, dtype), np.empty(CONV.forward_scratch(x.shape, weight.shape, *options), dtype)
    packed = np.zeros(CONV.packed_size(x.shape, weight.shape, *options), dtype)
    sides = [(image[1 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]

    def forward(x: np.ndarray, weight: np.ndarray, packed: np.ndarray, bias: np.ndarray) -> np.ndarray:
        y = np.full((len(x), *sides, outputs), np.nan, dtype)
        scratch[:] = np.nan
        CONV.forward(x, weight, bias, none, none, none, bool(bias.size), *options, packed, scratch, y)
        return y

    assert forward(x, weight, packed, none).tobytes() == forward(x, weight, none, none).tobytes()
    if name == "depthwise":  # the kernel reads the weights where they are
        assert packed.size == 0
        return
    assert packed[-1] == 1
    other, bias, nothing = -2 * x, random.standard_normal(outputs).astype(dtype), np.full_like(weight, np.nan)
    expected = forward(other, weight, none, bias)
    assert forward(other, nothing, packed, bias).tobytes() == expected.tobytes()
    assert np.isfinite(expected).all()
    packed[-1] = 0
    forward(x, 2 * weight, packed, none)
    assert forward(x, nothing, packed, none).tobytes() == forward(x, 2 * weight, none, none).tobytes()


@pytest.mark.parametrize("dtype", quick(["float32", "float64"], "float32"))
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 13, 40])
def test_a_product_reads_packed_weights_and_gives_the_same_bits(rows: int, dtype: str) -> None:
    """The sums have several pieces, and the last panel is not full. The second call ignores b."""
    random = np.random.default_rng(0)
    depth, columns = 300, 150
    a, b = (random.standard_normal(shape).astype(dtype) for shape in ((rows, depth), (depth, columns)))
    bias, none = random.standard_normal(columns).astype(dtype), np.empty(0, dtype)
    scratch = np.empty(MATMUL.nn_scratch(rows, columns, depth), dtype)
    packed = np.zeros(MATMUL.packed_size(rows, columns, depth), dtype)

    def product(a: np.ndarray, b: np.ndarray, packed: np.ndarray) -> bytes:
        out = np.full((rows, columns), np.nan, dtype)
        scratch[:] = np.nan
        MATMUL.nn(a, b, bias, True, packed, scratch, out)
        return out.tobytes()

    expected = product(a, b, none)
    assert product(a, b, packed) == expected and packed[-1] == 1
    nothing = np.full_like(b, np.nan)
    assert product(a, nothing, packed) == expected
    assert product(-a, nothing, packed) == product(-a, b, none) != expected
    packed[-1] = 0
    assert product(a, 2 * b, packed) == product(a, 2 * b, none) != expected


def network() -> nn.Sequential:
    """A network with the direct kernel, Winograd's forms, batch norm, a shortcut and, not packed, a depthwise layer."""
    nn.seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), models.Block(16, 32, 2), models.Block(32, 32, 1),
        nn.Conv2d(32, 16, 5, padding=2), nn.Conv2d(16, 16, 3, groups=16), nn.GlobalAvgPool2d(), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def images(count: int = 2) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 16, 16, 3), np.float32)


def in_float64(net: nn.Module, x: np.ndarray) -> np.ndarray:
    """Return the outputs of the tape in float64, without Winograd's forms."""
    exact = copy.deepcopy(net).eval()
    for tensor in (*exact.parameters(), *(buffer for _, buffer in exact.named_buffers())):
        values = tensor.numpy().astype(np.float64)
        tensor.move_into(None, values, np.zeros_like(values))
    with ops.conv.with_winograd(False), minidl.no_grad():
        return exact(Tensor(x.astype(np.float64))).numpy()


def check(net: nn.Module, prediction: Any, x: np.ndarray) -> None:
    """The prediction has the bits of the tape, and agrees with float64."""
    with minidl.no_grad():
        assert prediction(x).tobytes() == net(x).numpy().tobytes()
    exact = in_float64(net, x)
    np.testing.assert_allclose(prediction(x), exact, rtol=0, atol=1e-4 * abs(exact).max())


def by_optimizer(net: nn.Module) -> None:
    net.train()
    Gradient(net, ops.cross_entropy)(images(), np.array([1, 2]))
    optim.SGD(net, lr=0.5).step()
    net.eval()


def by_direct_write(net: nn.Module) -> None:
    assert net.arena is not None
    net.arena.theta[:] *= 1.5
    net.arena.touch()


CHANGES = {
    "copy_": lambda net: net[0].weight.copy_(2 * net[0].weight.numpy()),
    "state dict": lambda net: net.load_state_dict({k: 1.25 * v for k, v in net.state_dict().items()}),
    "optimizer": by_optimizer,
    "theta": by_direct_write,
    "flattened again": lambda net: setattr(net[4], "weight", nn.Conv2d(32, 16, 5).weight),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_packed_again(name: str) -> None:
    net, x = network(), images()
    net.flatten()
    prediction = Prediction(net.eval())
    check(net, prediction, x)
    before = prediction(x)
    CHANGES[name](net)
    assert not np.allclose(prediction(x), before, rtol=1e-3)
    check(net, prediction, x)


def test_weights_that_do_not_change_are_packed_once() -> None:
    """A write that no version tells is not seen, in any program: all of them share the packed weights."""
    net = network()
    arena, prediction = net.flatten(), Prediction(net.eval())
    before = prediction(images())
    prediction(images(1))
    assert prediction.packed is not None and len(prediction.packed.vectors) == 7
    kernel = net[0].weight.numpy()
    kernel[:] *= 2
    assert prediction(images()).tobytes() == before.tobytes()
    assert prediction(images(3))[:2].tobytes() == before.tobytes()
    arena.touch()
    check(net, prediction, images())


def test_other_vectors_are_packed_in_each_run() -> None:
    """Vectors of replicas have no version."""
    net, x = network(), images()
    arena, prediction = net.flatten(), Prediction(net.eval())
    own = prediction(x)
    theta = arena.theta.copy()
    prediction.bind(theta=theta)
    for factor in (2, 3):
        theta[:] = arena.theta * np.float32(factor)
        expected = copy.deepcopy(net)
        expected.flatten().theta[:] = theta
        with minidl.no_grad():
            assert prediction(x).tobytes() == expected(x).numpy().tobytes()
    prediction.bind()
    assert prediction(x).tobytes() == own.tobytes()


def test_parameters_outside_an_arena_may_change_without_a_version() -> None:
    net, x = network(), images()
    prediction = Prediction(net.eval())
    check(net, prediction, x)
    net[0].weight.data[...] *= 2
    check(net, prediction, x)


def test_a_loaded_model_keeps_packed_weights(tmp_path: Any) -> None:
    net = models.build("vgg", (8, 8, 3), 4)
    minidl.save(net, tmp_path / "vgg.safetensors")
    loaded, _ = minidl.load(tmp_path / "vgg.safetensors")
    assert loaded.arena is not None and loaded.arena.holds(dict(loaded.named_parameters()))


def test_copies_and_training_keep_no_vectors() -> None:
    net = network()
    net.flatten()
    prediction = Prediction(net.eval())
    prediction(images())
    copied = copy.deepcopy(prediction)
    assert copied.packed is not None and not len(copied.packed.vectors)
    check(copied.model, copied, images())
    gradient = Gradient(net, ops.cross_entropy)
    assert gradient.packed is None
    vectors = prediction.packed.vectors if prediction.packed else {}
    prediction.forget()
    assert not len(vectors)  # freed with the programs
