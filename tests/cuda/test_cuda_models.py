"""Networks with odd layers have the gradients and predictions of the CPU: groups, dilation, strides, 37 images."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fake_driver import installed
from fake_driver.by_definition import by_definition
from fake_driver.driver import Settings

from minidl import nn, ops, optim
from minidl.program.replay import Gradient, Prediction

CLASSES = 7


class Inverted(nn.Module):
    """MobileNetV2's block: 1x1, depthwise 3x3, 1x1, and a shortcut if shapes allow it."""

    def __init__(self, channels: int, hidden: int, outputs: int, stride: int) -> None:
        self.expand, self.norm1 = nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.project, self.norm3 = nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = channels == outputs and stride == 1

    def forward(self, x: Any) -> Any:
        y = self.norm1(self.expand(x)).relu()
        y = self.norm3(self.project(self.norm2(self.depthwise(y)).relu()))
        return x + y if self.shortcut else y


def mobile() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 11, 3, stride=2, padding=1), nn.BatchNorm2d(11), nn.SiLU(), Inverted(11, 33, 11, 1),
        Inverted(11, 22, 13, 2), nn.GlobalAvgPool2d(), nn.Flatten(), nn.Linear(13, CLASSES),
    )  # fmt: skip


def stem() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 19, 7, stride=2, padding=3, bias=False), nn.GroupNorm(1, 19), nn.GELU(),
        nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(19, 21, 3, padding=2, dilation=2), nn.LeakyReLU(0.1),
        nn.AvgPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(21 * 2 * 2, 33), nn.LayerNorm(33), nn.Tanh(),
        nn.Linear(33, CLASSES),
    )  # fmt: skip


def groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 18, (5, 3), stride=(2, 1), padding=(1, 2)), nn.ReLU(), nn.Conv2d(18, 30, 3, groups=6, padding=1),
        nn.BatchNorm2d(30), nn.ReLU(), nn.Conv2d(30, 45, (1, 4), groups=3, dilation=(1, 2), padding=(0, 3)),
        nn.Sigmoid(), nn.MaxPool2d(2), nn.Conv2d(45, 36, 3, padding=1), nn.GlobalAvgPool2d(), nn.Flatten(),
        nn.Linear(36, CLASSES),
    )  # fmt: skip


def winograd() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 68, 3, padding=1), nn.ReLU(), nn.Conv2d(68, 68, 3, padding=1, bias=False), nn.BatchNorm2d(68),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(68, 65, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(65 * 7 * 6, 129), nn.ReLU(), nn.Linear(129, CLASSES),
    )  # fmt: skip


MODELS = {mobile: (15, 13), stem: (17, 15), groups: (12, 11), winograd: (14, 12)}  # pixels of an image


def trained(build: Any, device: str) -> list[np.ndarray]:
    """Return the losses of two steps, the gradients of the first, and a prediction for a smaller batch."""
    nn.seed(3)
    model = build().to(device)
    optimizer, gradient = optim.SGD(model, lr=0.01, momentum=0.9), Gradient(model, ops.cross_entropy)
    random = np.random.default_rng(1)
    x = random.standard_normal((37, *MODELS[build], 3)).astype(np.float32)
    losses, first = [], []
    for _ in range(2):
        losses.append(gradient(x, random.integers(0, CLASSES, len(x)))[0])
        assert not gradient.not_recorded
        first = first or [np.array(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
    return [np.array(losses), *first, Prediction(model)(x[:5])]


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", MODELS)
def test_a_network_agrees_with_the_cpu(build: Any, kernels: str) -> None:
    """kernels: the CPU's, or compiled ones on the emulator"""
    with installed(Settings()) as fake, by_definition(fake, "cpu") if kernels == "cpu" else nullcontext():
        found = trained(build, "cuda:0")
        assert not fake.error
    for one, other in zip(found, trained(build, "cpu"), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1.0, abs(other).max()))
