"""Ops that only move elements, on independent tensors and on parameters that are views into an arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ops_helper import check_op, torch

from minidl import ops
from minidl.engine.arena import Arena
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError

Op = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("shape", [(15,), (5, 3), (3, -1), (1, 3, 1, 5), (-1,)])
def test_reshape(shape: tuple[int, ...]) -> None:
    check_op(lambda x: x.reshape(*shape), None, (3, 5))


def test_reshape_of_no_elements_and_of_one() -> None:
    assert Tensor(np.zeros((0, 3))).reshape(-1, 5).shape == (0, 5)
    assert Tensor(np.zeros((1, 1))).reshape().shape == ()
    assert Tensor(np.zeros((2, 3))).reshape((3, 2)).shape == (3, 2)


@pytest.mark.parametrize("shape", [(4, 4), (-1, 4), (-1, -1), (-3, -5), (0, -1)])
def test_reshape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="reshape: "):
        Tensor(np.zeros((3, 5))).reshape(*shape)


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (-1, 0, -2), (1, 0, 2)])
def test_transpose(axes: tuple[int, ...]) -> None:
    check_op(lambda x: ops.transpose(x, axes), lambda x: x.permute(axes), (2, 3, 5))
    assert Tensor(np.zeros((2, 3, 5))).transpose(axes).shape == Tensor(np.zeros((2, 3, 5))).transpose(*axes).shape


def test_transpose_reverses_the_axes() -> None:
    check_op(lambda x: x.T, lambda x: x.permute(2, 1, 0), (2, 3, 5))
    assert Tensor(1.0).T.shape == ()


@pytest.mark.parametrize("axes", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, -4), (0, 4, 2)])
def test_transpose_needs_a_permutation(axes: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"not a permutation of the axes of \(2, 3, 5\)"):
        Tensor(np.zeros((2, 3, 5))).transpose(*axes)


@pytest.mark.parametrize(
    ("shape", "to"), [((3, 1), (3, 5)), ((5,), (2, 3, 5)), ((1, 3, 1), (2, 3, 4)), ((), (2, 3)), ((3, 1, 2), (3, 0, 2))]
)
def test_broadcast_to(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    check_op(lambda x: ops.broadcast_to(x, to), lambda x: x.broadcast_to(to), shape)


@pytest.mark.parametrize("to", [(3,), (3, 4), (5, 3), (1, 5)])
def test_broadcast_to_a_shape_that_does_not_fit(to: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"broadcast_to: \(3, 5\)"):
        ops.broadcast_to(Tensor(np.zeros((3, 5))), to)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_flatten(start: int) -> None:
    check_op(lambda x: ops.flatten(x, start), lambda x: torch.flatten(x, start), (2, 3, 5))


def test_flatten_of_images_has_the_order_of_pytorch() -> None:
    check_op(ops.flatten, lambda x: x.permute(0, 3, 1, 2).flatten(1), (2, 3, 5, 4))


KEYS: list[Any] = [
    2,
    -1,
    (slice(None), 1),
    (2, 3, 1),  # every axis
    (-1, -2, -1),
    (Ellipsis, 0),
    (None, slice(1, None), Ellipsis, None),
    slice(1, 3),
    slice(None, None, 2),
    (slice(None), slice(4, 1, -2), slice(None, None, -1)),
    (slice(None, None, -3), 1, slice(-2, None)),
    slice(3, 3),  # empty
    (slice(None), slice(5, 1)),
    np.int64(1),
    Ellipsis,
    (),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_index(key: Any) -> None:
    places = np.array(np.arange(60).reshape(4, 5, 3)[key])  # flat indices, because PyTorch has no negative steps
    check_op(lambda x: x[key], lambda x: x.reshape(-1)[torch.from_numpy(places)], (4, 5, 3))


@given(st.data())
def test_any_key_that_numpy_takes(data: st.DataObject) -> None:
    shape = data.draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    key = data.draw(npst.basic_indices(shape, allow_newaxis=True))
    array = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    x = Tensor(array, requires_grad=True)
    y = x[key]
    np.testing.assert_array_equal(y.numpy(), array[key], strict=True)
    y.backward(np.asarray(array[key]))  # since dL/dy is y, dL/dx is x for the selected elements and 0 for the others
    expected = np.zeros(shape)
    expected[key] = array[key]
    np.testing.assert_array_equal(x.grad, expected, strict=True)


@pytest.mark.parametrize(
    "key", [4, (0, 5), (0, 0, 0, 0), True, (slice(None), False), 1.0, "a", slice(0, 2, 0), (0, [1])]
)
def test_keys_that_are_not_supported(key: Any) -> None:
    with pytest.raises(ShapeError, match="index: "):
        Tensor(np.zeros((4, 5, 3)))[key]


@pytest.mark.parametrize("rows", [[1, 1, 3], [-1, 0, -4], [[0, 2], [3, 0], [1, 1]], [2], np.zeros(0, int), 3])
def test_take(rows: Any) -> None:
    check_op(lambda x: ops.take(x, rows), lambda x: x[torch.as_tensor(np.asarray(rows))], (4, 3, 2))
    check_op(lambda x: ops.take(x, rows), lambda x: x[torch.as_tensor(np.asarray(rows))], (4,))


def test_index_with_an_array_of_rows_or_a_mask() -> None:
    for key in (np.array([2, 0, 2]), np.array([True, False, True, True]), np.zeros(4, bool)):
        check_op(lambda x: x[key], lambda x: x[torch.from_numpy(key)], (4, 3))  # noqa: B023
    check_op(lambda x: x[[0, -1]], None, (4, 3))


def test_rows_out_of_range() -> None:
    x = Tensor(np.zeros((4, 3)))
    for rows in ([4], [-5], [0.0], np.zeros(3, bool)):
        with pytest.raises(ShapeError, match=r"(take|index): .*\(4, 3\)"):
            x[np.asarray(rows)]
    with pytest.raises(ShapeError, match="take"):
        ops.take(Tensor(1.0), [0])


def test_rows_of_empty_arrays() -> None:
    assert ops.take(Tensor(np.zeros((0, 3))), np.zeros(0, int)).shape == (0, 3)
    assert ops.take(Tensor(np.zeros((4, 0))), [1, 2, 1]).shape == (3, 0)


@pytest.mark.parametrize("value", [0.0, -1.5])
def test_pad(value: float) -> None:
    check_op(
        lambda x: ops.pad(x, [(1, 2), (0, 3)], value),
        lambda x: torch.nn.functional.pad(x, (0, 3, 1, 2), value=value),
        (3, 5),
    )
    check_op(lambda x: ops.pad(x, [(0, 0)], value), lambda x: x.clone(), (5,))


@pytest.mark.parametrize("widths", [[(1, 1)], [(1, -1), (0, 0)], [(0, 0)] * 3])
def test_widths_that_do_not_fit(widths: list[tuple[int, int]]) -> None:
    with pytest.raises(ShapeError, match=r"pad: .*\(3, 5\)"):
        ops.pad(Tensor(np.zeros((3, 5))), widths)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis: int) -> None:
    shapes = [[2, 3, 4] for _ in range(3)]
    for i, length in enumerate((5, 0, 1)):
        shapes[i][axis] = length
    inputs = [tuple(shape) for shape in shapes]
    check_op(lambda *x: ops.concat(x, axis), lambda *x: torch.cat(x, axis), *inputs)


def test_concat_of_one_tensor_with_itself_and_alone() -> None:
    check_op(lambda x: ops.concat([x, x]), lambda x: torch.cat([x, x]), (3, 2))
    check_op(lambda x: ops.concat([x]), lambda x: x.clone(), (3, 2))


@pytest.mark.parametrize(
    ("shapes", "axis"), [([], 0), ([(2, 3), (2, 4)], 0), ([(2, 3), (2, 3)], 2), ([(2,), (2, 1)], 0)]
)
def test_concat_of_shapes_that_do_not_fit(shapes: list[tuple[int, ...]], axis: int) -> None:
    with pytest.raises(ShapeError, match="concat: "):
        ops.concat([Tensor(np.zeros(shape)) for shape in shapes], axis)


IN_AN_ARENA: dict[str, Op] = {
    "transpose": lambda x: x.T,
    "slice": lambda x: x[::-2, 1:],
    "one number": lambda x: x[1, 2],
    "take": lambda x: ops.take(x, [2, 0, 2]),
    "pad": lambda x: ops.pad(x, [(1, 0), (2, 1)]),
    "concat": lambda x: ops.concat([x[:2], x, x[:1]]),
    "broadcast": lambda x: ops.broadcast_to(x, (2, 3, 5)),
    "reshape": lambda x: x.reshape(5, 3),
    "sum": lambda x: x.sum(0),
}


@pytest.mark.parametrize("name", IN_AN_ARENA)
def test_ops_on_views_into_an_arena(name: str) -> None:
    """Each op has the same result and gradient as for an independent array; it reads and writes no other parameter."""
    op = IN_AN_ARENA[name]
    array = np.random.default_rng(0).standard_normal((3, 5))
    alone = Tensor(array, requires_grad=True)
    parameters = {
        "before": Parameter(np.full(7, np.nan)),
        "w": Parameter(array),
        "after": Parameter(np.full(7, np.nan)),
    }
    arena = Arena(parameters)
    before = arena.theta.copy()

    expected, found = op(alone), op(parameters["w"])
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    dy = np.random.default_rng(1).standard_normal(found.shape)
    for y in (expected, found):
        y.backward(dy)

    slot = arena.slots[1]
    np.testing.assert_array_equal(arena.view(arena.grad, slot), alone.grad)
    assert np.count_nonzero(arena.grad) == np.count_nonzero(arena.grad[slot.start : slot.stop])
    np.testing.assert_array_equal(arena.theta, before)
