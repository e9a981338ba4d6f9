"""Modules: their names, their weights in and out, what they print, and where an error says it happened."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import minidl
from minidl import Tensor, nn, ops
from minidl.errors import CheckpointError, ConfigError, MinidlError, ShapeError


class Pair(nn.Module):
    """Two convolutions with batch norm between them, in a module of its own."""

    def __init__(self) -> None:
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0), groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(ops.relu(self.bn(self.conv1(x))))


class Net(nn.Module):
    """Parameters of its own, modules inside modules, and names that Module uses for methods."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(np.ones(1, np.float32))
        self.layer1 = nn.Sequential(Pair(), nn.GELU(), nn.MaxPool2d(2))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.layer1(x) * self.scale))


class Tied(nn.Module):
    """An encoder whose second half is the first one's weight again."""

    def __init__(self) -> None:
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ops.tanh(self.first(x)))


NAMES = [
    "scale",
    "layer1.0.conv1.weight",
    "layer1.0.bn.weight",
    "layer1.0.bn.bias",
    "layer1.0.conv2.weight",
    "layer1.0.conv2.bias",
    "fc.weight",
    "fc.bias",
]
BUFFERS = ["layer1.0.bn.running_mean", "layer1.0.bn.running_var"]


@pytest.fixture
def net() -> Net:
    minidl.seed(0)
    return Net()


def images(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


# Names


def test_names_in_order_of_assignment(net: Net) -> None:
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert [name for name, _ in net.named_buffers()] == BUFFERS
    assert [name for name, _ in net.named_modules()][:4] == ["", "layer1", "layer1.0", "layer1.0.conv1"]
    assert [name for name, _ in net.named_children()] == ["layer1", "flatten", "fc"]
    assert [id(p) for p in net.parameters()] == [id(p) for _, p in net.named_parameters()]


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


def test_modules_in_attributes_with_the_names_of_methods(net: Net) -> None:
    """`self.flatten = nn.Flatten()` is what people write; optimizers must still find the arena."""
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


def test_a_module_without_forward_says_so() -> None:
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


def test_batch_norm_keeps_statistics_in_training_only(net: Net) -> None:
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


# Text


def test_repr_nests(net: Net) -> None:
    assert repr(net.layer1).splitlines() == [
        "Sequential(",
        "  (0): Pair(",
        "    (conv1): Conv2d(3, 4, 3x3, padding=1, bias=False)",
        "    (bn): BatchNorm2d(4)",
        "    (conv2): Conv2d(4, 6, 3x1, stride=2, padding=(1, 0), groups=2)",
        "  )",
        "  (1): GELU()",
        "  (2): MaxPool2d(2)",
        ")",
    ]


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Linear(3, 4), "Linear(3, 4)"),
        (nn.Linear(3, 4, bias=False), "Linear(3, 4, bias=False)"),
        (nn.Conv2d(3, 4, (5, 3), 1, (2, 1), dilation=2), "Conv2d(3, 4, 5x3, padding=(2, 1), dilation=2)"),
        (nn.Dropout(0.3), "Dropout(0.3)"),
        (nn.LayerNorm(7), "LayerNorm(7)"),
        (nn.LeakyReLU(), "LeakyReLU(0.01)"),
        (nn.GlobalAvgPool2d(), "GlobalAvgPool2d()"),
    ],
)
def test_repr_of_a_layer(layer: nn.Module, text: str) -> None:
    assert repr(layer) == text


def test_summary_counts_parameters_and_flops(net: Net) -> None:
    net.layer1.eval()  # a mixed state, which the summary must leave as it was
    before = [module.training for _, module in net.named_modules()]
    statistics = net.state_dict()
    lines = net.summary((9, 6, 3)).splitlines()
    conv1, conv2, fc = 2 * (9 * 6 * 4) * (3 * 3 * 3), 2 * (5 * 3 * 6) * (3 * 1 * 2), 2 * 5 * 12
    row = {line.split()[0]: line.split()[-2:] for line in lines[1:-1]}
    assert row == {
        "layer1.0.conv1": ["108", f"{conv1:,}"],
        "layer1.0.bn": ["8", "0"],
        "layer1.0.conv2": ["42", f"{conv2:,}"],
        "layer1.1": ["0", "0"],
        "layer1.2": ["0", "0"],
        "flatten": ["0", "0"],
        "fc": ["65", f"{fc:,}"],
        "scale": ["1", "0"],  # belongs to no layer
    }
    assert "(9, 6, 4)" in lines[1] and "Conv2d(3, 4, 3x3, padding=1, bias=False)" in lines[1]
    total = 108 + 8 + 42 + 65 + 1
    assert lines[-1] == f"{total} parameters, {conv1 + conv2 + fc:,} FLOPs for one input of (9, 6, 3)"
    assert [module.training for _, module in net.named_modules()] == before
    assert all((net.state_dict()[name] == value).all() for name, value in statistics.items())


