"""A small network and its loss, for tests of arenas."""

from __future__ import annotations

import numpy as np

import minidl
from minidl import Tensor, nn, ops


def model() -> nn.Sequential:
    """Return a network whose parameters leave gaps in an arena. Its batch norm adds buffers."""
    minidl.seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 5 * 7, 11)
    )


def loss_of(network: nn.Module) -> Tensor:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 5, 7, 2)).astype(np.float32)
    return ops.cross_entropy(network(x), rng.integers(11, size=4))
