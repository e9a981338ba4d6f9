"""The tensor: how it is created, how Python and NumPy use it, its data and its gradient."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest

from minidl import ops
from minidl.engine.autograd import GraphError
from minidl.engine.device import Device
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, ShapeError


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float64), requires_grad=True)


def test_only_arrays_of_float64_stay_float64() -> None:
    for data in ([1.0], [1], 1.0, 1, [np.float64(1)], np.float64(1), [np.ones(2)], np.ones(2, int)):
        assert Tensor(data).dtype == np.float32, data
    for data in (np.ones(2), np.array(1.0), Tensor(np.ones(2)), Parameter(np.ones(2))):
        assert Tensor(data).dtype == np.float64, data


def test_a_tensor_shares_the_memory_of_its_array() -> None:
    for array in (np.zeros(3), np.zeros(3, np.float32)):
        x = Tensor(array)
        array[1] = 7
        np.testing.assert_array_equal(x.numpy(), [0, 7, 0])


def test_a_tensor_in_python_and_numpy_functions() -> None:
    x = Tensor([[1.0, 2, 3], [4, 5, 6]], requires_grad=True)
    rows = list(x)
    assert [row.shape for row in rows] == [(3,), (3,)] and rows[1].numpy().tolist() == [4, 5, 6]
    sum(rows).sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones((2, 3)))
    assert float(Tensor([4.5])) == float(Tensor(4.5)) == 4.5
    with pytest.raises(ShapeError, match="not a single number"):
        float(x)
    with pytest.raises(TypeError, match="without axes has no length"):
        list(Tensor(1.0))
    assert np.asarray(x) is not x and np.asarray(x).dtype == np.float32 and np.shares_memory(np.asarray(x), x.numpy())
    assert np.array(x, np.float64).dtype == np.float64
    with pytest.raises(TypeError, match="ufunc"):
        np.sqrt(x)
    assert isinstance(np.ones(3) + x, Tensor) and isinstance(np.float64(2) * x, Tensor)


def test_comparisons_are_elementwise() -> None:
    x = Tensor(np.array([[1.0, 2, 3], [4, 5, 0.1]], np.float32), requires_grad=True)
    values = x.numpy()
    others: list[Any] = [1, 2.5, 0.1, True, np.float32(3), np.float64(0.1), np.arange(3), values, Tensor(values)]
    others += [[1, 2, 3], (4.0, 2.0, 3.0), float("nan"), np.int64(4), 10**12]
    for how in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        for other in others:
            expected = how(values, other.numpy() if isinstance(other, Tensor) else other)
            for found in (how(x, other), how(Parameter(values), other)):
                assert isinstance(found, np.ndarray) and found.dtype == bool and (found == expected).all()
        for other in (1, np.float32(3), values):
            np.testing.assert_array_equal(how(other, x), how(other, values))  # the tensor is the right operand
    assert bool(Tensor(2.0) == 2) and not bool(Tensor(2.0) < 2) and Tensor([3.0]) == Tensor(3.0)
    assert (x[x.numpy()[:, 0] > 2] == x[1:]).all()


def test_comparisons_with_other_things() -> None:
    x = leaf(1.0, 2.0)
    for other in (None, "a", object(), {}):
        assert (x == other) is False and (x != other) is True
        with pytest.raises(TypeError, match="not supported between"):
            x < other  # noqa: B015
    for wrong in (np.ones(3), Tensor(np.ones((3, 3))), [1, 2, 3], [[1], [2, 3]], ["a", "b"], np.array([1j, 2])):
        with pytest.raises(ShapeError, match=r"a tensor of shape \(2,\) cannot be compared with"):
            x == wrong  # noqa: B015


def test_a_tensor_as_a_condition() -> None:
    assert Tensor(3.0) and Tensor([[-1.0]]) and not Tensor(0.0)
    for x in (leaf(1.0, 2.0), Tensor(np.ones((0, 3)))):
        with pytest.raises(ShapeError, match=r"is neither true nor false; .* \.any\(\) or \.all\(\)"):
            bool(x)


def test_tensors_are_members_and_keys_by_identity() -> None:
    x, y = leaf(1.0, 2.0), leaf(1.0, 2.0)
    assert len({x, y, x}) == 2 and {x: 1, y: 2}[y] == 2 and x in {x} and y not in {x}
    assert x in [x] and hash(x) != hash(y)
    parameters = [Parameter(np.ones(2)) for _ in range(3)]
    assert parameters == list(parameters) and {p: i for i, p in enumerate(parameters)}[parameters[2]] == 2


def test_a_tensor_as_a_gradient() -> None:
    x = leaf(1.0, 2.0)
    (x * 3).backward(Tensor([1.0, 10.0]))
    np.testing.assert_array_equal(x.grad, [3, 30])
    with pytest.raises(ShapeError, match=r"expected .* N integers"):
        ops.cross_entropy(Tensor(np.zeros((2, 3))), Tensor([0, 1]))


@pytest.mark.parametrize("make", [lambda a: Tensor(a, requires_grad=True), Parameter])
def test_backward_adds_to_an_assigned_gradient(make: object) -> None:
    x = make(np.ones((2, 3)))  # type: ignore[operator]
    x.grad = np.arange(6.0).reshape(3, 2).T  # not contiguous
    (x * 2).sum().backward()
    np.testing.assert_array_equal(x.grad, np.arange(6.0).reshape(3, 2).T + 2)
    x.grad = np.ones((2, 3), np.float32)
    assert x.grad.dtype == np.float64
    with pytest.raises(ShapeError, match=r"grad: an array of shape \(3,\) for a tensor of shape \(2, 3\)"):
        x.grad = np.ones(3)


def test_there_is_one_device_of_each_kind() -> None:
    device = Device("cpu")
    assert device is Device("cpu") is Tensor(1.0).device and device is not Device("reference")
    assert copy.deepcopy(device) is device and pickle.loads(pickle.dumps(device)) is device
    assert (Tensor([1.0], device=device) + Tensor([1.0])).item() == 2
    with pytest.raises(ConfigError, match="unknown device 'gpu': expected one of cpu, reference"):
        Device("gpu")


def test_ops_refuse_arrays() -> None:
    for op in (ops.relu, ops.exp, lambda x: ops.add(x, x), lambda x: ops.add(x, 1.0)):
        with pytest.raises(TypeError, match=r"convert it with Tensor\(array\)") as caught:
            op(np.ones(3))
        assert "\n" not in str(caught.value)


def test_values_that_a_tensor_accepts() -> None:
    assert Tensor([1, 2]).dtype == Tensor(np.ones(2, np.float16)).dtype == Tensor(True).dtype == np.float32
    assert Tensor(np.ones(2)).dtype == np.float64 and Tensor(3).shape == ()
    assert Tensor(np.ones((2, 3)).T).numpy().flags.c_contiguous
    for data in (np.ones(2, complex), ["a"], None):
        with pytest.raises(ShapeError, match="expected floats, integers or booleans"):
            Tensor(data)


def test_attributes_of_a_tensor() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    assert (x.shape, x.ndim, x.size, len(x)) == ((2, 3), 2, 6, 2)
    assert "requires_grad=True" in repr(x) and Tensor([[4.5]]).item() == 4.5
    with pytest.raises(ShapeError, match=r"\(2, 3\) is not a single number"):
        x.item()
    with pytest.raises(TypeError):
        len(Tensor(1.0))


def test_data_can_be_replaced_by_an_array_of_the_same_kind() -> None:
    for x in (Tensor(np.zeros((2, 3))), Parameter(np.zeros((2, 3))), Tensor(np.array(0.0))):
        x.data = np.ones(x.shape, order="F")
        assert x.numpy().flags.c_contiguous and x.numpy().all() and x.numpy().shape == x.shape
        for wrong in (np.ones((*x.shape, 1)), np.ones(x.shape, np.float32)):
            with pytest.raises(ShapeError, match="data: "):
                x.data = wrong


def test_astype_is_for_leaves() -> None:
    x = leaf(1.0)
    assert x.astype(np.float32).requires_grad
    with pytest.raises(GraphError, match="detach"):
        (x * 2).astype(np.float32)
    assert (x * 2).detach().astype(np.float32).dtype == np.float32
    with pytest.raises(ConfigError, match="astype: float16; expected float32 or float64"):
        x.astype(np.float16)
