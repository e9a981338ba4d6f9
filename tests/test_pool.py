"""Pooling: windows that overlap, extend beyond the image or omit pixels; equal pixels (ties) and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError

WINDOWS = [
    dict(kernel=2),
    dict(kernel=3, stride=2),  # overlap
    dict(kernel=3, stride=1, padding=1),
    dict(kernel=(3, 2), stride=(2, 3), padding=(1, 0)),
    dict(kernel=4, stride=3, padding=2),
    dict(kernel=2, stride=5),  # some pixels are in no window
    dict(kernel=1),
    dict(kernel=(5, 7)),  # the whole image
]


def pooled_by_torch(name: str, x: Any, window: dict[str, Any]) -> Any:
    y = getattr(torch.nn.functional, name)(
        x.permute(0, 3, 1, 2), window["kernel"], window.get("stride"), window.get("padding", 0)
    )
    return y.permute(0, 2, 3, 1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_windows(name: str, window: dict[str, Any]) -> None:
    check_op(lambda x: getattr(ops, name)(x, **window), lambda x: pooled_by_torch(name, x, window), (3, 5, 7, 2))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_first_of_equal_pixels_gets_the_gradient(window: dict[str, Any]) -> None:
    ties = np.random.default_rng(0).integers(2, size=(2, 5, 7, 3)) - 1.0
    check_op(
        lambda x: ops.max_pool2d(x, **window),
        lambda x: pooled_by_torch("max_pool2d", x, window),
        ties,
        differences=False,
    )


def test_padding_is_never_the_maximum() -> None:
    y = ops.max_pool2d(Tensor(np.full((1, 3, 3, 1), -5.0)), 3, 1, 1)
    np.testing.assert_array_equal(y.numpy(), np.full((1, 3, 3, 1), -5.0))
    assert ops.max_pool2d(Tensor(np.full((1, 2, 2, 1), -np.inf)), 2, 1, 1).numpy().max() == -np.inf


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_nan_propagates_to_every_window_that_contains_it(name: str, device: str) -> None:
    for at in ((0, 0), (2, 3), (4, 6)):
        x = np.random.default_rng(0).standard_normal((1, 5, 7, 1))
        x[0, at[0], at[1], 0] = np.nan
        y = getattr(ops, name)(Tensor(x, device=device), 3, 1, 1).numpy()
        rows, columns = np.mgrid[:5, :7]
        near = (abs(rows - at[0]) <= 1) & (abs(columns - at[1]) <= 1)
        np.testing.assert_array_equal(np.isnan(y[0, :, :, 0]), near)


@pytest.mark.parametrize(("batch", "channels"), [(0, 3), (1, 3), (17, 3), (2, 0)])
def test_batches(batch: int, channels: int) -> None:
    for name in ("max_pool2d", "avg_pool2d"):
        x = Tensor(np.ones((batch, 4, 4, channels)), requires_grad=True)
        getattr(ops, name)(x, 2).sum().backward()
        assert x.grad is not None and x.grad.sum() == x.size / 4


def test_global_average() -> None:
    check_op(ops.global_avg_pool2d, lambda x: x.mean((1, 2), keepdim=True), (3, 5, 7, 2))


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((5, 7, 2), dict(kernel=2), r"shape \(5, 7, 2\); expected images"),
        ((1, 5, 7, 2), dict(kernel=6), r"window of \(6, 6\) does not fit into images \(1, 5, 7, 2\)"),
        ((1, 0, 7, 2), dict(kernel=2, padding=1), r"does not fit into images \(1, 0, 7, 2\)"),
        ((1, 5, 7, 2), dict(kernel=0), "kernel and stride >= 1"),
        ((1, 5, 7, 2), dict(kernel=2, stride=0), "kernel and stride >= 1"),
        ((1, 5, 7, 2), dict(kernel=2, padding=2), "padding at most half the kernel"),
        ((1, 5, 7, 2), dict(kernel=2, padding=-1), "padding at most half the kernel"),
    ],
)
def test_shapes_and_windows_that_do_not_fit(shape: tuple[int, ...], window: dict[str, Any], message: str) -> None:
    for name in ("max_pool2d", "avg_pool2d"):
        with pytest.raises(ShapeError, match=f"{name}: .*{message}"):
            getattr(ops, name)(Tensor(np.zeros(shape)), **window)
    if len(shape) != 4:
        with pytest.raises(ShapeError, match=r"global_avg_pool2d: .*expected images"):
            ops.global_avg_pool2d(Tensor(np.zeros(shape)))
