"""Arithmetic between tensors, arrays and numbers, with broadcasting in all directions."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.kernels.elementwise import cpu

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]
positive = np.random.default_rng(2).uniform(0.5, 2, (3, 7))


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 7), (3, 7)),
        ((3, 1, 5), (4, 1)),  # both are broadcast
        ((4, 1), (3, 1, 5)),
        ((5,), (2, 3, 5)),
        ((2, 3, 5), (5,)),  # a number for each channel, in rows, of all images
        ((2, 3, 5), (2, 1, 5)),  # ... of each image
        ((2, 3, 1), (2, 3, 5)),
        ((2, 3, 5), (2, 3, 1)),  # a number for each pixel
        ((2, 3, 4, 5), (3, 1, 5)),  # axes that are not adjacent
        ((2, 3, 5), ()),
        ((), (7,)),
        ((), ()),
        ((1, 1), (1,)),
    ],
)
def test_arithmetic_broadcasts(op: Callable, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    away_from_0 = np.random.default_rng(3).uniform(0.5, 2, b)
    check_op(op, None, a, away_from_0)


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("number", [3, -0.7, np.float64(1.5), np.int64(2)])
def test_numbers_on_both_sides(op: Callable, number: float) -> None:
    check_op(lambda x: op(x, number), lambda x: op(x, float(number)), positive)
    check_op(lambda x: op(number, x), lambda x: op(float(number), x), positive)


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("array", [np.array([1.5, -2, 0.25]), np.array([3, 1, 2]), np.array(4), np.ones((2, 1), bool)])
def test_arrays_on_both_sides(op: Callable, array: np.ndarray) -> None:
    """An array of any type (float64, integers, booleans) is converted to the tensor's type."""
    x = np.array([0.5, 1.5, -2.5])
    for dtype in (np.float32, np.float64):
        for y, expected in (
            (op(Tensor(x.astype(dtype)), array), op(x, array.astype(float))),
            (op(array, Tensor(x.astype(dtype))), op(array.astype(float), x)),
        ):
            assert isinstance(y, Tensor) and y.dtype == dtype
            np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)


@given(npst.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=4, min_side=0))
def test_any_shapes_that_numpy_broadcasts(shapes: npst.BroadcastableShapes) -> None:
    random = np.random.default_rng(0)
    a, b = (Tensor(random.standard_normal(shape), requires_grad=True) for shape in shapes.input_shapes)
    y = a * b
    assert y.shape == shapes.result_shape
    np.testing.assert_array_equal(y.numpy(), a.numpy() * b.numpy())
    dy = random.standard_normal(y.shape)
    y.backward(dy)
    for x, other in ((a, b), (b, a)):  # <dx, x'> = <dy, x' * other> for all x' (`direction`)
        direction = random.standard_normal(x.shape)
        assert x.grad is not None and x.grad.shape == x.shape
        np.testing.assert_allclose(np.sum(x.grad * direction), np.sum(dy * direction * other.numpy()), atol=1e-10)


