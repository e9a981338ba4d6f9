"""Batch and layer normalisation: gradients, running statistics, and numbers far from zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError

SHAPES = [(7, 3), (5, 1), (3, 5, 4, 4), (67, 33), (2, 3, 5)]
far = np.random.default_rng(0).standard_normal((65, 5)) + 1e4


def channels_second(x: Any) -> Any:
    return x.movedim(-1, 1)


def statistics(channels: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    return random.standard_normal(channels), random.uniform(0.5, 2, channels)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(shape: tuple[int, ...], training: bool) -> None:
    mean, var = statistics(shape[-1])

    def theirs(x: Any, weight: Any, bias: Any) -> Any:
        running = (torch.from_numpy(mean.copy()).to(x.dtype), torch.from_numpy(var.copy()).to(x.dtype))
        y = torch.nn.functional.batch_norm(channels_second(x), *running, weight, bias, training)
        return y.movedim(1, -1)

    check_op(
        lambda x, weight, bias: ops.batch_norm(x, weight, bias, mean.astype(x.dtype), var.astype(x.dtype), training),
        theirs,
        shape,
        shape[-1:],
        shape[-1:],
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.1, 0.01, 1.0])
def test_running_statistics_after_several_steps(dtype: str, momentum: float) -> None:
    random = np.random.default_rng(0)
    batches = [(random.standard_normal((n, 3, 2, 5)) * 3 + 1).astype(dtype) for n in (4, 7, 1)]
    weight, bias = Tensor(np.ones(5, dtype)), Tensor(np.zeros(5, dtype))
    mean, var = np.zeros(5, dtype), np.ones(5, dtype)
    for x in batches:
        ops.batch_norm(Tensor(x), weight, bias, mean, var, training=True, momentum=momentum)

    expected_mean, expected_var = np.zeros(5), np.ones(5)
    for x in batches:  # by the definition
        rows = x.reshape(-1, 5).astype(np.float64)
        expected_mean = (1 - momentum) * expected_mean + momentum * rows.mean(0)
        expected_var = (1 - momentum) * expected_var + momentum * rows.var(0, ddof=1)
    tolerance = dict(rtol=1e-5 if dtype == "float32" else 1e-12, atol=0)
    np.testing.assert_allclose(mean, expected_mean, **tolerance)
    np.testing.assert_allclose(var, expected_var, **tolerance)

    if torch is not None:
        theirs = torch.nn.BatchNorm2d(5, momentum=momentum, dtype=getattr(torch, dtype))
        for x in batches:
            theirs(channels_second(torch.from_numpy(x)))
        np.testing.assert_allclose(mean, theirs.running_mean.numpy(), **tolerance)
        np.testing.assert_allclose(var, theirs.running_var.numpy(), **tolerance)

    before = mean.copy(), var.copy()
    ops.batch_norm(Tensor(batches[0]), weight, bias, mean, var, training=False)
    np.testing.assert_array_equal((mean, var), before)


def test_backward_in_eval_uses_the_statistics_of_its_forward_pass() -> None:
    """Changing the running statistics between the forward and backward passes must not change the gradients."""
    x = Tensor(np.random.default_rng(0).standard_normal((7, 3)), requires_grad=True)
    weight, bias = Tensor(np.ones(3), requires_grad=True), Tensor(np.zeros(3), requires_grad=True)
    mean, var = np.zeros(3), np.full(3, 4.0)
    y = ops.batch_norm(x, weight, bias, mean, var, training=False, eps=0.0)
    mean[:], var[:] = 100, 100
    y.sum().backward()
    np.testing.assert_allclose(x.grad, np.full((7, 3), 0.5), rtol=1e-14)
    np.testing.assert_allclose(weight.grad, x.numpy().sum(0) / 2, rtol=1e-13)


@pytest.mark.parametrize("shape", [(7, 3), (3, 5, 4, 4), (67, 33), (2, 3, 5), (5,), (0, 3)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    check_op(
        ops.layer_norm,
        lambda x, weight, bias: torch.nn.functional.layer_norm(x, shape[-1:], weight, bias),
        shape,
        shape[-1:],
        shape[-1:],
    )


def test_layer_norm_of_a_single_feature_is_the_bias() -> None:
    x, weight, bias = (Tensor(np.array(v), requires_grad=True) for v in ([[4.0], [5.0]], [2.0], [3.0]))
    y = ops.layer_norm(x, weight, bias)
    y.backward(np.array([[1.0], [10.0]]))
    assert y.numpy().tolist() == [[3], [3]] and bias.grad is not None and bias.grad.tolist() == [11]
    assert not np.any(x.grad) and not np.any(weight.grad)


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 1.0])
def test_eps(eps: float) -> None:
    one, zero = Tensor(np.ones(5)), Tensor(np.zeros(5))
    x = np.random.default_rng(0).standard_normal((7, 5))
    for y, axis in (
        (ops.layer_norm(Tensor(x), one, zero, eps), 1),
        (ops.batch_norm(Tensor(x), one, zero, np.zeros(5), np.ones(5), True, eps=eps), 0),
    ):
        expected = (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + eps)
        np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_far_from_zero(dtype: str, axis: int) -> None:
    """x is about 1e4 +- 1, so float32 rounds its mean by up to 5e-4. Nevertheless the variance of x must be accurate.
    E[x^2] - E[x]^2 in float32 would have no correct digit."""
    x = far.astype(dtype) if axis == 0 else np.ascontiguousarray(far.T.astype(dtype))
    channels = x.shape[1]
    one, zero = Tensor(np.ones(channels, dtype)), Tensor(np.zeros(channels, dtype))
    if axis == 0:
        y = ops.batch_norm(Tensor(x), one, zero, np.zeros(channels, dtype), np.ones(channels, dtype), True)
    else:
        y = ops.layer_norm(Tensor(x), one, zero)
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(axis, keepdims=True)) / np.sqrt(exact.var(axis, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-3 if dtype == "float32" else 1e-11)
    np.testing.assert_allclose(y.numpy().std(axis), expected.std(axis), rtol=1e-5 if dtype == "float32" else 1e-12)


def test_constant_channels_become_the_bias() -> None:
    x = Tensor(np.full((7, 3), 123.456))
    weight, bias = Tensor(np.full(3, 2.0)), Tensor(np.array([1.0, 2.0, 3.0]))
    y = ops.batch_norm(x, weight, bias, np.zeros(3), np.ones(3), True)
    np.testing.assert_allclose(y.numpy(), np.tile(bias.numpy(), (7, 1)), atol=1e-9)
    np.testing.assert_allclose(ops.layer_norm(x, weight, bias).numpy(), np.tile(bias.numpy(), (7, 1)), atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 3), (0, 3)])
def test_a_batch_without_a_variance(shape: tuple[int, ...]) -> None:
    one, running = Tensor(np.ones(3)), (np.zeros(3), np.ones(3))
    with pytest.raises(ShapeError, match=rf"batch_norm: input \({shape[0]}, 3\) has fewer than two values"):
        ops.batch_norm(Tensor(np.zeros(shape)), one, one, *running, training=True)
    assert ops.batch_norm(Tensor(np.zeros(shape)), one, one, *running, training=False).shape == shape


def test_shapes_that_do_not_fit() -> None:
    good = np.ones(3)
    for x, weight in (((7, 4), 3), ((3,), 3), ((7, 3), 4)):
        with pytest.raises(ShapeError, match=r"batch_norm: input .* channels"):
            ops.batch_norm(Tensor(np.ones(x)), Tensor(np.ones(weight)), Tensor(np.ones(weight)), good, good, False)
    for x, weight in (((7, 4), 3), ((), 3)):
        with pytest.raises(ShapeError, match=r"layer_norm: input .* features"):
            ops.layer_norm(Tensor(np.ones(x)), Tensor(np.ones(weight)), Tensor(np.ones(weight)))
