"""Muon and lookahead agree with their equations in float64, with PyTorch's Muon, and continue from a saved state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import nn, optim
from minidl.engine.device import Device
from minidl.errors import ConfigError, ShapeError
from minidl.optim.muon import A, B, C

SHAPES = {"conv": (3, 3, 2, 5), "scale": (5,), "wide": (7, 11), "bias": (11,), "head": (11, 4)}
FLAT = {"conv": (18, 5), "wide": (7, 11)}  # the matrices that are orthogonalised


class Bag(nn.Module):
    """A model without a forward pass. The tests set the gradients of its parameters."""

    def __init__(self, dtype: str = "float64") -> None:
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(rng.standard_normal(shape).astype(dtype)))


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1000 + step)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def run(optimizer: optim.Optimizer, model: Bag, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            getattr(model, name).grad = gradient.astype(model.head.dtype)
        optimizer.step()


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in model.named_parameters()}


def orthogonal(u: np.ndarray, steps: int) -> np.ndarray:
    """The equations of muon.py through the singular values: U f(S) V^T."""
    left, s, right = np.linalg.svd(u / (np.linalg.norm(u) + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return (left * s) @ right


def muon(w: np.ndarray, g: np.ndarray, state: dict[str, Any], name: str, lr: float, o: dict[str, Any]) -> np.ndarray:
    """One update of one parameter."""
    if name not in FLAT:
        rate, decay = (o["head_lr"], o["weight_decay"]) if name == "head" else (o["bias_lr"], o["bias_decay"])
        g = g + decay * w
        v = state[name] = o["sgd_momentum"] * state.get(name, 0) + g
        return w - lr * rate * (g + o["sgd_momentum"] * v)
    v = state[name] = o["momentum"] * state.get(name, 0) + g
    inputs, outputs = FLAT[name]
    update = orthogonal((g + o["momentum"] * v).reshape(inputs, outputs), o["ns_steps"]).reshape(w.shape)
    keep = (1 - lr * o["lr"] * o["weight_decay"]) * (math.sqrt(outputs) / np.linalg.norm(w) if o["normalise"] else 1)
    return keep * w - lr * o["lr"] * math.sqrt(max(1, outputs / inputs)) * update


@pytest.mark.parametrize("normalise", [False, True])
def test_rule(normalise: bool) -> None:
    """The groups of `build`: the last matrix, and the parameters with one axis, are updated as by SGD."""
    model, lr = Bag(), 0.05
    options = {"momentum": 0.6, "ns_steps": 3, "normalise": normalise, "head_lr": 0.2, "bias_lr": 0.5,
               "bias_decay": 0.02, "sgd_momentum": 0.85}  # fmt: skip
    every = {"lr": lr, "weight_decay": 0.03} | options
    optimizer = optim.build("muon", model, lr=lr, weight_decay=0.03, **options)
    expected, state = values(model), {}
    for step in range(12):
        factor = 1 - step / 12  # of a schedule
        optimizer.lr = lr * factor
        run(optimizer, model, range(step, step + 1))
        for name, gradient in gradients(step).items():
            expected[name] = muon(expected[name], gradient, state, name, factor, every)
        for name, value in values(model).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-12, err_msg=f"{name}, step {step}")


def test_the_clipped_gradient_is_that_of_all_parameters() -> None:
    """Clipping changes the updates of SGD, and the mixture of old and new gradients, not the size of Muon's update."""
    model, other = Bag(), Bag()
    norm = math.sqrt(sum((g**2).sum() for g in gradients(0).values()))
    run(optim.build("muon", model, lr=0.1, clip=norm / 4), model, range(1))
    run(optim.build("muon", other, lr=0.1), other, range(1))
    start = values(Bag())
    for name, value in values(model).items():
        moved = values(other)[name] - start[name]
        np.testing.assert_allclose(value - start[name], moved if name in FLAT else moved / 4, rtol=1e-6, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), steps=st.integers(1, 7), seed=st.integers(0, 99),
    scale=st.floats(1e-6, 1e6),
)  # fmt: skip
def test_orthogonalise(rows: int, columns: int, steps: int, seed: int, scale: float) -> None:
    """It changes the singular values by Jordan's polynomial, and keeps the singular vectors, whatever the scale."""
    matrix = scale * np.random.default_rng(seed).standard_normal((rows, columns))
    before = matrix.copy()
    found = optim.orthogonalise(matrix, steps)
    np.testing.assert_allclose(found, orthogonal(matrix, steps), atol=1e-12)
    np.testing.assert_array_equal(matrix, before)
    single = optim.orthogonalise(matrix.astype(np.float32), steps)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, found, atol=2e-4)


def test_singular_values_end_near_one() -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 200)).astype(np.float32)
    found = np.linalg.svd(optim.orthogonalise(matrix), compute_uv=False)
    assert found.min() > 0.65 and found.max() < 1.25


