"""Initial weights: they are reproducible by a seed, and have the variance and kurtosis of their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nn_helper import NAMES, Net

import minidl
from minidl import nn
from minidl.errors import ShapeError


def test_the_same_seed_builds_the_same_model() -> None:
    states = []
    for seed in (0, 0, 1):
        minidl.seed(seed)
        states.append(Net().state_dict())
    assert all((states[0][name] == states[1][name]).all() for name in NAMES)
    assert (states[0]["fc.weight"] != states[2]["fc.weight"]).all()


# Kurtosis. The standard error of the variance of n samples is variance * sqrt((kurtosis - 1) / n).
NORMAL, UNIFORM = 3.0, 1.8
SHAPE = (3, 5, 20, 30)  # (kh, kw, in, out): fan_in 300, fan_out 450


@pytest.mark.parametrize(
    ("fill", "variance", "kurtosis"),
    [
        (lambda p: nn.init.normal(p, 0.3), 0.3**2, NORMAL),
        (lambda p: nn.init.uniform(p, 0.3), 0.3**2 / 3, UNIFORM),
        (nn.init.kaiming_normal, 2 / 300, NORMAL),
        (lambda p: nn.init.kaiming_normal(p, fan_out=True), 2 / 450, NORMAL),
        (nn.init.kaiming_uniform, 2 / 300, UNIFORM),
        (lambda p: nn.init.kaiming_uniform(p, gain=1.0), 1 / 300, UNIFORM),
        (nn.init.xavier_normal, 2 / 750, NORMAL),
        (nn.init.xavier_uniform, 2 / 750, UNIFORM),
        (lambda p: nn.init.torch_default(p, None), 1 / 300 / 3, UNIFORM),
    ],
)
def test_initial_weights_have_the_expected_variance(fill: object, variance: float, kurtosis: float) -> None:
    minidl.seed(0)
    parameter = nn.Parameter(np.empty(SHAPE, np.float32))
    fill(parameter)  # type: ignore[operator]
    x = parameter.data.astype(np.float64).ravel()
    assert abs(x.var() - variance) < 4 * variance * math.sqrt((kurtosis - 1) / x.size)
    assert abs(x.mean()) < 4 * math.sqrt(variance / x.size)
    assert abs((x**4).mean() / x.var() ** 2 - kurtosis) < 0.2
    if kurtosis == UNIFORM:
        assert 0.998 < abs(x).max() / math.sqrt(3 * variance) < 1 + 1e-6  # one of 9,000 draws is close to the bound


def test_initial_weights_of_layers() -> None:
    minidl.seed(0)
    conv = nn.Conv2d(8, 12, 3, groups=4)
    bound = 1 / math.sqrt(2 * 3 * 3)
    assert 0.9 * bound < abs(conv.weight.data).max() <= bound and abs(conv.bias.data).max() <= bound
    parameter = nn.Parameter(np.empty((2, 3), np.float32))
    nn.init.constant(parameter, 0.5)
    assert (parameter.data == 0.5).all()
    assert nn.init.fans(conv.weight) == (2 * 9, 12 * 9)


def test_a_bias_has_no_fans() -> None:
    with pytest.raises(ShapeError, match=r"a parameter of shape \(4,\) has no fan_in"):
        nn.init.xavier_uniform(nn.Linear(3, 4).bias)
