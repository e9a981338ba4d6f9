"""The layers. Each stores parameters and options, and passes them to an op (minidl/ops)."""

from __future__ import annotations

import math

import numpy as np

from minidl import ops
from minidl.checked import real, whole
from minidl.engine import random
from minidl.engine.parameter import Buffer, Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, ShapeError
from minidl.kernels.conv.reference import Pair
from minidl.nn import init
from minidl.nn.module import Module
from minidl.ops.conv import pair
from minidl.ops.group_norm import divisible


class Linear(Module):
    """x (..., in) -> x @ weight + bias (..., out). weight (in, out); PyTorch stores its transpose."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        in_features = whole("Linear", "in_features", in_features)
        out_features = whole("Linear", "out_features", out_features, 1)
        self.weight = Parameter(init.empty(in_features, out_features), torch_axes=(1, 0))
        self.bias = Parameter(init.empty(out_features)) if bias else None
        init.torch_default(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def flops(self, output_shape: tuple[int, ...]) -> int:
        return 2 * self.weight.shape[0] * math.prod(output_shape)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}" + (", bias=False" if self.bias is None else "")


class Conv2d(Module):
    """Images (N, H, W, C) -> (N, Ho, Wo, O). weight (kh, kw, C / groups, O); PyTorch stores (O, C / groups, kh, kw)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        in_channels = whole("Conv2d", "in_channels", in_channels)
        out_channels = whole("Conv2d", "out_channels", out_channels, 1)
        groups = whole("Conv2d", "groups", groups, -math.inf)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ShapeError(f"Conv2d: {in_channels} -> {out_channels} channels do not divide into {groups} groups")
        if isinstance(padding, str):
            raise ConfigError(f"Conv2d: padding={padding!r}; expected a number of pixels, such as kernel_size // 2")
        if min(pair(kernel_size)) < 1:
            raise ShapeError(f"Conv2d: a kernel of {kernel_size}; expected at least 1")
        shape = (*pair(kernel_size), in_channels // groups, out_channels)
        self.weight = Parameter(init.empty(*shape), torch_axes=(3, 2, 0, 1))
        self.bias = Parameter(init.empty(out_channels)) if bias else None
        self.stride, self.padding, self.dilation, self.groups = pair(stride), pair(padding), pair(dilation), groups
        init.torch_default(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def flops(self, output_shape: tuple[int, ...]) -> int:
        return 2 * math.prod(self.weight.shape[:3]) * math.prod(output_shape)

    def extra_repr(self) -> str:
        height, width, channels, outputs = self.weight.shape
        text = f"{channels * self.groups}, {outputs}, {height}x{width}"
        for name, plain in (("stride", 1), ("padding", 0), ("dilation", 1)):
            if getattr(self, name) != (plain, plain):
                value = getattr(self, name)
                text += f", {name}={value[0] if value[0] == value[1] else value}"
        text += f", groups={self.groups}" if self.groups > 1 else ""
        return text + (", bias=False" if self.bias is None else "")


class BatchNorm2d(Module):
    """Batch normalisation of each channel (the last axis), over images (N, H, W, C)."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        num_features = whole("BatchNorm", "num_features", num_features, 1)
        self.weight = Parameter(np.ones(num_features, np.float32))
        self.bias = Parameter(np.zeros(num_features, np.float32))
        self.running_mean = Buffer(np.zeros(num_features, np.float32))
        self.running_var = Buffer(np.ones(num_features, np.float32))
        self.eps, self.momentum = real("BatchNorm", "eps", eps), real("BatchNorm", "momentum", momentum)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean._data, self.running_var._data
        if self.training and self.running_mean.arena is not None:
            self.running_mean.arena.touch()  # batch_norm writes the running statistics
        return ops.batch_norm(x, self.weight, self.bias, mean, var, self.training, self.momentum, self.eps)

    def extra_repr(self) -> str:
        return str(self.weight.size)


class BatchNorm1d(BatchNorm2d):
    """Batch normalisation of features (N, C)."""


class LayerNorm(Module):
    """Normalisation of each sample over its last axis."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        features = whole("LayerNorm", "features", features, 1)
        self.weight = Parameter(np.ones(features, np.float32))
        self.bias = Parameter(np.zeros(features, np.float32))
        self.eps = real("LayerNorm", "eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return str(self.weight.size)


class GroupNorm(Module):
    """Normalisation of each sample over groups of neighbouring channels (the last axis), as for (N, H, W, C)."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        self.num_groups = whole("GroupNorm", "num_groups", num_groups, 1)
        self.num_channels = whole("GroupNorm", "num_channels", num_channels, 1)
        divisible("GroupNorm", self.num_groups, self.num_channels)
        self.weight = Parameter(np.ones(self.num_channels, np.float32)) if affine else None
        self.bias = Parameter(np.zeros(self.num_channels, np.float32)) if affine else None
        self.eps = real("GroupNorm", "eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.num_channels,):
            raise ShapeError(f"group_norm: input {x.shape} for {self.num_channels} channels; expected (N, ..., "
                             f"{self.num_channels})")  # fmt: skip
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}" + (", affine=False" if self.weight is None else "")


class Dropout(Module):
    """In training mode, each element becomes 0 with probability p; the others are divided by 1 - p."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = real("Dropout", "p", p, below=1)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p, *random.draw(x.size)) if self.training and self.p else x

    def extra_repr(self) -> str:
        return f"{self.p}"


class MaxPool2d(Module):
    """The largest value in each window; stride defaults to kernel_size."""

    def __init__(self, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"


class AvgPool2d(MaxPool2d):
    """The mean of each window; stride defaults to kernel_size."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class GlobalAvgPool2d(Module):
    """The mean over all pixels: (N, H, W, C) -> (N, 1, 1, C); PyTorch's AdaptiveAvgPool2d(1)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.global_avg_pool2d(x)


class Flatten(Module):
    """Images (N, H, W, C) -> (N, C * H * W), in PyTorch's order: the next layer's weights depend on it."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x)


class Identity(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class LeakyReLU(Module):
    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = real("LeakyReLU", "negative_slope", negative_slope, -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        return ops.leaky_relu(x, self.negative_slope)

    def extra_repr(self) -> str:
        return f"{self.negative_slope}"


class GELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x)


class SiLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class Softmax(Module):
    """Softmax over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x)


class LogSoftmax(Module):
    """The logarithm of softmax over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.log_softmax(x)


class CrossEntropyLoss(Module):
    """logits (N, classes), labels (N,) integers -> the mean cross-entropy."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, logits: Tensor, labels: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, labels, self.label_smoothing)


class MSELoss(Module):
    """The mean of (prediction - target)^2."""

    def __call__(self, prediction: Tensor, target: Tensor | np.ndarray) -> Tensor:
        return ops.mse_loss(prediction, target)