def test_the_fast_kernels_and_the_reference_agree() -> None:
    model, other = Bag(), Bag()
    fast, slow = (optim.build("muon", one, lr=0.05, weight_decay=0.1) for one in (model, other))
    slow.device = Device("reference")
    run(fast, model, range(2))
    run(slow, other, range(2))
    for name, value in values(model).items():
        np.testing.assert_allclose(value, values(other)[name], rtol=1e-12, atol=1e-13)


def test_parity_with_torch() -> None:
    """PyTorch multiplies in bfloat16, so 8 bits are equal. Its matrices are (out, in)."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for shape in ((48, 20), (20, 48)):
        w = rng.standard_normal(shape).astype(np.float32)
        own, other = nn.Parameter(w), torch.nn.Parameter(torch.from_numpy(w.T.copy()))
        ours = optim.Muon([own], lr=0.05, momentum=0.9, weight_decay=0.1)
        theirs = torch.optim.Muon([other], lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
        for _ in range(5):
            own.grad = rng.standard_normal(shape).astype(np.float32)
            other.grad = torch.from_numpy(own.grad.T.copy())
            ours.step()
            theirs.step()
        moved, expected = own.data - w, other.detach().numpy().T - w
        assert np.linalg.norm(moved - expected) < 0.03 * np.linalg.norm(expected)


# State


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("name", ["muon", "nesterov"])
def test_a_loaded_state_continues_bit_identically(name: str, lookahead: int) -> None:
    def made(model: Bag) -> optim.Optimizer:
        optimizer = optim.build(name, model, lr=0.05, weight_decay=0.01, clip=3.0)
        if lookahead:
            optimizer.look_ahead(lookahead)
        return optimizer

    whole, first, second = Bag("float32"), Bag("float32"), Bag("float32")
    run(made(whole), whole, range(8))
    optimizer = made(first)
    run(optimizer, first, range(4))
    copied, second_of_copy = copy.deepcopy((optimizer, first))
    second.load_state_dict(first.state_dict())
    resumed = made(second)
    resumed.load_state_dict(*optimizer.state_dict())
    for one, model in ((resumed, second), (copied, second_of_copy)):
        run(one, model, range(4, 8))
        assert all((value == values(whole)[key]).all() for key, value in values(model).items())


def test_all_kernels_are_listed_for_compilation() -> None:
    """Else the first step would compile them, while other replicas wait."""
    model = Bag("float32")
    optimizer = optim.build("muon", model, lr=0.05, normalise=True)
    optimizer.look_ahead(2)
    before = values(model)
    listed = {f"{kernel.op}.{kernel.name}" for kernel in optimizer.kernels()}
    assert listed == {"optim.sgd", "optim.norms", "elementwise.affine", "elementwise.copy", "mix.axpy", "mix.mix",
                      "matmul.nn", "matmul.nt", "matmul.tn"}  # fmt: skip
    assert all((value == before[name]).all() for name, value in values(model).items())


# Lookahead


def test_lookahead() -> None:
    model, other = Bag(), Bag()
    optimizer, plain = optim.SGD(model, lr=0.1, momentum=0.9), optim.SGD(other, lr=0.1, momentum=0.9)
    optimizer.look_ahead(3, 0.25)
    slow = values(model)
    for step in range(8):
        run(optimizer, model, range(step, step + 1))
        run(plain, other, range(step, step + 1))
        if step % 3 == 2:
            slow = {name: slow[name] + 0.25 * (value - slow[name]) for name, value in values(other).items()}
            for name, value in slow.items():
                getattr(other, name).copy_(value)
        for name, value in values(model).items():
            np.testing.assert_allclose(value, values(other)[name], rtol=1e-12, atol=1e-13)


# Errors


def test_errors() -> None:
    model = Bag()
    with pytest.raises(ConfigError, match="Muon: momentum = 1"):
        optim.Muon(model, momentum=1)
    with pytest.raises(ConfigError, match="Muon: ns_steps"):
        optim.Muon(model, ns_steps=0)
    with pytest.raises(ConfigError, match="orthogonal = 1; expected True or False"):
        optim.Muon([{"params": [model.wide], "orthogonal": 1}])
    with pytest.raises(ConfigError, match=r"expected params, optionally lr, weight_decay$"):
        optim.SGD([{"params": [model.wide], "orthogonal": False}], lr=0.1)
    with pytest.raises(ConfigError, match="lookahead: rate = 2"):
        optim.SGD(model, lr=0.1).look_ahead(5, 2)
    with pytest.raises(ConfigError, match="lookahead"):
        optim.SGD(model, lr=0.1).look_ahead(0)
    with pytest.raises(ShapeError, match="expected a matrix"):
        optim.orthogonalise(np.ones(3))
