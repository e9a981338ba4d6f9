"""Optimizers agree with their update rules in plain NumPy. test_parity_optim.py compares them with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidl
from minidl import Tensor, nn, ops, optim
from minidl.errors import CheckpointError, ConfigError

# The sizes leave gaps between the parameters in an arena.
SHAPES = {"conv": (3, 3, 2, 5), "scale": (5,), "w": (7, 11), "single": (1,), "bias": (11,)}
State = dict[str, Any]


class Bag(nn.Module):
    """A model without a forward pass. The tests set the gradients of its parameters."""

    def __init__(self, dtype: str = "float64") -> None:
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(rng.standard_normal(shape).astype(dtype)))


def gradients(step: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1000 + step)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def run(optimizer: optim.Optimizer, model: Bag, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step, str(model.w.dtype)).items():
            getattr(model, name).grad = gradient
        optimizer.step()


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in model.named_parameters()}


# The update rules in NumPy, for one parameter.


def sgd(
    w: np.ndarray, g: np.ndarray, s: State, lr: float, decay: float, momentum: float = 0.0, **o: bool
) -> np.ndarray:
    if o.get("decoupled"):
        w = w - lr * decay * w
    else:
        g = g + decay * w
    s["v"] = momentum * s.get("v", 0) + g
    return w - lr * (g + momentum * s["v"] if o.get("nesterov") else s["v"])


def adam(w: np.ndarray, g: np.ndarray, s: State, lr: float, decay: float, decoupled: bool = False) -> np.ndarray:
    if decoupled:
        w = w - lr * decay * w
    else:
        g = g + decay * w
    s["t"] = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
    return w - lr * m / (np.sqrt(v) + 1e-8)


def lars(w: np.ndarray, g: np.ndarray, s: State, lr: float, decay: float) -> np.ndarray:
    """Algorithm 1 of You, Gitman, Ginsburg 2017. If w has one axis, or if the norm of w or g is zero, the learning rate
    is not scaled."""
    norms = np.linalg.norm(w), np.linalg.norm(g)
    rate = 0.02 * norms[0] / (norms[1] + decay * norms[0]) if w.ndim > 1 and min(norms) > 0 else 1.0
    s["v"] = 0.9 * s.get("v", 0) + lr * rate * (g + decay * w)
    return w - s["v"]


Rule = Callable[..., np.ndarray]
CASES: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], Rule, dict[str, Any]]] = {
    "sgd": (optim.SGD, {}, sgd, {}),
    "momentum": (optim.SGD, {"momentum": 0.9}, sgd, {"momentum": 0.9}),
    "nesterov": (optim.SGD, {"momentum": 0.8, "nesterov": True}, sgd, {"momentum": 0.8, "nesterov": True}),
    "sgdw": (optim.SGD, {"momentum": 0.9, "decoupled": True}, sgd, {"momentum": 0.9, "decoupled": True}),
    "adam": (optim.Adam, {}, adam, {}),
    "adamw": (optim.AdamW, {}, adam, {"decoupled": True}),
    "lars": (optim.LARS, {"trust": 0.02}, lars, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_rule(name: str, decay: float) -> None:
    make, options, rule, rule_options = CASES[name]
    model = Bag()
    expected, states = values(model), {key: State() for key in SHAPES}
    optimizer = make(model, lr=0.05, weight_decay=decay, **options)
    for step in range(20):
        run(optimizer, model, range(step, step + 1))
        for key, gradient in gradients(step).items():
            expected[key] = rule(expected[key], gradient, states[key], 0.05, decay, **rule_options)
        for key, value in values(model).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-12, atol=1e-13, err_msg=f"{key}, step {step}")


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adamw", "lars"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_state_below_the_smallest_normal_number_becomes_zero(name: str, dtype: str) -> None:
    """Otherwise the velocity behind a dead ReLU slows each later step down. NaN stays."""
    optimizer, smallest = CASES[name][0](Bag(dtype), lr=0.05, **CASES[name][1]), np.finfo(dtype).tiny
    for state in optimizer.state.values():
        state[:] = smallest * 1.0001
        state[:2] = smallest * 2, np.nan
    optimizer.step()
    for state in optimizer.state.values():  # the first parameter has 90 numbers
        assert state[0] > smallest and np.isnan(state[1]) and not state[2:90].any()


@pytest.mark.parametrize("name", CASES)
def test_groups_have_separate_rates_and_decays(name: str) -> None:
    """One group has its own lr and no weight decay. The optimizer's lr changes every step and scales both groups."""
    make, options, rule, rule_options = CASES[name]
    model = Bag()
    weights, others = [model.conv, model.w], [model.bias, model.single]  # model.scale is in no group: frozen
    groups = [{"params": iter(weights)}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
    nn.Module.flatten(model)
    optimizer = make(groups, lr=0.05, weight_decay=0.03, **options)
    expected, states = values(model), {key: State() for key in SHAPES}
    for step in range(5):
        optimizer.lr = 0.05 / (step + 1)
        run(optimizer, model, range(step, step + 1))
        for key, gradient in gradients(step).items():
            lr, decay = (0.05, 0.03) if key in ("conv", "w") else (0.01, 0.0)
            if key != "scale":
                lr /= step + 1
                expected[key] = rule(expected[key], gradient, states[key], lr, decay, **rule_options)
        for key, value in values(model).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-12, atol=1e-13, err_msg=f"{key}, step {step}")


