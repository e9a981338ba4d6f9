"""Initial weights: they are reproducible by a seed, and have the variance and kurtosis of their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nn_helper import NAMES, Net

import minidl
from minidl import nn, no_grad, ops
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


def test_identity_copies_the_first_channels() -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 5, 4)).astype(np.float32)
    minidl.seed(0)
    for outputs in (3, 4, 7):
        layer = nn.Conv2d(4, outputs, 3, padding=1, bias=False)
        before = layer.weight.data.copy()
        nn.init.identity(layer.weight)
        with no_grad():
            y = layer(x).numpy()
        np.testing.assert_array_equal(y[..., :4], x[..., :outputs])
        np.testing.assert_array_equal(layer.weight.data[..., 4:], before[..., 4:])
    with pytest.raises(ShapeError, match="expected filters"):
        nn.init.identity(nn.Linear(2, 3).weight)


def patches(x: np.ndarray, size: int) -> np.ndarray:
    """Return all patches of images as rows, by plain loops."""
    found = [x[:, i : i + size, j : j + size].reshape(len(x), -1)
             for i in range(x.shape[1] - size + 1) for j in range(x.shape[2] - size + 1)]  # fmt: skip
    return np.concatenate(found).astype(np.float64)


def correlated(n: int = 450) -> np.ndarray:
    """Return images whose neighbouring pixels and channels are similar."""
    x = np.random.default_rng(1).standard_normal((n, 9, 8, 3)).cumsum(1).cumsum(2).cumsum(3) + 5
    return x.astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_whitened_patches_are_not_correlated(size: int) -> None:
    x = correlated()
    filters = nn.init.whitening(x, size, 0.0)
    features = filters.shape[3]
    assert filters.shape == (size, size, 3, 3 * size**2) and filters.dtype == np.float64
    outputs = patches(x, size) @ filters.reshape(features, features)
    np.testing.assert_allclose(np.cov(outputs.T, bias=True), np.eye(features), atol=1e-9)


def test_whitening_uses_the_eigenvectors_of_the_covariance() -> None:
    """eps keeps directions without variance small. The signs are fixed, so all replicas have the same filters."""
    x = correlated()
    x[..., 2] = x[..., 1]  # the covariance is singular
    filters = nn.init.whitening(x, 2, 1e-2).reshape(12, 12)
    covariance = np.cov(patches(x, 2).T, bias=True)
    values = np.linalg.eigvalsh(covariance)[::-1]
    np.testing.assert_allclose(np.linalg.norm(filters, axis=0), 1 / np.sqrt(values + 1e-2), rtol=1e-6)
    np.testing.assert_allclose(covariance @ filters, filters * values, atol=1e-9 * values[0])
    assert (filters[np.abs(filters).argmax(axis=0), np.arange(12)] > 0).all()


def test_the_whitening_layer_is_fitted_once_and_is_not_trained() -> None:
    x = correlated(40)
    layer = nn.Whitening2d(3)
    assert not layer.fitted and layer.weight.shape == (2, 2, 3, 24)
    model = nn.Sequential(layer, nn.GELU(), nn.Flatten(), nn.Linear(8 * 7 * 24, 2))
    nn.fit_whitening(model, x)
    before = layer.weight.data.copy()
    np.testing.assert_array_equal(before[..., 12:], -before[..., :12])
    np.testing.assert_allclose(before[..., :12], nn.init.whitening(x, 2, 5e-4), rtol=1e-6)
    nn.fit_whitening(model, 2 * x)  # it has weights, such as those of an earlier training
    np.testing.assert_array_equal(layer.weight.data, before)
    optimizer = minidl.optim.SGD(model, lr=1.0, weight_decay=0.5)
    ops.cross_entropy(model(x[:4]), np.array([0, 1, 0, 1])).backward()
    optimizer.step()
    np.testing.assert_array_equal(layer.weight.data, before)
    assert layer.bias.data.any()
    with pytest.raises(ShapeError, match=r"images \(4, 1, 8, 3\) and patches of 2x2"):
        layer.fit_to(x[:4, :1])
