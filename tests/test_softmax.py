"""Softmax and the losses, also with logits that overflow exp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, ShapeError


def cross_entropy(labels: np.ndarray, smoothing: float = 0.0) -> tuple[Any, Any]:
    def theirs(logits: Any) -> Any:
        target = torch.from_numpy(labels.astype(np.int64))
        return torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing)

    return lambda logits: ops.cross_entropy(logits, labels, smoothing), theirs


@pytest.mark.parametrize("shape", [(3, 10), (7,), (2, 3, 5), (1, 1), (0, 3), (33, 101)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_over_the_last_axis(name: str, shape: tuple[int, ...]) -> None:
    check_op(getattr(ops, name), lambda x: getattr(torch, name)(x, -1), shape)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_large_logits(name: str) -> None:
    for row in ([1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4 + 2], [700, 699.5, -700]):
        check_op(getattr(ops, name), lambda x: getattr(torch, name)(x, -1), np.array([row]), differences=False)


@given(st.floats(-1e4, 1e4), st.integers(1, 9))
def test_softmax_does_not_change_with_a_shift_and_sums_to_one(shift: float, classes: int) -> None:
    x = np.random.default_rng(classes).standard_normal((3, classes))
    y = ops.softmax(Tensor(x)).numpy()
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-14)
    np.testing.assert_allclose(ops.softmax(Tensor(x + shift)).numpy(), y, rtol=1e-11)


def test_a_class_that_is_impossible() -> None:
    np.testing.assert_array_equal(ops.softmax(Tensor([0.0, -np.inf])).numpy(), [1, 0])
    np.testing.assert_array_equal(ops.log_softmax(Tensor([0.0, -np.inf])).numpy(), [0, -np.inf])


@pytest.mark.parametrize("shape", [(), (3, 0)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_no_classes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"{name}: .*at least one class"):
        getattr(ops, name)(Tensor(np.zeros(shape)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (1, 7), (7, 10), (33, 3)])
def test_cross_entropy(rows: int, classes: int, smoothing: float) -> None:
    labels = np.random.default_rng(0).integers(classes, size=rows)
    check_op(*cross_entropy(labels, smoothing), (rows, classes))


def test_cross_entropy_of_large_logits() -> None:
    for logits in ([[1e4, -1e4, 0.0], [0.0, 1e4, 1e4]], [[1e4, 1e4, 1e4 - 2], [-1e4 - 1, 1 - 1e4, -1e4]]):
        for smoothing in (0.0, 0.1):
            check_op(*cross_entropy(np.array([1, 2]), smoothing), np.array(logits), differences=False)
    assert ops.cross_entropy(Tensor([[1e4, -1e4]]), np.array([0])).item() == 0
    assert ops.cross_entropy(Tensor([[1e4, -1e4]]), np.array([1])).item() == 2e4


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_of_any_integer_type(dtype: type) -> None:
    check_op(*cross_entropy(np.array([2, 0, 2, 1], dtype)[::2]), (2, 3))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], "labels from 0 to 3; expected 0 to 2"),
        ([0, -1, 1], "labels from -1 to 1; expected 0 to 2"),
        ([0, 1], r"\(3, 3\) and labels int64 \(2,\)"),
        ([[0], [1], [2]], r"labels int64 \(3, 1\)"),
        ([0.0, 1.0, 2.0], "labels float64"),
        ([True, False, True], "labels bool"),
    ],
)
def test_bad_labels(labels: list, message: str) -> None:
    with pytest.raises(ShapeError, match=f"cross_entropy: .*{message}"):
        ops.cross_entropy(Tensor(np.zeros((3, 3))), np.array(labels))


def test_bad_logits_and_smoothing() -> None:
    for shape in ((3,), (0, 3), (3, 0), (1, 3, 3)):
        with pytest.raises(ShapeError, match="cross_entropy: logits"):
            ops.cross_entropy(Tensor(np.zeros(shape)), np.zeros(shape[0], int))
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="label_smoothing"):
            ops.cross_entropy(Tensor(np.zeros((3, 3))), np.zeros(3, int), smoothing)


def test_mse_loss() -> None:
    check_op(ops.mse_loss, lambda x, y: torch.nn.functional.mse_loss(x, y), (3, 5), (3, 5))
    assert ops.mse_loss(Tensor([1.0, 2.0]), np.array([1, 4])).item() == 2
    with pytest.raises(ShapeError, match=r"mse_loss: prediction \(3, 1\) and target \(3,\)"):
        ops.mse_loss(Tensor(np.zeros((3, 1))), np.zeros(3))
    with pytest.raises(ShapeError, match=r"mse_loss: prediction \(3, 1\) and target \(3,\)"):
        ops.mse_loss(Tensor(np.zeros((3, 1))), Tensor(np.zeros(3)))
