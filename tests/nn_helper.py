"""Small models for the tests of `minidl.nn`."""

from __future__ import annotations

import numpy as np

from minidl import Tensor, nn, ops


class Pair(nn.Module):
    """A block of two convolutions, with batch norm and relu between them."""

    def __init__(self) -> None:
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0), groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(ops.relu(self.bn(self.conv1(x))))


class Net(nn.Module):
    """A model with nested modules, a parameter outside its layers, and an attribute named like a method of Module."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(np.ones(1, np.float32))
        self.layer1 = nn.Sequential(Pair(), nn.GELU(), nn.MaxPool2d(2))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.layer1(x) * self.scale))


class Tied(nn.Module):
    """Two linear layers that share one weight."""

    def __init__(self) -> None:
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ops.tanh(self.first(x)))


NAMES = [
    "scale",
    "layer1.0.conv1.weight",
    "layer1.0.bn.weight",
    "layer1.0.bn.bias",
    "layer1.0.conv2.weight",
    "layer1.0.conv2.bias",
    "fc.weight",
    "fc.bias",
]
BUFFERS = ["layer1.0.bn.running_mean", "layer1.0.bn.running_var"]


def images(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