def test_summary_of_an_input_that_does_not_fit_changes_nothing(net: Net) -> None:
    with pytest.raises(ShapeError, match=r"layer layer1\.0\.conv1"):
        net.summary((9, 6, 2))
    assert all(module.training for _, module in net.named_modules())
    net.summary((9, 6, 3))  # nobody watches any more, or this would fill the table twice


def test_summary_of_a_float64_model_and_of_tied_weights() -> None:
    lines = Tied().astype(np.float64).summary((5,)).splitlines()
    assert lines[-1] == "35 parameters, 100 FLOPs for one input of (5,)"


def test_summary_of_a_layer_used_twice_counts_it_once_and_names_both_places() -> None:
    layer = nn.Linear(5, 5)
    lines = nn.Sequential(layer, nn.ReLU(), layer).summary((5,)).splitlines()
    assert [line.startswith("0, 2 ") for line in lines[1:-1]] == [True, False, True]
    assert [line.split()[-2:] for line in lines[1:-1]] == [["30", "50"], ["0", "0"], ["0", "50"]]
    assert lines[-1].startswith("30 parameters, 100 FLOPs")


def test_summary_where_no_layer_is_called() -> None:
    class Bypassed(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.fc.weight

    lines = Bypassed().summary((5,)).splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [["fc.weight", "Parameter"], ["fc.bias", "Parameter"]]
    assert lines[-1].startswith("24 parameters, 0 FLOPs")
    assert nn.Sequential(nn.Sequential(nn.ReLU()), nn.ModuleList()).eval()[0].summary((5,)).endswith("(5,)")


def test_watching_sees_each_output_innermost_first(net: Net) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    x = images(2, 9, 6, 3)
    with nn.watching(lambda module, y: seen.append((type(module).__name__, y.shape))):
        net(x)
    assert [name for name, _ in seen] == [
        "Conv2d", "BatchNorm2d", "Conv2d", "Pair", "GELU", "MaxPool2d", "Sequential", "Flatten", "Linear", "Net"
    ]  # fmt: skip
    assert seen[0][1] == (2, 9, 6, 4) and seen[-1][1] == (2, 5)
    net(x)
    assert len(seen) == 10


def test_watching_ends_with_an_error(net: Net) -> None:
    calls: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), nn.watching(lambda module, y: calls.append(module)):
        raise ZeroDivisionError
    net(images(2, 9, 6, 3))
    assert not calls


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
    ],
)
def test_wrong_values_are_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_modules_appended_to_a_plain_list_are_noticed() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            self.layers: list[nn.Module] = []
            self.layers.append(nn.Linear(3, 4))

    with pytest.raises(ConfigError, match=r"Appends\.layers: .*: use nn\.ModuleList"):
        minidl.optim.SGD(Appends(), lr=0.1)


def test_initial_weights_of_a_bias_have_no_fans() -> None:
    with pytest.raises(ShapeError, match=r"a parameter of shape \(4,\) has no fan_in"):
        nn.init.xavier_uniform(nn.Linear(3, 4).bias)


# Weights in


def changed(state: dict[str, np.ndarray], **other: np.ndarray) -> dict[str, np.ndarray]:
    return {**state, **{name.replace("__", "."): value for name, value in other.items()}}


def test_load_state_dict_takes_what_state_dict_gives(net: Net) -> None:
    minidl.seed(1)
    other = Net()
    x = images(3, 9, 6, 3)
    for _ in range(3):
        other(x)  # running statistics that are not the initial ones
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