@given(
    st.integers(1, 9),
    st.sampled_from([1, 2, 5, 900, 3000]),
    st.integers(1, 40) | st.sampled_from([512, 1023, 1024, 1500]),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_small_operand_belongs_to_many_numbers(outer: int, n: int, inner: int, dtype: type, wide: bool) -> None:
    """Any shapes, also several chunks (above 32,768 numbers) and rows longer than a span. Nothing else is written."""
    outer, inner = (outer * 900, 1) if wide and n < 900 else (outer, inner)
    assume(outer * n * inner <= 200_000)
    random = np.random.default_rng(0)
    x, w = random.standard_normal((outer, n, inner)).astype(dtype), random.uniform(1, 2, (outer, inner)).astype(dtype)
    for kernel, function in (
        (cpu.add_broadcast, np.add), (cpu.subtract_broadcast, np.subtract), (cpu.multiply_broadcast, np.multiply),
        (cpu.divide_broadcast, np.divide),
    ):  # fmt: skip
        memory = np.full(x.size + 32, 7, dtype)
        kernel(x.reshape(-1), w.reshape(-1), inner, memory[16:-16])
        expected = function(x, w[:, None])
        np.testing.assert_array_equal(memory[16:-16].reshape(x.shape), expected)
        assert (memory[:16] == 7).all() and (memory[-16:] == 7).all()
        own = x.copy().reshape(-1)
        kernel(own, w.reshape(-1), inner, own)  # in place
        np.testing.assert_array_equal(own.reshape(x.shape), expected)


def test_a_small_operand_is_not_written_as_a_large_array() -> None:
    image, channels, pixels = (Tensor(np.ones(shape, np.float32)) for shape in ((2, 3, 5), (5,), (2, 3, 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minidl.ops.elementwise.broadcast_to", lambda x, shape: x if x.shape == shape else pytest.fail())
        for op in ARITHMETIC:
            op(image, channels)
            op(image, pixels)
        assert ((channels + image) * (pixels * image)).shape == image.shape


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, 0.5, 2.5, -1.5])
def test_power(exponent: float) -> None:
    check_op(lambda x: x**exponent, None, positive)


def test_power_of_negative_numbers_and_zero() -> None:
    x = np.array([-2.0, -0.5, 0.0, 3.0])
    for exponent in (0, 1, 2, 3):
        check_op(lambda x: x**exponent, None, x)  # noqa: B023
    assert np.isnan((Tensor([-2.0]) ** 0.5).item())
    with pytest.raises(ShapeError, match="must be a number"):
        Tensor([2.0]) ** Tensor([2.0])  # type: ignore[operator]


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "abs"])
def test_functions(name: str) -> None:
    check_op(lambda x: getattr(x, name)(), None, positive)
    check_op(lambda x: getattr(x, name)(), None, np.array(0.7))


def test_negative() -> None:
    check_op(lambda x: -x, None, (3, 5))


def test_absolute_value_has_slope_0_at_0() -> None:
    check_op(lambda x: x.abs(), None, np.array([-2.0, 0, -0.0, 3]), differences=False)


def test_maximum() -> None:
    maximum = lambda a, b: torch.maximum(a, b)  # noqa: E731
    check_op(ops.maximum, maximum, (3, 1, 5), (4, 1))
    check_op(lambda x: ops.maximum(x, 0.1), lambda x: torch.clamp(x, min=0.1), (3, 7))


def test_equal_elements_share_the_gradient_of_a_maximum() -> None:
    maximum = lambda a, b: torch.maximum(a, b)  # noqa: E731
    check_op(ops.maximum, maximum, np.array([1.0, 2, 3]), np.array([1.0, 2.5, 3]), differences=False)


def test_division_by_zero_is_infinite_and_not_an_error() -> None:
    y = Tensor([1.0, -1.0, 0.0]) / Tensor([0.0, 0.0, 0.0])
    np.testing.assert_array_equal(y.numpy(), [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum"])
def test_shapes_that_do_not_broadcast_are_both_named(name: str) -> None:
    with pytest.raises(ShapeError, match=rf"{name}: shapes \(3, 4\) and \(3, 5\)"):
        getattr(ops, name)(Tensor(np.zeros((3, 4))), Tensor(np.zeros((3, 5))))


def test_float32_and_float64_do_not_mix() -> None:
    a, b = Tensor(np.zeros(3, np.float32)), Tensor(np.zeros(3))
    for add in (lambda: a + b, lambda: b + a):
        with pytest.raises(ShapeError, match=r"float(32|64) on cpu and .* convert one with x\.astype\('float32'\)"):
            add()
    assert (a.astype("float64") + b).dtype == np.float64


def test_devices_do_not_mix() -> None:
    with pytest.raises(ShapeError, match="on cpu and float64 on reference"):
        Tensor(np.zeros(3)) * Tensor(np.zeros(3), device="reference")
