"""minidl compared with PyTorch: update rules, parameter groups, clipping, schedules and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from minidl import Tensor, nn, optim, schedules
from minidl.engine.arena import Arena

torch = pytest.importorskip("torch")

# Update rules

SHAPES = {"conv": (3, 3, 2, 5), "scale": (5,), "w": (7, 11), "single": (1,), "bias": (11,)}

RULES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.05, "nesterov": True}),
    ("Adam", {"lr": 0.02}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
]


class Sides(NamedTuple):
    """The same parameters in minidl and in PyTorch."""

    ours: list[nn.Parameter]
    theirs: list[Any]

    def set_gradients(self, step: int) -> None:
        rng = np.random.default_rng(100 + step)
        for own, other in zip(self.ours, self.theirs):
            own.grad = rng.standard_normal(own.shape).astype(own.dtype)
            other.grad = torch.from_numpy(own.grad.copy())

    def compare(self, rtol: float) -> None:
        for own, other in zip(self.ours, self.theirs):
            expected = other.detach().numpy()
            np.testing.assert_allclose(own.data, expected, rtol=0, atol=rtol * abs(expected).max())


def both_sides(dtype: str) -> Sides:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES.values()]
    return Sides(
        [nn.Parameter(array) for array in arrays], [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in arrays]
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize(("name", "options"), RULES)
def test_rules(name: str, options: dict[str, Any], dtype: str, tolerance: float) -> None:
    sides = both_sides(dtype)
    own = getattr(optim, name)(sides.ours, **options)
    other = getattr(torch.optim, name)(sides.theirs, **options)
    for step in range(20):
        own.lr = other.param_groups[0]["lr"] = options["lr"] * (1 - step / 20)  # a schedule
        sides.set_gradients(step)
        own.step()
        other.step()
        sides.compare(tolerance)


def test_parameter_groups() -> None:
    sides = both_sides("float64")
    shared = {"lr": 0.05, "weight_decay": 0.1}

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[0:1]},
            {"params": iter(parameters[2:3]), "lr": 0.2},
            {"params": parameters[3:5], "weight_decay": 0.0},  # parameters[1] is in no group: frozen
        ]

    Arena({str(i): p for i, p in enumerate(sides.ours)})
    own, other = optim.AdamW(groups(sides.ours), **shared), torch.optim.AdamW(groups(sides.theirs), **shared)
    for step in range(20):
        sides.set_gradients(step)
        own.step()
        other.step()
        sides.compare(1e-12)


@pytest.mark.parametrize("clip", [1.0, 1e3])
def test_clipping(clip: float) -> None:
    """PyTorch divides by |grad| + 1e-6: for a norm of about 14, its result is smaller by a relative 1e-7."""
    sides = both_sides("float64")
    own = optim.SGD(sides.ours, lr=1.0, momentum=0.9, clip=clip)
    other = torch.optim.SGD(sides.theirs, lr=1.0, momentum=0.9)
    for step in range(5):
        sides.set_gradients(step)
        own.step()
        torch.nn.utils.clip_grad_norm_(sides.theirs, clip)
        other.step()
        sides.compare(1e-6 if clip == 1 else 1e-12)


# Schedules


def torch_factors(make: Callable[[Any], Any], steps: int) -> list[float]:
    """Return the learning rate of each step under a PyTorch scheduler with a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def our_factors(name: str, steps: int, warmup: int = 0) -> list[float]:
    return [schedules.build(name, steps, warmup)(step) for step in range(steps)]


def test_schedules() -> None:
    lr = torch.optim.lr_scheduler
    assert our_factors("cosine", 30) == pytest.approx(torch_factors(lambda o: lr.CosineAnnealingLR(o, 30), 30))
    milestones = torch_factors(lambda o: lr.MultiStepLR(o, [20, 30], gamma=0.1), 40)
    assert our_factors("steps", 40) == pytest.approx(milestones)
    # PyTorch's peak is at step pct_start * total_steps - 1 and its end at step total_steps - 1.
    peak = torch_factors(lambda o: lr.OneCycleLR(o, 1.0, total_steps=41, pct_start=13 / 41, cycle_momentum=False), 40)
    assert our_factors("one-cycle", 40) == pytest.approx(peak)
    ramp = torch_factors(lambda o: lr.LinearLR(o, start_factor=1 / 8, total_iters=7), 20)
    assert our_factors("constant", 20, warmup=7) == pytest.approx(ramp)


def test_losses() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((5, 7)), rng.integers(7, size=5)
    for smoothing in (0.0, 0.1):
        own = nn.CrossEntropyLoss(smoothing)(Tensor(logits), labels).item()
        other = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(torch.from_numpy(logits), torch.from_numpy(labels))
        assert own == pytest.approx(other.item(), rel=1e-12)