def test_load_state_dict_names_three_of_many(net: Net) -> None:
    with pytest.raises(CheckpointError, match=r"scale, layer1.0.conv1.weight, layer1.0.bn.weight and 7 more"):
        net.load_state_dict({})


def test_load_state_dict_ignores_num_batches_tracked(net: Net) -> None:
    state = {**net.state_dict(), "layer1.0.bn.num_batches_tracked": np.array(3)}
    state["fc.bias"] = np.arange(5.0)
    net.load_state_dict(state)
    np.testing.assert_array_equal(net.fc.bias.data, np.arange(5))


def test_load_state_dict_not_strict_takes_what_is_there(net: Net) -> None:
    before = net.state_dict()
    net.load_state_dict({"fc.bias": np.arange(5.0), "head.weight": np.zeros(3)}, strict=False)
    np.testing.assert_array_equal(net.fc.bias.data, np.arange(5))
    np.testing.assert_array_equal(net.state_dict()["fc.weight"], before["fc.weight"])
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        net.load_state_dict({"fc.bias": np.zeros(6)}, strict=False)


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


def test_mixed_types_say_what_to_do(net: Net) -> None:
    with pytest.raises(MinidlError, match=r"float64 .* float32 .* do not mix"):
        net(images(2, 9, 6, 3).astype(np.float64))


# Initial weights


def test_the_same_seed_builds_the_same_model() -> None:
    states = []
    for seed in (0, 0, 1):
        minidl.seed(seed)
        states.append(Net().state_dict())
    assert all((states[0][name] == states[1][name]).all() for name in NAMES)
    assert (states[0]["fc.weight"] != states[2]["fc.weight"]).all()


NORMAL, UNIFORM = 3.0, 1.8  # kurtosis: the standard error of a sample's variance is variance sqrt((kurtosis - 1) / n)
SHAPE = (3, 5, 20, 30)  # (kh, kw, in, out): fan_in 300, fan_out 450


@pytest.mark.parametrize(
    ("fill", "variance", "kurtosis"),
    [
        (lambda p: nn.init.normal(p, 0.3), 0.3**2, NORMAL),
        (lambda p: nn.init.uniform(p, 0.3), 0.3**2 / 3, UNIFORM),
        (nn.init.kaiming_normal, 2 / 300, NORMAL),
        (lambda p: nn.init.kaiming_normal(p, fan_out=True), 2 / 450, NORMAL),
        (nn.init.kaiming_uniform, 2 / 300, UNIFORM),
        (lambda p: nn.init.kaiming_uniform(p, gain=1.0), 1 / 300, UNIFORM),
        (nn.init.xavier_normal, 2 / 750, NORMAL),
        (nn.init.xavier_uniform, 2 / 750, UNIFORM),
        (lambda p: nn.init.torch_default(p, None), 1 / 300 / 3, UNIFORM),
    ],
)
def test_initial_weights_have_the_variance_they_promise(fill: object, variance: float, kurtosis: float) -> None:
    minidl.seed(0)
    parameter = nn.Parameter(np.empty(SHAPE, np.float32))
    fill(parameter)  # type: ignore[operator]
    x = parameter.data.astype(np.float64).ravel()
    assert abs(x.var() - variance) < 4 * variance * math.sqrt((kurtosis - 1) / x.size)
    assert abs(x.mean()) < 4 * math.sqrt(variance / x.size)
    assert abs((x**4).mean() / x.var() ** 2 - kurtosis) < 0.2
    if kurtosis == UNIFORM:
        assert 0.998 < abs(x).max() / math.sqrt(3 * variance) < 1 + 1e-6  # of 9,000 draws one is this near the bound


def test_initial_weights_of_layers() -> None:
    minidl.seed(0)
    conv = nn.Conv2d(8, 12, 3, groups=4)
    bound = 1 / math.sqrt(2 * 3 * 3)
    assert 0.9 * bound < abs(conv.weight.data).max() <= bound and abs(conv.bias.data).max() <= bound
    parameter = nn.Parameter(np.empty((2, 3), np.float32))
    nn.init.constant(parameter, 0.5)
    assert (parameter.data == 0.5).all()
    assert nn.init.fans(conv.weight) == (2 * 9, 12 * 9)
