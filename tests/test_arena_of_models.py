"""The arenas of a model: `flatten`, replaced layers, deep copies, and the arena of statistics."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from arena_helper import loss_of, model

from minidl import nn, optim
from minidl.engine.device import aligned
from minidl.errors import ConfigError, MinidlError


def test_flatten_again_returns_the_same_arena() -> None:
    network = model()
    arena = network.flatten()
    assert network.flatten() is arena is network.arena
    assert optim.SGD(network, lr=0.1).arena is arena


def test_flatten_moves_parameters_out_of_the_arena_of_a_layer() -> None:
    network = model()
    weight = network[4].weight
    part = optim.SGD(network[4].parameters(), lr=0.1)
    weight.grad = np.ones(weight.shape)
    before = network.state_dict()
    arena = network.flatten()
    assert arena is not part.arena and all(parameter.arena is arena for parameter in network.parameters())
    assert all((value == before[name]).all() for name, value in network.state_dict().items())
    assert (weight.grad == 1).all() and np.shares_memory(weight.grad, arena.grad)
    with pytest.raises(ConfigError, match=r"SGD: its parameters have moved to another arena .* build the optimizer"):
        part.step()


def test_flatten_after_replacing_a_layer_builds_a_new_arena() -> None:
    network = model()
    first, old = network.flatten(), network[4]
    loss_of(network).backward()
    gradient = network[0].weight.grad.copy()
    setattr(network, "4", nn.Linear(3 * 5 * 7, 11))
    before = network.state_dict()
    optimizer = optim.SGD(network, lr=0.1)
    assert network.arena is optimizer.arena is not first
    assert all((value == before[name]).all() for name, value in network.state_dict().items())
    np.testing.assert_array_equal(network[0].weight.grad, gradient)
    loss_of(network).backward()
    optimizer.step()
    assert (network[4].weight.data != before["4.weight"].T).any()
    assert old.weight.arena is None
    old.weight.data = np.zeros_like(old.weight.data)  # allowed: the parameter is in no arena
    setattr(network, "1", nn.BatchNorm2d(3))
    network.flatten()
    assert network[1].running_mean.arena is network.statistics
    setattr(network, "1", nn.Identity())
    assert [slot.name for slot in network.flatten().slots] == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert network.statistics is None


@pytest.mark.parametrize("how", ["parameters", "groups"])
def test_an_optimizer_with_parameters_inside_and_outside_the_arena_is_refused(how: str) -> None:
    network = model()
    network.flatten()
    setattr(network, "4", nn.Linear(3 * 5 * 7, 11))
    with pytest.raises(ConfigError, match=r"are not in one arena; .* flatten"):
        optim.SGD(network.parameters() if how == "parameters" else optim.parameter_groups(network), lr=0.1)


def test_only_the_first_flatten_accepts_a_buffer() -> None:
    network = model()
    network.flatten()
    with pytest.raises(MinidlError, match="give the buffer in the first call"):
        network.flatten(aligned(network.arena.size, "float32"))


def test_a_deep_copy_has_a_separate_arena() -> None:
    network = model()
    network.flatten()
    loss_of(network).backward()
    twin = copy.deepcopy(network)
    assert twin.arena is not network.arena and twin.arena.layout_hash == network.arena.layout_hash
    np.testing.assert_array_equal(twin.arena.theta, network.arena.theta)
    np.testing.assert_array_equal(twin.arena.grad, network.arena.grad)
    assert not np.shares_memory(twin.arena.theta, network.arena.theta)
    assert twin.arena.holds(dict(twin.named_parameters())) and twin.statistics.holds(dict(twin.named_buffers()))
    for parameter in twin.parameters():
        assert np.shares_memory(parameter.data, twin.arena.theta) and parameter.device is network[0].weight.device
    before = network.state_dict()
    optim.SGD(twin, lr=0.1).step()
    loss_of(twin)
    assert all((value == before[name]).all() for name, value in network.state_dict().items())
    assert (twin[0].weight.data != network[0].weight.data).any()


def test_deep_copies_of_a_layer_an_optimizer_and_tied_weights() -> None:
    network = model()
    optimizer = optim.SGD(network, lr=0.1, momentum=0.9)
    head = copy.deepcopy(network[4])
    assert head.weight.arena is None and (head.weight.data == network[4].weight.data).all()
    head.weight.data = head.weight.data + 1
    twin, its_optimizer = copy.deepcopy((network, optimizer))
    assert its_optimizer.arena is twin.arena is not network.arena
    for n, o in ((network, optimizer), (twin, its_optimizer)):
        loss_of(n).backward()
        o.step()
    assert (twin.arena.theta == network.arena.theta).all()
    twin[4].weight.grad = np.ones(twin[4].weight.shape)
    its_optimizer.step()
    assert (twin.arena.theta != network.arena.theta).any()
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    tied[0].bias.requires_grad = False
    tied.flatten()
    twin = copy.deepcopy(tied)
    assert twin[1].weight is twin[0].weight and twin[0].weight.torch_axes == (1, 0) and not twin[0].bias.requires_grad


def test_statistics_have_a_separate_arena() -> None:
    network = model()
    arena = network.flatten()
    statistics = network.statistics
    assert statistics is not None and statistics is not arena
    assert [slot.name for slot in statistics.slots] == ["1.running_mean", "1.running_var"]
    np.testing.assert_array_equal(network[1].running_var.data, 1)
    theta = arena.theta.copy()
    loss_of(network)
    assert statistics.theta[:3].any() and (network[1].running_var.data != 1).all()
    assert np.shares_memory(statistics.theta, network[1].running_mean.data)
    np.testing.assert_array_equal(arena.theta, theta)
    assert nn.Linear(3, 4).flatten() is not None and nn.Linear(3, 4).statistics is None