@pytest.mark.parametrize("name", CASES)
def test_gaps_stay_zero(name: str) -> None:
    make, options, _, _ = CASES[name]
    model = Bag("float32")
    optimizer = make(model, lr=0.05, weight_decay=0.03, clip=0.5, **options)
    run(optimizer, model, range(3))
    arena = optimizer.arena
    inside = np.zeros(arena.size, bool)
    for slot in arena.slots:
        inside[slot.start : slot.stop] = True
    assert not inside.all() and optimizer.state
    for vector in (arena.theta, arena.grad, *optimizer.state.values()):
        assert not vector[~inside].any() and vector[inside].all()


# Frozen parameters


@pytest.mark.parametrize("how", ["left out", "requires_grad"])
def test_frozen_parameters_stay_between_trained_ones(how: str) -> None:
    """An optimizer updates adjacent parameters with equal options together, as one segment of the arena. Two
    parameters with a small frozen one between them must stay separate segments."""
    model = Bag()
    frozen = [model.scale, model.single]
    for parameter in frozen:
        parameter.requires_grad = how == "left out"
    before = values(model)
    given = [p for p in model.parameters() if how == "requires_grad" or not any(p is q for q in frozen)]
    nn.Module.flatten(model)
    optimizer = optim.AdamW(given, lr=0.1, weight_decay=0.1)
    run(optimizer, model, range(2))
    for name, value in values(model).items():
        assert (value == before[name]).all() == (name in ("scale", "single")), name


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_parameter_can_be_frozen_and_unfrozen_later(name: str) -> None:
    model = Bag()
    optimizer = optim.build(name, model, lr=0.1, weight_decay=0.1)
    run(optimizer, model, range(2))
    for requires_grad in (False, True):
        model.w.requires_grad = model.single.requires_grad = requires_grad
        before = values(model)
        run(optimizer, model, range(2))
        for key, value in values(model).items():
            assert (value != before[key]).any() == (requires_grad or key not in ("w", "single")), key


def test_frozen_parameters_do_not_count_for_clipping() -> None:
    model = Bag()
    optimizer = optim.SGD([model.w], lr=1.0, clip=1.0)
    before = model.w.data.copy()
    model.w.grad = np.full(SHAPES["w"], 10.0)
    optimizer.step()
    assert math.isclose(np.linalg.norm(model.w.data - before), 1.0, rel_tol=1e-12)


def test_parameter_groups_do_not_decay_norms_and_biases() -> None:
    minidl.seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    weights, others = optim.parameter_groups(model)
    assert [p.shape for p in weights["params"]] == [(3, 3, 1, 2), (8, 3)] and "weight_decay" not in weights
    assert [p.shape for p in others["params"]] == [(2,), (2,), (2,), (3,)] and others["weight_decay"] == 0
    before = values(model)
    optim.build("sgd", model, lr=0.1, weight_decay=0.5).step()  # all gradients are zero
    for name, value in values(model).items():
        np.testing.assert_allclose(value, before[name] * (0.95 if value.ndim > 1 else 1), rtol=1e-6)


# Clipping


def test_clip_scales_the_whole_gradient() -> None:
    model = Bag()
    before, gradient = values(model), gradients(0)
    norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
    run(optim.SGD(model, lr=1.0, clip=norm / 4), model, range(1))
    for name, value in values(model).items():
        np.testing.assert_allclose(value, before[name] - gradient[name] / 4, rtol=1e-12)


