"""Sums, means and maxima over any axes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError

Axis = int | tuple[int, ...] | None

AXES: list[Axis] = [None, 0, 2, -1, (0, 1), (2, 1), (0, 2), (-1, 0), (0, 1, 3), (0, -1, 1, 2), np.int64(1)]  # type: ignore[list-item]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_reduce(name: str, axis: Axis, keepdims: bool) -> None:
    axes = tuple(range(4)) if axis is None else axis
    torch_name = {"max": "amax"}.get(name, name)
    check_op(
        lambda x: getattr(x, name)(axis, keepdims=keepdims),
        lambda x: getattr(x, torch_name)(axes, keepdim=keepdims),
        (3, 2, 1, 5),
    )


@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_a_single_number_and_no_axes(name: str) -> None:
    check_op(lambda x: getattr(x, name)() * 2, lambda x: x * 2, ())
    check_op(lambda x: getattr(x, name)(()) * 2, lambda x: x * 2, (3, 2))


def test_a_long_sum_in_float32_is_as_good_as_one_rounding() -> None:
    x = np.random.default_rng(0).uniform(0.5, 1, (1001, 3)).astype(np.float32)
    for axis in (0, 1, None):
        exact = x.astype(np.float64).sum(axis)
        np.testing.assert_allclose(Tensor(x).sum(axis).numpy(), exact, rtol=2**-24 * 1.01)


@given(st.data())
def test_any_axes_that_numpy_accepts(data: st.DataObject) -> None:
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    axes = data.draw(npst.valid_tuple_axes(len(shape)))
    keepdims = data.draw(st.booleans())
    array = np.random.default_rng(0).standard_normal(shape)
    x = Tensor(array, requires_grad=True)

    y = x.sum(axes, keepdims)
    np.testing.assert_allclose(y.numpy(), array.sum(axes, keepdims=keepdims), atol=1e-13, strict=True)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    y.backward(dy)
    spread = dy if keepdims else np.expand_dims(dy, axes)
    np.testing.assert_array_equal(x.grad, np.broadcast_to(spread, shape) if axes else dy, strict=True)

    if all(shape[axis] for axis in axes):
        largest = array.max(axes, keepdims=keepdims)
        np.testing.assert_array_equal(x.max(axes, keepdims).numpy(), largest, strict=True)


def test_empty() -> None:
    assert Tensor(np.zeros((0, 3))).sum(0).numpy().tolist() == [0, 0, 0]
    assert Tensor(np.zeros((3, 0))).sum(0).shape == Tensor(np.zeros((3, 0))).max(0).shape == (0,)
    for name in ("mean", "max"):
        with pytest.raises(ShapeError, match=rf"{name}: no elements along axis 0 of shape \(0, 3\)"):
            getattr(ops, name)(Tensor(np.zeros((0, 3))), 0)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    ties = np.array([[1.0, 2, 2], [3, 3, 0], [5, 5, 5]])
    check_op(lambda x: x.max(1), lambda x: torch.stack([x[0, 1], x[1, 0], x[2, 0]]), ties, differences=False)
    check_op(lambda x: x.max(0), lambda x: x[2], ties, differences=False)
    check_op(lambda x: x.max(), lambda x: x[2, 0], ties, differences=False)


def test_maximum_of_nan_is_nan() -> None:
    x = np.array([[1.0, np.nan, 3], [-np.inf, -np.inf, -np.inf]])
    np.testing.assert_array_equal(Tensor(x).max(1).numpy(), [np.nan, -np.inf])


@pytest.mark.parametrize("axis", [2, -3, (0, 2), (0, 0), (1, -1)])
def test_axes_that_do_not_exist(axis: Axis) -> None:
    for name in ("sum", "mean", "max"):
        with pytest.raises(ShapeError, match=rf"{name}: axis .* \(3, 2\)"):
            getattr(ops, name)(Tensor(np.zeros((3, 2))), axis)
