"""The models: shapes, sizes, gradients, and the inputs that they reject."""

from __future__ import annotations

import math

import numpy as np
import pytest

import minidl
from minidl import models, nn, no_grad, ops
from minidl.errors import ConfigError, MinidlError

SHAPES = [(8, 8, 1), (28, 28, 1), (32, 32, 3), (9, 13, 2)]
BASIC = ["mlp", "lenet", "vgg", "resnet20", "resnet20-gn", "whitened-cnn"]
DEEP = ["resnet32", "resnet44", "resnet56", "resnet110"]


def count(model: nn.Module) -> int:
    return sum(parameter.size for parameter in model.parameters())


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize("shape", SHAPES)
def test_build(name: str, shape: tuple[int, int, int]) -> None:
    model = models.build(name, shape, classes=7)
    x = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    nn.fit_whitening(model, x)
    with no_grad():
        y = model(x).numpy()
    assert y.shape == (2, 7) and np.isfinite(y).all() and (y[0] != y[1]).all()


@pytest.mark.parametrize("name", DEEP)
def test_build_deep(name: str) -> None:
    model = models.build(name, (8, 8, 3))
    with no_grad():
        assert model(np.ones((2, 8, 8, 3), np.float32)).shape == (2, 10)
    depth = int(name.removeprefix("resnet"))
    layers = [module for _, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


def test_all_models_are_tested() -> None:
    assert sorted(models.MODELS) == sorted(BASIC + DEEP)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        # weights and biases, layer by layer
        ("mlp", (28, 28, 1), 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10),
        ("lenet", (28, 28, 1), 25 * 32 + 32 + 25 * 32 * 64 + 64 + 7 * 7 * 64 * 512 + 512 + 512 * 10 + 10),
        (
            "vgg",
            (32, 32, 3),
            sum(9 * a * b + b for a, b in [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)])
            + 4 * 4 * 256 * 10
            + 10,
        ),
        ("lenet", (28, 28, 1), 1_663_370),
        ("resnet20", (32, 32, 3), 269_722),  # the paper's table 6: 0.27 M
        ("whitened-cnn", (32, 32, 3), 1_972_792),  # Jordan 2024: 1.97 million
        ("resnet20-gn", (32, 32, 3), 269_722),  # group norm has as many weights as batch norm
        ("resnet56", (32, 32, 3), 853_018),  # 0.85 M
        ("resnet110", (32, 32, 3), 1_727_962),  # 1.7 M
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, int, int], parameters: int) -> None:
    assert count(models.build(name, shape)) == parameters


def test_flops_of_lenet() -> None:
    conv = 2 * 25 * (28 * 28 * 1 * 32 + 14 * 14 * 32 * 64)
    linear = 2 * (7 * 7 * 64 * 512 + 512 * 10)
    assert models.build("lenet").summary((28, 28, 1)).endswith(
        f"1,663,370 parameters, {conv + linear:,} FLOPs for one input of (28, 28, 1)"
    )


def test_flops_of_resnet20() -> None:
    stages = [(32, 16, 16), (16, 16, 32), (8, 32, 64)]  # pixels along an edge, input channels, output channels
    macs = 32 * 32 * 9 * 3 * 16 + 64 * 10
    for edge, inputs, outputs in stages:
        macs += edge * edge * 9 * (inputs * outputs + 5 * outputs * outputs)
    summary = models.build("resnet20", (32, 32, 3)).summary((32, 32, 3)).splitlines()
    assert summary[-1] == f"269,722 parameters, {2 * macs:,} FLOPs for one input of (32, 32, 3)"
    assert len(summary) == 2 + sum(1 for _, m in models.build("resnet20").named_modules() if not [*m.named_children()])


@pytest.mark.parametrize("name", BASIC)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    minidl.seed(0)
    model = models.build(name, (8, 8, 1))
    x = np.random.default_rng(0).standard_normal((8, 8, 8, 1)).astype(np.float32)
    nn.fit_whitening(model, x)
    ops.cross_entropy(model(x), np.arange(8)).backward()
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:  # fixed filters
            continue
        assert parameter.grad is not None and np.isfinite(parameter.grad).all() and parameter.grad.any(), key


@pytest.mark.parametrize("name", BASIC)
def test_activations_keep_their_size(name: str) -> None:
    """The loss of an untrained model is about log(10): no activation explodes or vanishes."""
    minidl.seed(0)
    model = models.build(name, (16, 16, 3))
    rng = np.random.default_rng(0)
    with no_grad():
        loss = ops.cross_entropy(model(rng.standard_normal((32, 16, 16, 3)).astype(np.float32)), np.arange(32) % 10)
    assert math.log(10) - 0.1 < loss.item() < math.log(10) + 1.5


def test_a_block_doubles_channels_without_weights_in_the_shortcut() -> None:
    """With a residual of 0, a block returns relu(shortcut): every second pixel, and zeros in the new channels."""
    minidl.seed(0)
    block = models.Block(3, 5, stride=2)
    block.bn2.weight.copy_(np.zeros(5))
    x = np.random.default_rng(0).standard_normal((2, 7, 6, 3)).astype(np.float32)
    y = block(x).numpy()
    np.testing.assert_array_equal(y[..., :3], np.maximum(x[:, ::2, ::2], 0))
    assert y.shape == (2, 4, 3, 5) and not y[..., 3:].any()


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet", (3, 28, 1)), ("lenet", (28, 2, 1)), ("vgg", (7, 32, 3)), ("mlp", (0, 8, 1))]
)
def test_images_that_are_too_small(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=f"model '{name}' cannot take images of") as caught:
        models.build(name, shape)
    assert str(shape) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (4, 5, 1)), ("vgg", (8, 9, 1)), ("resnet20", (1, 2, 1))])
def test_the_smallest_images(name: str, shape: tuple[int, int, int]) -> None:
    with no_grad():
        assert models.build(name, shape, classes=3).eval()(np.ones((1, *shape), np.float32)).shape == (1, 3)


@pytest.mark.parametrize("name", BASIC)
def test_images_of_a_size_that_the_model_was_not_built_for(name: str) -> None:
    model = models.build(name, (16, 16, 3))
    with pytest.raises(MinidlError, match=r"layer [0-9a-z.]+, [A-Z].*: ") as caught:
        model(np.ones((2, 16, 16, 1) if "resnet" in name else (2, 24, 24, 3), np.float32))
    assert "\n" not in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'resnet-20': .*whitened-cnn\. Did you mean 'resnet20'"):
        models.build("resnet-20")
    with pytest.raises(ConfigError, match="unknown model 'transformer': expected one of mlp, lenet, vgg"):
        models.build("transformer")


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28, 1)])
def test_input_shapes_that_are_not_height_width_channels(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"; expected \(height, width, channels\)") as caught:
        models.build(name, shape)  # type: ignore[arg-type]
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("depth", [2, 18, 21, -4])
def test_depths_that_are_not_6n_plus_2(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth {depth}; expected 6 n \\+ 2"):
        models.resnet(depth=depth)
