"""Saving and loading the weights of modules: `state_dict` and `load_state_dict`."""

from __future__ import annotations

import numpy as np
import pytest
from nn_helper import BUFFERS, NAMES, Net, images

import minidl
from minidl.errors import CheckpointError


@pytest.fixture
def net() -> Net:
    minidl.seed(0)
    return Net()


def test_state_dict_has_pytorch_shapes_and_is_a_copy(net: Net) -> None:
    state = net.state_dict()
    assert list(state) == NAMES + BUFFERS
    assert state["layer1.0.conv2.weight"].shape == (6, 2, 3, 1)  # (out, in / groups, kh, kw)
    assert state["fc.weight"].shape == (5, 12)
    assert all(array.flags.c_contiguous for array in state.values())
    weight = net.fc.weight
    np.testing.assert_array_equal(state["fc.weight"][3, 7], weight.data[7, 3])
    state["fc.weight"][:] = 7
    assert not (weight.data == 7).any()


def changed(state: dict[str, np.ndarray], **other: np.ndarray) -> dict[str, np.ndarray]:
    return {**state, **{name.replace("__", "."): value for name, value in other.items()}}


def test_load_state_dict_accepts_the_result_of_state_dict(net: Net) -> None:
    minidl.seed(1)
    other = Net()
    x = images(3, 9, 6, 3)
    for _ in range(3):
        other(x)  # changes the running statistics
    assert (other.eval()(x).numpy() != net.eval()(x).numpy()).any()
    net.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(net(x).numpy(), other(x).numpy())


@pytest.mark.parametrize(
    ("change", "drop", "message"),
    [
        ({}, "fc.weight", "no values for fc.weight"),
        ({"fc__weigth": np.zeros((5, 12))}, "fc.weight", "no values for fc.weight: .* Did you mean 'fc.weigth'"),
        ({"head__weight": np.zeros(3)}, None, "head.weight unknown to this model"),
        ({"fc__weight": np.zeros((12, 5))}, None, r"fc.weight is float64 \(12, 5\); expected floats \(5, 12\)"),
        ({"fc__bias": np.zeros(5, np.int64)}, None, r"fc.bias is int64 \(5,\); expected floats \(5,\)"),
    ],
)
def test_load_state_dict_that_does_not_fit_changes_nothing(
    net: Net, change: dict[str, np.ndarray], drop: str | None, message: str
) -> None:
    before = net.state_dict()
    state = changed({name: value + 1 for name, value in before.items() if name != drop}, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        net.load_state_dict(state)
    assert "\n" not in str(caught.value)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_load_state_dict_names_three_of_many_missing_weights(net: Net) -> None:
    with pytest.raises(CheckpointError, match=r"scale, layer1.0.conv1.weight, layer1.0.bn.weight and 7 more"):
        net.load_state_dict({})


def test_load_state_dict_ignores_num_batches_tracked(net: Net) -> None:
    state = {**net.state_dict(), "layer1.0.bn.num_batches_tracked": np.array(3)}
    state["fc.bias"] = np.arange(5.0)
    net.load_state_dict(state)
    np.testing.assert_array_equal(net.fc.bias.data, np.arange(5))


def test_load_state_dict_not_strict_loads_matching_names(net: Net) -> None:
    before = net.state_dict()
    net.load_state_dict({"fc.bias": np.arange(5.0), "head.weight": np.zeros(3)}, strict=False)
    np.testing.assert_array_equal(net.fc.bias.data, np.arange(5))
    np.testing.assert_array_equal(net.state_dict()["fc.weight"], before["fc.weight"])
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        net.load_state_dict({"fc.bias": np.zeros(6)}, strict=False)
