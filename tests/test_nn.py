"""Modules: names, tied weights, training and evaluation mode, errors that name the layer, and conversion to float64."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from nn_helper import BUFFERS, NAMES, Net, Tied, images

import minidl
from minidl import Tensor, nn, ops
from minidl.errors import ConfigError, MinidlError, ShapeError


@pytest.fixture
def net() -> Net:
    minidl.seed(0)
    return Net()


# Names


def test_names_in_order_of_assignment(net: Net) -> None:
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert [name for name, _ in net.named_buffers()] == BUFFERS
    assert [name for name, _ in net.named_modules()][:4] == ["", "layer1", "layer1.0", "layer1.0.conv1"]
    assert [name for name, _ in net.named_children()] == ["layer1", "flatten", "fc"]
    assert [id(p) for p in net.parameters()] == [id(p) for _, p in net.named_parameters()]


def test_modules_in_attributes_with_the_names_of_methods(net: Net) -> None:
    """`self.flatten = nn.Flatten()` hides Module.flatten: the optimizer must still put the parameters into an arena."""
    assert net(images(2, 9, 6, 3)).shape == (2, 5)
    optimizer = minidl.optim.build("sgd", net, lr=0.1)
    assert net.arena is optimizer.arena and net.fc.weight.arena is net.arena
    before = net.fc.bias.data.copy()
    net(images(2, 9, 6, 3)).sum().backward()
    optimizer.step()
    assert (net.fc.bias.data != before).all()


def test_sequential_has_a_length_and_items() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert len(model) == 3 and isinstance(model[1], nn.ReLU) and model[-1].weight.shape == (4, 2)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(nn.Sequential()) == 0


def test_module_list_is_a_list_whose_modules_are_found() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            self.layers = nn.ModuleList(nn.Linear(3, n) for n in (2, 4))
            self.layers.append(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return ops.concat([layer(x) for layer in self.layers], axis=-1)

    model = Branches()
    assert list(model.state_dict()) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert len(model.layers) == 3 and isinstance(model.layers[-1], nn.Identity)
    assert model(images(5, 3)).shape == (5, 9)


def test_append_after_a_module_was_deleted() -> None:
    layers = nn.ModuleList(nn.Linear(2, n) for n in (3, 4, 5))
    delattr(layers, "0")
    layers.append(nn.Linear(2, 6))
    assert [layer.weight.shape[1] for layer in layers] == [4, 5, 6]


def test_a_module_without_forward_raises_an_error() -> None:
    class Empty(nn.Module):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has no forward\(\)"):
        Empty()(images(2, 3))


# Tied weights


def test_tied_weights_are_one_parameter_under_two_names() -> None:
    minidl.seed(0)
    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["first.weight", "first.bias", "second.bias"]
    state = model.state_dict()
    assert list(state) == ["first.weight", "first.bias", "second.weight", "second.bias"]  # as in PyTorch
    arena = nn.Module.flatten(model)
    assert [slot.name for slot in arena.slots] == ["first.weight", "first.bias", "second.bias"]
    assert model.second.weight is model.first.weight
    other = Tied()
    other.load_state_dict(state)
    np.testing.assert_array_equal(other(images(3, 5)).numpy(), model(images(3, 5)).numpy())


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_uses() -> None:
    minidl.seed(0)
    model = Tied().astype(np.float64)
    apart = Tied().astype(np.float64)
    apart.second.weight = nn.Parameter(np.zeros((5, 5)), torch_axes=(1, 0))
    apart.load_state_dict(model.state_dict())
    x = images(3, 5).astype(np.float64)
    nn.Module.flatten(model)
    for network in (model, apart):
        network(x).sum().backward()
    expected = apart.first.weight.grad + apart.second.weight.grad
    np.testing.assert_allclose(model.first.weight.grad, expected, rtol=1e-12)


# Training and evaluation


def test_train_and_eval_reach_every_module(net: Net) -> None:
    assert all(module.training for _, module in net.named_modules())
    assert net.eval() is net
    assert not any(module.training for _, module in net.named_modules())
    net.layer1.train()
    assert [name for name, module in net.named_modules() if module.training] == [
        name for name, _ in net.named_modules() if name.startswith("layer1")
    ]


def test_batch_norm_updates_its_statistics_only_in_training(net: Net) -> None:
    x = images(4, 9, 6, 3)
    before = net.state_dict()["layer1.0.bn.running_mean"]
    net.eval()(x)
    np.testing.assert_array_equal(net.layer1[0].bn.running_mean.data, before)
    net.train()(x)
    y = net.layer1[0].conv1(x).numpy().reshape(-1, 4)
    np.testing.assert_allclose(net.layer1[0].bn.running_mean.data, 0.1 * y.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(net.layer1[0].bn.running_var.data, 0.9 + 0.1 * y.var(0, ddof=1), rtol=1e-5)


def test_dropout_draws_from_a_sequence_that_can_be_resumed() -> None:
    layer, x = nn.Dropout(0.25), Tensor(np.ones((100, 101), np.float32))
    assert layer.eval()(x) is x
    layer.train()
    nn.seed(3)
    first = layer(x).numpy()
    state = nn.random_state()
    second = layer(x).numpy()
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert abs((first == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.size)
    assert (first != second).any()
    nn.set_random_state(state)
    np.testing.assert_array_equal(layer(x).numpy(), second)
    nn.seed(3)
    np.testing.assert_array_equal(layer(x).numpy(), first)


# Errors


def test_a_shape_error_names_both_shapes_and_the_layer(net: Net) -> None:
    with pytest.raises(ShapeError) as caught:
        net(images(2, 9, 6, 5))
    assert str(caught.value).startswith(
        "layer layer1.0.conv1, Conv2d(3, 4, 3x3, padding=1, bias=False): conv2d: images (2, 9, 6, 5) for a weight "
        "(3, 3, 3, 4)"
    )
    with pytest.raises(ShapeError, match=re.escape("layer fc, Linear(12, 5): linear: input (2, 24)")):
        net(images(2, 9, 9, 3))
    assert "\n" not in str(caught.value)


def test_a_shape_error_of_a_layer_alone_and_in_the_forward_of_a_model() -> None:
    with pytest.raises(ShapeError, match=re.escape("Linear(3, 4): linear: input (2, 5)")):
        nn.Linear(3, 4)(images(2, 5))

    class Adds(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(x)

    with pytest.raises(ShapeError) as caught:
        nn.Sequential(nn.Identity(), Adds())(images(2, 5))
    assert str(caught.value).startswith("layer 1, Adds: ")
    assert "(2, 5)" in str(caught.value) and "(2, 4)" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.Conv2d(4, 3, 3, groups=2),
        lambda: nn.Conv2d(4, 4, 3, groups=0),
    ],
)
def test_layers_refuse_channels_that_do_not_fit(make: object) -> None:
    with pytest.raises(ShapeError):
        make()  # type: ignore[operator]


class Slotted(nn.Module):
    __slots__ = ("layer",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Dropout(1.0), "p = 1.0; expected 0 <= p < 1"),
        (lambda: nn.Dropout(-0.1), "p = -0.1; expected 0 <= p < 1"),
        (lambda: nn.Conv2d(3, 4, 3, padding="same"), "padding='same'; expected a number of pixels"),
        (lambda: nn.CrossEntropyLoss(label_smoothing=1.0)(images(3, 4), np.zeros(3, int)), "label_smoothing 1.0"),
        (lambda: nn.Linear(3, 4).astype(np.float16), "astype: float16; expected float32 or float64"),
        (lambda: setattr(nn.Module(), "arena", nn.Linear(3, 4)), "Module.arena: this name is reserved"),
        (lambda: setattr(nn.Module(), "training", nn.Parameter(np.ones(3))), "Module.training: this name is reserved"),
        (lambda: setattr(nn.Module(), "layers", [nn.ReLU()]), r"Module.layers: .* plain list .*: use nn\.ModuleList"),
        (lambda: setattr(nn.Module(), "layers", (nn.Parameter(np.ones(3)),)), "an attribute for each"),
        (lambda: setattr(nn.Module(), "built_for", nn.Linear(3, 4)), "Module.built_for: this name is reserved"),
        (lambda: nn.Sequential([nn.ReLU()]), "Sequential: a list among its modules; expected nn.Module"),
        (lambda: nn.Sequential(nn.Linear(3, 4), ops.relu), "Sequential: a function among its modules"),
        (lambda: nn.ModuleList([nn.ReLU(), None]), "ModuleList: None among its modules"),
        (lambda: nn.ModuleList(nn.Sequential(nn.ReLU())), "ModuleList: a Sequential; expected a list of modules"),
        (lambda: setattr(Slotted(), "layer", nn.ReLU()), r"Slotted\.layer: modules in __slots__ are not found"),
        (lambda: type("Shares", (nn.Module,), {"fc": nn.Linear(3, 4)}), r"Shares\.fc: modules of a class are not"),
        (lambda: type("Shares", (nn.Module,), {"of": [{1: (nn.Linear(3, 4),)}]}), r"Shares\.of: modules of a class"),
    ],
)
def test_wrong_values_are_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_modules_appended_to_a_plain_list_are_refused() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            self.layers: list[nn.Module] = []
            self.layers.append(nn.Linear(3, 4))

    with pytest.raises(ConfigError, match=r"Appends\.layers: .*: use nn\.ModuleList"):
        minidl.optim.SGD(Appends(), lr=0.1)


# Float64


def test_astype_converts_parameters_and_buffers(net: Net) -> None:
    before = net.state_dict()
    assert net.astype(np.float64) is net
    assert {value.dtype for value in net.state_dict().values()} == {np.dtype(np.float64)}
    assert all((net.state_dict()[name] == value).all() for name, value in before.items())
    y = net(images(2, 9, 6, 3).astype(np.float64))
    assert y.dtype == np.float64
    y.sum().backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {np.dtype(np.float64)}
    nn.Module.flatten(net)
    with pytest.raises(ShapeError, match=r"scale is in an arena already; convert before flatten"):
        net.astype(np.float32)


def test_mixed_types_are_refused(net: Net) -> None:
    with pytest.raises(MinidlError, match=r"float64 .* float32 .* do not mix"):
        net(images(2, 9, 6, 3).astype(np.float64))
