"""Activation functions: values and gradients, near zero, for large numbers, and for NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor

NAMES = ["relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"]


def in_torch(name: str) -> Callable:
    return lambda x: getattr(torch.nn.functional, name)(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 1, 5), ()])
def test_activation(name: str, shape: tuple[int, ...]) -> None:
    check_op(getattr(ops, name), in_torch(name), shape)


@pytest.mark.parametrize("name", NAMES)
def test_many_elements(name: str) -> None:
    check_op(getattr(ops, name), in_torch(name), 3 * np.random.default_rng(0).standard_normal(40_001), loops=False)


@pytest.mark.parametrize("name", NAMES)
def test_zero_and_large_numbers(name: str) -> None:
    """Each number is tested alone, because the tolerance is relative to the largest element. The plain loops are left
    out: they compute in float64, where sigmoid(20) is less than 1. PyTorch's gelu is replaced: it is 0 below -9."""
    theirs = (lambda x: x * torch.special.erfc(-x / 2**0.5) / 2) if name == "gelu" else in_torch(name)
    for value in (0.0, 0.01, -0.01, 20, -20, 100, -100, 1e4, -1e4):
        check_op(getattr(ops, name), theirs, np.array([value]), loops=False, differences=False)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity(name: str) -> None:
    y = getattr(ops, name)(Tensor([np.nan, np.inf])).numpy()
    assert np.isnan(y[0]) and y[1] == (1 if name in ("tanh", "sigmoid") else np.inf)


@pytest.mark.parametrize("slope", [0, 0.3, 1, -0.5])
def test_slope(slope: float) -> None:
    check_op(lambda x: ops.leaky_relu(x, slope), lambda x: torch.nn.functional.leaky_relu(x, slope), (3, 7))


def test_relu_has_slope_0_at_0() -> None:
    check_op(ops.relu, in_torch("relu"), np.array([-1.0, 0.0, -0.0, 1.0]), differences=False)