@pytest.mark.parametrize("clip", [None, 1e6])
def test_clip_does_not_change_a_small_gradient(clip: float | None) -> None:
    model, other = Bag(), Bag()
    run(optim.SGD(model, lr=0.1, clip=clip), model, range(1))
    run(optim.SGD(other, lr=0.1), other, range(1))
    assert all((value == values(other)[name]).all() for name, value in values(model).items())


def test_clip_of_a_zero_gradient() -> None:
    model = Bag()
    before = values(model)
    optim.SGD(model, lr=0.1, clip=1.0).step()
    assert all((value == before[name]).all() for name, value in values(model).items())


def test_lars_with_zero_norms_uses_the_plain_rate() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).astype(np.float64)
    model[0].weight.copy_(np.zeros((3, 4)))
    optimizer = optim.LARS(model, lr=0.1, weight_decay=0.1, trust=0.02)
    before = model[1].weight.data.copy()
    model[0].weight.grad = np.ones((3, 4))
    optimizer.step()
    np.testing.assert_allclose(model[0].weight.data, -0.1)
    np.testing.assert_allclose(model[1].weight.data, before * (1 - 0.1 * 0.1))


# State


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_loaded_state_continues_bit_identically(name: str) -> None:
    whole, first, second = Bag("float32"), Bag("float32"), Bag("float32")
    run(optim.build(name, whole, lr=0.05, weight_decay=0.01, clip=3.0), whole, range(7))

    optimizer = optim.build(name, first, lr=0.05, weight_decay=0.01, clip=3.0)
    run(optimizer, first, range(4))
    vectors, numbers = optimizer.state_dict()
    assert vectors and numbers == {"steps": 4}
    second.load_state_dict(first.state_dict())
    resumed = optim.build(name, second, lr=0.05, weight_decay=0.01, clip=3.0)
    resumed.load_state_dict({key: vector.copy() for key, vector in vectors.items()}, dict(numbers))
    run(resumed, second, range(4, 7))
    assert all((value == values(whole)[key]).all() for key, value in values(second).items())


def test_loading_a_state_replaces_the_previous_state() -> None:
    """The vectors of a fresh optimizer are zero: loading them resets the momentum."""
    model, other = Bag(), Bag()
    fresh = optim.SGD(other, lr=0.1, momentum=0.9)
    optimizer = optim.SGD(model, lr=0.1, momentum=0.9)
    run(optimizer, model, range(3))
    optimizer.load_state_dict(*fresh.state_dict())
    model.load_state_dict(other.state_dict())
    run(optimizer, model, range(2))
    run(fresh, other, range(2))
    assert all((value == values(other)[name]).all() for name, value in values(model).items())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = Bag()
    optimizer = optim.Adam(model, lr=0.1)
    run(optimizer, model, range(1))
    before = optimizer.state_dict()[0]
    size = optimizer.arena.size
    with pytest.raises(CheckpointError, match=rf"second_moment: \(3,\); expected \({size},\)"):
        optimizer.load_state_dict({"first_moment": np.ones(size), "second_moment": np.ones(3)}, {"steps": 9})
    assert optimizer.steps == 1
    with pytest.raises(CheckpointError, match="velocity: unknown to Adam: another optimizer's"):
        optimizer.load_state_dict({"velocity": np.ones(size)}, {"steps": 9})
    assert optimizer.steps == 1
    assert before and all((optimizer.state[name] == vector).all() for name, vector in before.items())


def test_state_dict_is_a_copy() -> None:
    model = Bag()
    optimizer = optim.SGD(model, lr=0.1, momentum=0.9)
    run(optimizer, model, range(1))
    vectors = optimizer.state_dict()[0]
    before = vectors["velocity"].copy()
    run(optimizer, model, range(1, 2))
    np.testing.assert_array_equal(vectors["velocity"], before)


def test_two_optimizers_of_one_arena_have_separate_states() -> None:
    model, other = Bag(), Bag()
    nn.Module.flatten(model)
    one = optim.SGD([model.w], lr=0.1, momentum=0.9)
    run(one, model, range(1))
    two = optim.SGD([model.conv], lr=0.1, momentum=0.9)  # must not reset the momentum of the first
    run(one, model, range(1, 3))
    run(two, model, range(3))
    both = optim.SGD(other, lr=0.1, momentum=0.9)
    run(both, other, range(3))
    np.testing.assert_array_equal(model.w.data, other.w.data)
    np.testing.assert_array_equal(model.conv.data, other.conv.data)


# Use


