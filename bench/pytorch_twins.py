"""minidl's models in PyTorch, with the same layers and parameter names: the reference for tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    hidden = [nn.Linear(math.prod(shape), 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, classes))


def lenet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[2], 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (shape[0] // 4) * (shape[1] // 4), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def vgg(shape: tuple[int, int, int], classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = shape[2]
    for stage in ((64, 64), (128, 128), (256, 256)):
        for outputs in stage:
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (shape[0] // 8) * (shape[1] // 8), classes))


Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    def __init__(self, channels: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.stride, self.new_channels = stride, outputs - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(x + y)


class ResNet20(nn.Module):
    def __init__(self, shape: tuple[int, int, int], classes: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[2], 16, 3, padding=1, bias=False)
        self.bn1 = norm(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1, norm), Block(16, 16, 1, norm), Block(16, 16, 1, norm))
        self.layer2 = nn.Sequential(Block(16, 32, 2, norm), Block(32, 32, 1, norm), Block(32, 32, 1, norm))
        self.layer3 = nn.Sequential(Block(32, 64, 2, norm), Block(64, 64, 1, norm), Block(64, 64, 1, norm))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class WhitenedGroup(nn.Module):
    def __init__(self, channels: int, outputs: int, pool: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.bn1 = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        for norm in (self.bn1, self.bn2):
            norm.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.bn1(self.pool(self.conv1(x))))
        return F.gelu(self.bn2(self.conv2(x)))


class WhitenedCNN(nn.Module):
    """The weights of `whiten` are those of minidl's model: load its state_dict."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        side, channels = min(shape[:2]) - 1, 8 * shape[2]
        self.whiten = nn.Conv2d(shape[2], channels, 2)
        self.whiten.weight.requires_grad = False
        groups = []
        for outputs in (64, 256, 256):
            groups.append(WhitenedGroup(channels, outputs, side > 1))
            channels, side = outputs, side // 2 if side > 1 else side
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(channels, classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.groups(F.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3))) / 16


TWINS = {
    "mlp": mlp, "lenet": lenet, "vgg": vgg, "resnet20": ResNet20,
    "resnet20-gn": partial(ResNet20, norm=partial(nn.GroupNorm, 2)), "whitened-cnn": WhitenedCNN,
}  # fmt: skip
