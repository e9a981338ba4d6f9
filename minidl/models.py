"""Models for small images, built by functions of the input shape (H, W, C) and the number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from minidl import nn, ops
from minidl.checked import one_of, shown, whole
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError

Shape = tuple[int, int, int]
Norm = Callable[[int], nn.Module]  # the number of channels -> the layer that normalises them


def mlp(input_shape: Shape = (28, 28, 1), classes: int = 10, hidden: Sequence[int] = (512, 512)) -> nn.Sequential:
    """Return a model of linear layers with ReLU between them. hidden: the widths of the hidden layers."""
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise ConfigError(f"mlp: hidden = {shown(hidden)}; expected the widths of the layers, such as (512, 512)")
    layers: list[nn.Module] = [nn.Flatten()]
    features = math.prod(input_shape)
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


def lenet(input_shape: Shape = (28, 28, 1), classes: int = 10) -> nn.Sequential:
    """Return a network: two 5x5 convolutions (32 and 64 channels), each with 2x2 pooling, and a hidden layer of 512.

    The structure follows LeCun et al. 1998; the layers are wider, as in current benchmarks.
    """
    height, width, channels = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def vgg(
    input_shape: Shape = (32, 32, 3),
    classes: int = 10,
    stages: Sequence[Sequence[int]] = ((64, 64), (128, 128), (256, 256)),
) -> nn.Sequential:
    """Return a network: stages of 3x3 convolutions, each stage followed by 2x2 pooling (Simonyan and Zisserman 2015).

    stages: for each stage, the output channels of its convolutions.
    """
    if not isinstance(stages, Sequence) or not all(isinstance(stage, tuple | list) for stage in stages):
        raise ConfigError(f"vgg: stages = {shown(stages)}; expected a list of channels for each stage")
    height, width, channels = input_shape
    layers: list[nn.Module] = []
    for stage in stages:
        for outputs in stage:
            convolution = nn.Conv2d(channels, outputs, 3, padding=1)
            nn.init.kaiming_normal(convolution.weight)
            layers += [convolution, nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))


class Block(nn.Module):
    """relu(x + f(x)), where f is a 3x3 convolution, `norm`, relu, a second 3x3 convolution and `norm`.

    The first convolution may halve the image and double the channels. In this case, every second pixel of x is added,
    with zeros for the new channels. This shortcut has no weights (He et al. 2016, option A).
    """

    def __init__(self, channels: int, outputs: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.stride, self.new_channels = stride, outputs - channels

    def forward(self, x: Tensor) -> Tensor:
        y = ops.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1:
            x = x[:, :: self.stride, :: self.stride]
        if self.new_channels:
            x = ops.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.new_channels)))
        return ops.relu(x + y)


class ResNet(nn.Module):
    """A residual network for small images: 3 stages of n blocks, depth = 6 * n + 2 (He et al. 2016, section 4.2).

    norm: makes the layers bn1 and bn2, which follow the convolutions.
    Raises ConfigError for any other depth.
    """

    def __init__(
        self, input_shape: Shape = (32, 32, 3), classes: int = 10, depth: int = 20, norm: Norm = nn.BatchNorm2d
    ) -> None:
        if whole("resnet", "depth", depth, -math.inf) < 8 or depth % 6 != 2:
            raise ConfigError(f"resnet: depth {depth}; expected 6 n + 2, such as 20, 32, 44, 56 or 110")
        self.conv1 = nn.Conv2d(input_shape[2], 16, 3, padding=1, bias=False)
        self.bn1 = norm(16)
        self.layer1 = self.stage(16, 16, 1, (depth - 2) // 6, norm)
        self.layer2 = self.stage(16, 32, 2, (depth - 2) // 6, norm)
        self.layer3 = self.stage(32, 64, 2, (depth - 2) // 6, norm)
        self.pool = nn.GlobalAvgPool2d()
        self.fc = nn.Linear(64, classes)
        for _, module in self.named_modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal(module.weight, fan_out=True)

    @staticmethod
    def stage(channels: int, outputs: int, stride: int, blocks: int, norm: Norm) -> nn.Sequential:
        rest = (Block(outputs, outputs, 1, norm) for _ in range(blocks - 1))
        return nn.Sequential(Block(channels, outputs, stride, norm), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = ops.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(ops.flatten(self.pool(x)))


def resnet(input_shape: Shape = (32, 32, 3), classes: int = 10, depth: int = 20) -> ResNet:
    """Return the residual network of this depth (see `ResNet`)."""
    return ResNet(input_shape, classes, depth)


def resnet_gn(input_shape: Shape = (32, 32, 3), classes: int = 10, depth: int = 20, groups: int = 2) -> ResNet:
    """Return the residual network of this depth with group norm in place of batch norm.

    Two groups in each layer, as in Reddi et al. 2021, "Adaptive federated optimization". The layers keep the names bn1
    and bn2. Raises ShapeError if the groups do not divide 16, 32 and 64 channels.
    """
    return ResNet(input_shape, classes, depth, partial(nn.GroupNorm, groups))


class WhitenedGroup(nn.Module):
    """A 3x3 convolution, 2x2 pooling, norm, GELU, a second 3x3 convolution, norm, GELU. Norms have no weight.

    pool: whether there is pooling; images of one pixel cannot be made smaller.
    """

    def __init__(self, channels: int, outputs: int, pool: bool) -> None:
        self.conv1 = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.bn1 = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        for convolution, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            nn.init.identity(convolution.weight)
            norm.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = ops.gelu(self.bn1(self.pool(self.conv1(x))))
        return ops.gelu(self.bn2(self.conv2(x)))


class WhitenedCNN(nn.Module):
    """A small network that trains fast: the network of "94% on CIFAR-10 in 3.29 seconds on a single GPU" (Jordan 2024).

    2x2 whitening with fixed filters; groups of two convolutions, each of which halves the image; the largest value of
    each channel; a linear layer without bias. At the start, convolutions copy their input. In each step, the running
    statistics of batch norm keep 0.6 of their values (momentum 0.4 here and in PyTorch), so they follow quickly. The
    logits are divided by the square root of the number of features.

    widths: the channels of the groups.
    """

    def __init__(
        self, input_shape: Shape = (32, 32, 3), classes: int = 10, widths: Sequence[int] = (64, 256, 256)
    ) -> None:
        if not isinstance(widths, Sequence) or isinstance(widths, str) or not widths:
            raise ConfigError(f"whitened-cnn: widths = {shown(widths)}; expected channels, such as (64, 256, 256)")
        height, width, channels = input_shape
        if min(height, width) < 2:
            raise ConfigError(f"whitened-cnn: images of {height}x{width}; expected at least 2x2")
        self.whiten = nn.Whitening2d(channels)
        channels, height, width = self.whiten.weight.shape[3], height - 1, width - 1
        groups: list[nn.Module] = []
        for outputs in widths:
            pool = min(height, width) > 1
            groups.append(WhitenedGroup(channels, outputs, pool))
            channels, height, width = outputs, height // 2 if pool else height, width // 2 if pool else width
        self.groups = nn.Sequential(*groups)
        self.pool = nn.MaxPool2d((height, width))
        self.head = nn.Linear(channels, classes, bias=False)
        self.scale = 1 / math.sqrt(channels)
        nn.init.normal(self.head.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(ops.gelu(self.whiten(x)))
        return self.head(ops.flatten(self.pool(x))) * self.scale


# What the command line offers (see run/declared.py).
ABOUT = {
    "mlp": "three linear layers with ReLU between them, 512 wide",
    "lenet": "two 5x5 convolutions with pooling, two linear layers (after LeCun et al. 1998; wider)",
    "vgg": "three stages of two 3x3 convolutions each, without normalisation (Simonyan and Zisserman 2015)",
    "resnet20": "a residual network with batch norm and 20 layers (He et al. 2016)",
    "resnet20-gn": "the same with group norm, for replicas with different classes (two groups: Reddi et al. 2021)",
    "resnet32": "resnet20 with 32 layers",
    "resnet44": "the same with 44 layers",
    "resnet56": "the same with 56 layers",
    "resnet110": "the same with 110 layers",
    "whitened-cnn": "six 3x3 convolutions behind fixed 2x2 whitening; for --preset speedrun (Jordan 2024)",
    "FILE.py:FUNCTION": "your own: FUNCTION(input_shape, classes) in FILE.py returns the nn.Module",
}
OPTIONS: dict[str, dict[str, dict[str, object]]] = {
    "mlp": {},
    "lenet": {
        "conv": {
            "default": "auto",
            "choices": {"auto": "Winograd's method where it is faster", "direct": "never; smaller rounding errors"},
            "help": "how convolutions are computed",
        }
    },
    "vgg": {"conv": {"like": "lenet"}},
    "resnet20": {"conv": {"like": "lenet"}},
    "resnet20-gn": {"conv": {"like": "lenet"}},
    "resnet32": {"conv": {"like": "lenet"}},
    "resnet44": {"conv": {"like": "lenet"}},
    "resnet56": {"conv": {"like": "lenet"}},
    "resnet110": {"conv": {"like": "lenet"}},
    "whitened-cnn": {"conv": {"like": "lenet"}},
    "FILE.py:FUNCTION": {"conv": {"like": "lenet"}},
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "vgg": vgg,
    "resnet20": resnet,
    "resnet20-gn": resnet_gn,
    **{f"resnet{depth}": partial(resnet, depth=depth) for depth in (32, 44, 56, 110)},
    "whitened-cnn": WhitenedCNN,
}


def build(name: str, input_shape: Shape = (28, 28, 1), classes: int = 10) -> nn.Module:
    """Return the model of that name, for images of input_shape.

    `predict`, `evaluate` and `fit` refuse other images, unless `model.built_for` is set to None.
    Raises ConfigError if the name is unknown or another argument is not valid.
    """
    one_of("model", name, MODELS)
    if not isinstance(input_shape, Sequence) or len(input_shape) != 3:
        raise ConfigError(f"model {name!r}: input_shape {shown(input_shape)}; expected (height, width, channels)")
    height, width, channels = (whole(f"model {name!r}", "each size of input_shape", size) for size in input_shape)
    input_shape, classes = (height, width, channels), whole(f"model {name!r}", "classes", classes, 1)
    if input_shape[:2] == (1, 1) and name != "mlp":
        raise ConfigError(f"model {name!r} needs images, and the data hold {input_shape[2]} features for each sample: "
                          "use --model mlp")  # fmt: skip
    model = MODELS[name](input_shape, classes)
    if any(not parameter.size for parameter in model.parameters()):
        raise ConfigError(f"model {name!r} cannot take images of {input_shape}: they are too small for its pooling")
    model.built_for, model.built_as = input_shape, (name, classes)
    return model


def check(where: str, model: object) -> None:
    """Raise ConfigError unless `model` is a module. where: the beginning of the message."""
    if isinstance(model, nn.Module):
        return
    advice = "expected an nn.Module"
    if isinstance(model, str) and model in MODELS:
        advice += f": minidl.models.build({model!r}, input_shape, classes) makes one"
    elif isinstance(model, str | Path):
        advice += ": minidl.load(path) returns a trained one, and a function to standardise images"
    elif isinstance(model, tuple) and model and isinstance(model[0], nn.Module):
        advice += ": write model, standardise = minidl.load(path)"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        advice += f": write {model.__name__}(...)"
    raise ConfigError(f"{where}: the model is {shown(model)}; {advice}")


def check_images(where: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if images of this shape (N, ...) are not those that `build` made the model for."""
    built = model.built_for
    if built is None or shape[1:] == built:
        return
    # Images may also be given without the axis of a single channel, or as features (N, D) of one channel or one pixel.
    flat = (math.prod(built),)
    if (built[2] == 1 and shape[1:] in (built[:2], flat)) or (built[:2] == (1, 1) and shape[1:] == flat):
        return
    advice = f"expected (N, {built[0]}, {built[1]}, {built[2]}), for which the model was built"
    if shape[1:] == (built[2], *built[:2]):
        advice += ": give x.transpose(0, 2, 3, 1)"
    elif shape == built:
        advice += ": give x[np.newaxis]"
    raise ConfigError(f"{where}: images have the shape {shape}; {advice}")