def test_step_raises_the_version_and_zero_grad_keeps_the_views() -> None:
    model = Bag()
    optimizer = optim.SGD(model, lr=0.1)
    view = model.w.grad
    run(optimizer, model, range(2))
    assert optimizer.arena.version == 2
    assert model.w.grad.any() and np.shares_memory(model.w.grad, view)
    optimizer.zero_grad()
    assert not optimizer.arena.grad.any() and not view.any() and np.shares_memory(model.w.grad, optimizer.arena.grad)


def test_optimizer_of_parameters_in_no_arena() -> None:
    model = Bag()
    optimizer = optim.SGD([model.w, model.bias], lr=1.0)
    before = model.w.data.copy()
    model.w.grad, model.bias.grad = np.ones(SHAPES["w"]), np.ones(SHAPES["bias"])
    optimizer.step()
    np.testing.assert_array_equal(model.w.data, before - 1)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    """Linear regression without noise: each optimizer must reduce the loss to less than 2% of its first value."""
    minidl.seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 5)).astype(np.float32)
    y = x @ rng.standard_normal((5, 3)).astype(np.float32) + np.float32(0.5)
    model = nn.Linear(5, 3)
    # LARS moves a weight by a fraction (trust) of the weight's norm. The default fraction is too small here.
    optimizer = optim.LARS(model, lr=0.3, trust=0.01) if name == "lars" else optim.build(name, model, lr=0.05)
    losses = []
    for _ in range(100):
        loss = ops.mse_loss(model(Tensor(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: optim.SGD(m, lr=-0.1), "SGD: lr = -0.1"),
        (lambda m: optim.SGD(m, lr=math.nan), "SGD: lr = nan"),
        (lambda m: optim.SGD(m, lr=math.inf), "SGD: lr = inf"),
        (lambda m: optim.AdamW(m, lr=0.1, weight_decay=-1.0), "AdamW: weight_decay = -1.0"),
        (lambda m: optim.SGD(m, lr=0.1, momentum=1.0), "momentum = 1.0; expected 0 <= momentum < 1"),
        (lambda m: optim.SGD(m, lr=0.1, momentum=-0.1), "momentum"),
        (lambda m: optim.SGD(m, lr=0.1, clip=-1.0), "clip = -1.0"),
        (lambda m: optim.SGD(m, lr=0.1, clip=math.nan), "clip = nan"),
        (lambda m: optim.Adam(m, betas=(0.9, 1.0)), r"betas = \(0.9, 1.0\)"),
        (lambda m: optim.Adam(m, eps=-1e-8), "Adam: eps = -1e-08"),
        (lambda m: optim.LARS(m, lr=0.1, trust=-1.0), "LARS: trust = -1.0"),
        (lambda m: optim.SGD([], lr=0.1), "no parameters"),
        (lambda m: optim.SGD([Tensor([1.0])], lr=0.1), "a Tensor among the parameters; expected nn.Parameter"),
        (lambda m: optim.SGD([{"params": [m.w]}, m.bias], lr=0.1), "groups and a Parameter in one list"),
        (lambda m: optim.SGD([m.w, {"params": [m.bias]}], lr=0.1), "groups and a Parameter in one list"),
        (lambda m: optim.SGD([m.w, m.w], lr=0.1), "in two groups"),
        (lambda m: optim.SGD([{"params": [m.w]}, {"params": [m.w]}], lr=0.1), "in two groups"),
        (lambda m: optim.SGD([{"params": [m.w], "rate": 1.0}], lr=0.1), "rate; expected params"),
        (lambda m: optim.SGD([{"lr": 1.0}], lr=0.1), "expected params"),
        (lambda m: optim.SGD([{"params": [m.w], "lr": -1.0}], lr=0.1), "lr = -1.0"),
        (lambda m: optim.SGD([{"params": [m.w], "weight_decay": math.nan}], lr=0.1), "weight_decay = nan"),
        (lambda m: optim.SGD([{"params": [m.w], "lr": 0.1}], lr=0.0), "lr = 0.0"),
        (lambda m: optim.SGD([m.w, *nn.Sequential(Bag()).parameters()], lr=0.1), None),
        (lambda m: optim.build("adamm", m, lr=0.1), "unknown optimizer 'adamm': .* Did you mean 'adam'"),
    ],
)
def test_bad_values(make: Callable[[Bag], object], message: str | None) -> None:
    model = Bag()
    if message is None:  # parameters of two models, one of them in an arena
        nn.Module.flatten(model)
        message = "not in one arena"
    with pytest.raises(ConfigError, match=message) as caught:
        make(model)
    assert "\n" not in str(caught.value)
