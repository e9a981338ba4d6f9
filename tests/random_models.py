"""Random models, and random changes of a model between two steps.

A list of pairs of integers (kind of layer, variant) describes a model. Three integers (place, kind, value) describe a
change. Any integers are valid, so Hypothesis can draw and shrink them.
"""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import nn, ops
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient
from tests.twins import Loss

WIDTH, CLASSES = 4, 3
FACTOR = {"global": 1.0}
VALUES = (1.0, 0.5, 2, True, -0.0, 0.25, 3.0, 1)
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    ops.relu, ops.tanh, ops.gelu, ops.sigmoid, ops.silu, lambda x: x, ops.absolute,
]  # fmt: skip
Variant = int


class Setting(nn.Module):
    """A layer that multiplies by a number. `kind` selects where the number is stored."""

    shared = 1.0

    def __init__(self, kind: Variant) -> None:
        self.kind = kind % len(PLACES)
        self.write = PLACES[self.kind](self)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read() + 0.125

    def read(self) -> Any:
        return 1.0


@dataclass
class Box:
    value: Any = 1.0
    inner: Any = None


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _stored(module: Setting, place: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Any:
    """Store `place` in the module. `read(place)` finds the number; the returned function writes another number."""
    module.place = place
    module.read = lambda: read(module.place)
    return functools.partial(_write, module, write)


def _write(module: Setting, write: Callable[[Any, Any], Any], value: Any) -> None:
    write(module.place, value)


def _closure(module: Setting) -> Callable[[Any], None]:
    factor: Any = 1.0

    def write(value: Any) -> None:
        nonlocal factor
        factor = value

    module.read = lambda: factor
    return write


def _default(module: Setting) -> Callable[[Any], None]:
    def read(value: Any = 1.0) -> Any:
        return value

    module.read = read
    return lambda value: setattr(read, "__defaults__", (value,))


def _global(module: Setting) -> Callable[[Any], None]:
    module.read = lambda: FACTOR["global"]
    return lambda value: FACTOR.update({"global": value})


def _class(module: Setting) -> Callable[[Any], None]:
    module.read = lambda: module.shared
    return lambda value: setattr(Setting, "shared", value)


def _array(module: Setting) -> Callable[[Any], None]:
    return _stored(module, np.ones(3), lambda a: float(a[1]), lambda a, v: a.__setitem__(1, v))


def _function(module: Setting) -> Callable[[Any], None]:
    def read() -> Any:
        return getattr(read, "number", 1.0)

    module.read = read
    return lambda value: setattr(read, "number", value)


def _added_to_class(module: Setting) -> Callable[[Any], None]:
    class Kind(Box):
        pass

    module.place = Kind()
    module.read = lambda: getattr(module.place, "added", 1.0)
    return lambda value: setattr(Kind, "added", value)


def _python_module(module: Setting) -> Callable[[Any], None]:
    settings = types.ModuleType("random_settings")
    module.read = lambda: getattr(settings, f"number{module.kind}", 1.0)
    return lambda value: setattr(settings, f"number{module.kind}", value)


def _chosen(module: Setting) -> Callable[[Any], None]:
    """Store the number in an attribute `training` of another object. A method with a computed name reads it."""

    class Chosen:
        training: Any = 1.0

        def run(self) -> Any:
            return self.training

    chosen = Chosen()
    module.read = lambda: getattr(chosen, "".join(("r", "un")))()
    return lambda value: setattr(chosen if value > 1 else Chosen, "training", value)


def _ordered(module: Setting) -> Callable[[Any], None]:
    @dataclass(order=True)
    class Stage:
        rank: Any
        value: Any = 1.0

    stages = [Stage(0.75), Stage(1.0, 2.0)]
    module.read = lambda: min(stages).value
    return lambda value: setattr(stages[1], "rank", value)


PLACES: list[Callable[[Setting], Callable[[Any], None]]] = [
    lambda m: _stored(m, Box(), lambda o: o.__dict__.get("number", 1.0), lambda o, v: setattr(o, "number", v)),
    lambda m: _stored(m, [1.0, 2.0], lambda o: o[0], lambda o, v: o.__setitem__(0, v)),
    lambda m: _stored(m, [1.0], lambda o: o[-1], lambda o, v: o.append(v)),
    lambda m: _stored(m, {"a": 1.0}, lambda o: o["a"], lambda o, v: o.update(a=v)),
    lambda m: _stored(m, {"a": 1.0}, lambda o: len(o), lambda o, v: o.update({str(v): v})),
    lambda m: _stored(m, {1.0}, lambda o: float(sum(o)), lambda o, v: (o.clear(), o.add(v))),
    lambda m: _stored(m, collections.deque([1.0]), lambda o: o[0], lambda o, v: o.appendleft(v)),
    lambda m: _stored(m, Box(), lambda o: o.value, lambda o, v: setattr(o, "value", v)),
    lambda m: _stored(m, Box(inner=Box([(1.0, [1.0])])), lambda o: o.inner.value[0][1][0],
                      lambda o, v: o.inner.value[0][1].__setitem__(0, v)),
    lambda m: _stored(m, Slots(1.0), lambda o: o.value, lambda o, v: setattr(o, "value", v)),
    lambda m: _stored(m, functools.partial(float, 1.0), lambda o: o(), lambda o, v: setattr(m, "place", lambda: v)),
    lambda m: _stored(m, (1.0, [1.0]), lambda o: o[1][0], lambda o, v: o[1].__setitem__(0, v)),
    _closure, _default, _global, _class, _array, _function, _added_to_class, _python_module, _chosen, _ordered,
]  # fmt: skip


class Act(nn.Module):
    def __init__(self, kind: Variant) -> None:
        self.act = ACTIVATIONS[kind % len(ACTIVATIONS)]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        self.block: Any = nn.Sequential(*layers)
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.block is None else self.block(x)
        return ops.relu(y + x) if self.flag else y + x


class Siamese(nn.Module):
    """Two inputs, x and x / 2, go through the same layers."""

    def __init__(self, *layers: nn.Module) -> None:
        self.branch, self.order = nn.Sequential(*layers), 1.0

    def forward(self, x: Tensor) -> Tensor:
        u = self.branch(x)
        v = self.branch(x * 0.5)
        return ops.relu(v) - ops.relu(u) if self.order > 0 else ops.relu(u - v)


class Odd(nn.Module):
    """A layer whose code prevents the recording of all steps, or of some."""

    def __init__(self, kind: Variant) -> None:
        self.kind, self.count, self.last, self.rng = kind % 8, 0, None, np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == 0:
            return x * (1.0 if np.random.random() < 0.7 else 0.5)
        if self.kind == 1:
            return x * (1.0 if self.rng.random() < 0.7 else 0.5)
        if self.kind == 2:
            return x * (1.0 if random.random() < 0.7 else 0.5)
        if self.kind == 3:
            self.count += 1
            return x * float(self.count)
        if self.kind == 4:
            self.last = x  # type: ignore[assignment]
            return x
        if self.kind == 5:
            return x * (1.0 if np.asarray(x).max() > 1 else 0.5)
        if self.kind == 6:
            return x * float(x.max().item())
        if self.last is None:
            self.last = 0.5  # type: ignore[assignment]
        return x * self.last


def layer(kind: int, variant: Variant, shared: nn.Module) -> nn.Module:
    """Return a layer that keeps the number of channels."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bool(variant % 2)),
        lambda: nn.BatchNorm2d(WIDTH),
        lambda: shared,
        lambda: nn.Dropout((0.5, 0.1, 0.0)[variant % 3]),
        lambda: nn.LeakyReLU(0.1),
        lambda: Act(variant),
        lambda: Setting(variant),
        lambda: Residual(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH), nn.ReLU()),
        lambda: Residual(layer(variant, variant + 1, shared), nn.BatchNorm2d(WIDTH)),
        lambda: Siamese(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)),
        lambda: Siamese(nn.LayerNorm(WIDTH), shared, nn.Dropout(0.2)),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.MaxPool2d(2, 1) if variant % 2 else nn.AvgPool2d(2, 1, 1),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
        lambda: Setting(variant + 8),
        lambda: Odd(variant) if variant > 5 else nn.ReLU(),
    ]
    return makers[kind % len(makers)]()


class Objective:
    """A loss with settings that `change` changes."""

    def __init__(self) -> None:
        self.smoothing, self.factor, self.weights, self.calls = 0.0, [1.0], {"a": 1.0}, 0

    def __call__(self, logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, y, self.smoothing) * self.factor[0] * self.weights["a"]


def build(layers: Sequence[tuple[int, int]]) -> tuple[nn.Module, Loss]:
    FACTOR["global"], Setting.shared = 1.0, 1.0
    shared = nn.BatchNorm2d(WIDTH)
    middle = nn.Sequential(*(layer(kind, variant, shared) for kind, variant in layers))
    head = nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Conv2d(2, WIDTH, 3), middle, nn.GlobalAvgPool2d(), nn.Flatten(), head), Objective()


def change(gradient: Gradient, place: int, kind: int, value: int) -> None:
    """Make one change, which the integers select, in the model or the loss."""
    modules = list(gradient.model.named_modules())
    _, module = modules[place % len(modules)]
    number = VALUES[value % len(VALUES)]
    if kind % 4 == 0:
        _change_loss(gradient, value, number)
    elif kind % 4 == 1:
        _change_any(gradient, module, value)
    elif isinstance(module, nn.Dropout):
        module.p = (0.0, 0.3, 0.9)[value % 3]
    elif isinstance(module, nn.BatchNorm2d):
        setattr(module, ("eps", "momentum")[value % 2], (0.5, 0.25, 0.1)[value % 3])
    elif isinstance(module, nn.LeakyReLU):
        module.negative_slope = float(number)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        if isinstance(module, nn.Conv2d) and value % 2:
            module.padding, module.stride = ((2, 2), (1, 2))[value % 4 // 2], (1 + value % 3 // 2, 1)
        else:
            module.bias = None
    elif isinstance(module, Act):
        module.act = ACTIVATIONS[value % len(ACTIVATIONS)]
    elif isinstance(module, Setting):
        module.write(number)
    elif isinstance(module, Residual):
        module.flag, module.block = bool(value % 2), None if value % 3 == 0 else module.block
    elif isinstance(module, Siamese):
        module.order = -module.order
    elif isinstance(module, Odd):
        module.kind = value % 8
    elif isinstance(module, nn.Sequential) and module is not gradient.model and len(module) > 1:
        _change_sequence(module, value)


def _change_loss(gradient: Gradient, value: int, number: Any) -> None:
    loss: Any = gradient.loss
    if not isinstance(loss, Objective) or value % 6 == 0:
        gradient.loss = Objective() if value % 4 else lambda logits, y: ops.cross_entropy(logits, y) * number
    elif value % 6 == 1:
        loss.smoothing = 0.25 if loss.smoothing == 0 else 0.0
    elif value % 6 == 2:
        loss.factor[0] = number
    elif value % 6 == 3:
        loss.weights["a"] = number
    elif value % 6 == 4:
        loss.factor = [number]
    else:
        loss.calls += 1


def _change_any(gradient: Gradient, module: nn.Module, value: int) -> None:
    """Change a property that every module has."""
    if value % 6 == 0:
        module.train(not module.training)
    elif value % 6 == 1:
        for parameter in module.parameters():
            parameter.requires_grad = not parameter.requires_grad
    elif value % 6 == 2:
        for parameter in module.parameters():
            parameter.copy_(parameter.numpy() * 0.5)
    elif value % 6 == 3:
        module.note = value  # type: ignore[assignment]
    elif value % 6 == 4:
        gradient.model.train()
    else:
        gradient.model.eval()


def _change_sequence(module: nn.Sequential, value: int) -> None:
    names = [name for name, _ in module.named_children()]
    name = names[value % len(names)]
    if value % 3 == 0:
        delattr(module, name)
    elif value % 3 == 1:
        setattr(module, name, nn.BatchNorm2d(WIDTH))
    else:
        setattr(module, "x" + names[-1], Act(value))
