"""Settings that change between two steps: the next replay equals the tape, or the step runs on the tape and warns."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.tensor import Tensor
from minidl.program import replayed
from minidl.program.fingerprint import Fingerprint
from minidl.program.replay import Gradient, Prediction
from tests.twins import Loss, Twins, batch, plain

FACTOR = 1.0
TABLE = {"factor": 1.0}
LIMITS = np.array([1.0, 2.0])


def stepped(factor: float) -> float:
    return factor


@dataclass
class Options:
    factor: float = 1.0
    nested: dict[str, Any] = field(default_factory=lambda: {"factors": [1.0, (1.0, [1.0])]})
    unrelated: int = 0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Net(nn.Module):
    """A model whose output depends on many kinds of settings."""

    scale = 1.0

    def __init__(self) -> None:
        self.fc, self.norm, self.drop, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.slope = nn.LeakyReLU(0.1)
        self.act: Any = ops.relu
        self.flag, self.block = False, nn.Linear(8, 8)
        self.options, self.slotted, self.queue = Options(), Slotted(), collections.deque([1.0])
        self.array, self.unrelated = np.array([1.0, 2.0]), [0]
        self.partial = functools.partial(stepped, factor=1.0)
        self.closure, self.raised = raising(1.0)

    @property
    def doubled(self) -> float:
        return self.options.factor * 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.slope(self.drop(self.norm(self.fc(x)))))
        y = y if self.block is None else self.block(y)
        y = y * self.scale * self.options.factor * self.slotted.factor * self.queue[0] * float(self.array[1])
        y = y * self.options.nested["factors"][1][1][0] * self.doubled * self.partial() * self.closure()
        y = y * FACTOR * TABLE["factor"] * float(LIMITS[0]) * stepped(1.0)
        return self.last(-y if self.flag else y)


def raising(value: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    def get() -> float:
        return value

    def set(other: float) -> None:
        nonlocal value
        value = other

    return get, set


class Smoothed:
    """A loss object. The loss reads all its attributes except `steps`."""

    def __init__(self) -> None:
        self.smoothing, self.steps, self.factors = 0.0, 0, [1.0]

    def __call__(self, logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, y, self.smoothing) * self.factors[-1]


def build() -> tuple[nn.Module, Loss]:
    return Net(), Smoothed()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda g: setattr(g.model.drop, "p", 0.1),
    "momentum": lambda g: setattr(g.model.norm, "momentum", 0.9),
    "eps": lambda g: setattr(g.model.norm, "eps", 0.9),
    "slope": lambda g: setattr(g.model.slope, "negative_slope", 0.7),
    "activation": lambda g: setattr(g.model, "act", ops.tanh),
    "flag": lambda g: setattr(g.model, "flag", True),
    "an int for a bool": lambda g: setattr(g.model, "flag", 1),
    "instance attribute over a class attribute": lambda g: setattr(g.model, "scale", 2.0),
    "minus zero": lambda g: setattr(g.model, "scale", -0.0),
    "nan": lambda g: setattr(g.model, "scale", float("nan")),
    "no block": lambda g: setattr(g.model, "block", None),
    "no bias": lambda g: setattr(g.model.fc, "bias", None),
    "another layer": lambda g: setattr(g.model, "block", nn.Linear(8, 8, bias=False)),
    "another class": lambda g: setattr(g.model.slope, "__class__", nn.ReLU),
    "object": lambda g: setattr(g.model.options, "factor", 2.0),
    "another object": lambda g: setattr(g.model, "options", Options(3.0)),
    "nested container": lambda g: g.model.options.nested["factors"][1][1].__setitem__(0, 3.0),
    "slot": lambda g: setattr(g.model.slotted, "factor", 3.0),
    "deque": lambda g: g.model.queue.appendleft(2.0),
    "array": lambda g: g.model.array.__setitem__(1, 5.0),
    "partial": lambda g: g.model.partial.keywords.update(factor=4.0),
    "closure": lambda g: g.model.raised(5.0),
    "forward of the instance": lambda g: setattr(g.model, "forward", lambda x: g.model.last(g.model.fc(x))),
    "requires_grad": lambda g: setattr(g.model.fc.weight, "requires_grad", False),
    "eval of one layer": lambda g: g.model.norm.eval(),
    "eval": lambda g: g.model.eval(),
    "smoothing": lambda g: setattr(g.loss, "smoothing", 0.3),
    "list of the loss": lambda g: g.loss.factors.append(0.5),
    "another loss": lambda g: setattr(g, "loss", plain),
    "attributes of the loss": lambda g: setattr(g.loss, "__dict__", {**vars(g.loss), "smoothing": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_steps_is_noticed(name: str) -> None:
    twins = Twins(build)
    twins.step(*batch())
    twins.change(CHANGES[name])
    twins.step(*batch())
    twins.step(*batch(5))
    assert not twins.replayed.not_recorded
    assert twins.replayed.programs


SHARED: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {  # changes of what both twins read
    "global number": lambda m: m.setitem(globals(), "FACTOR", 2.0),
    "global dict": lambda m: m.setitem(TABLE, "factor", 2.0),
    "global array": lambda m: LIMITS.__setitem__(0, LIMITS[0] + 1),
    "global function": lambda m: m.setitem(globals(), "stepped", lambda factor: 2.0 * factor),
    "code of a function": lambda m: m.setattr(stepped, "__code__", (lambda factor: 3.0 * factor).__code__),
    "class attribute": lambda m: m.setattr(Net, "scale", 3.0),
    "property": lambda m: m.setattr(Net, "doubled", property(lambda self: 5.0)),
    "method": lambda m: m.setattr(Net, "forward", lambda self, x: self.last(self.fc(x))),
    "method of the loss": lambda m: m.setattr(Smoothed, "__call__", lambda self, logits, y: plain(logits, y) * 2.0),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_change_of_a_global_or_a_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(build)
    twins.step(*batch())
    SHARED[name](monkeypatch)
    twins.step(*batch())
    assert not twins.replayed.not_recorded


def test_a_default_is_noticed() -> None:
    def loss(logits: Tensor, y: np.ndarray, factor: float = 1.0, *, other: float = 1.0) -> Tensor:
        return ops.cross_entropy(logits, y) * factor * other

    twins = Twins(lambda: (nn.Linear(4, 3), loss))
    twins.step(*batch())
    loss.__defaults__ = (2.0,)
    twins.step(*batch())
    loss.__kwdefaults__ = {"other": 3.0}
    twins.step(*batch())
    assert not twins.replayed.not_recorded


def test_a_layer_deleted_from_a_sequence_is_noticed() -> None:
    twins = Twins(lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 3)), plain))
    twins.step(*batch())
    twins.change(lambda g: delattr(g.model, "2"))
    twins.step(*batch())
    twins.change(lambda g: setattr(g.model, "2", nn.Linear(3, 3)))
    twins.step(*batch())
    assert not twins.replayed.not_recorded


def test_stride_and_other_settings_of_layers_are_noticed() -> None:
    def build() -> tuple[nn.Module, Loss]:
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.GlobalAvgPool2d(), nn.Flatten()), plain

    twins = Twins(build)
    images = batch(4, (8, 8, 1))
    for name, values in {
        "0": {"stride": (2, 2), "padding": (2, 1), "dilation": (1, 2)},
        "1": {"stride": 1, "kernel_size": (1, 2), "padding": 0},
    }.items():
        for setting, value in values.items():
            twins.step(*images)
            twins.step(*images)
            twins.change(lambda g, n=name, s=setting, v=value: setattr(getattr(g.model, n), s, v))
            twins.step(*images)
    assert not twins.replayed.not_recorded


def test_what_the_code_does_not_read_does_not_record_again() -> None:
    """Changes of a trainer's counters, of a note in the model or of other modules cause no new recording."""

    class Trainer:
        def __init__(self) -> None:
            self.model, self.steps, self.history, self.data = nn.Linear(4, 3), 0, [0.0], np.zeros(10**6)
            self.factor = 1.0
            self.gradient = Gradient(self.model, self.loss)

        def loss(self, logits: Tensor, y: np.ndarray) -> Tensor:
            return ops.cross_entropy(logits, y) * self.factor

        def step(self) -> None:
            self.history.append(self.gradient(*batch())[0])
            self.steps += 1
            self.data[:] += 1
            self.model.note = self.steps

    trainer = Trainer()
    trainer.step()
    programs = list(trainer.gradient.programs.values())
    for _ in range(6):
        trainer.step()
    nn.Linear(3, 3)
    trainer.step()
    assert list(trainer.gradient.programs.values()) == programs and len(set(trainer.history[1:])) == 1
    trainer.factor = 2.0
    trainer.step()
    assert trainer.history[-1] == trainer.history[-2] * 2
    assert not trainer.gradient.not_recorded


def test_a_setting_that_changes_at_every_step_leaves_it_to_the_tape() -> None:
    twins = Twins(build)
    with pytest.warns(UserWarning, match=r"factor.* changes from step to step") as caught:
        for step in range(9):
            twins.change(lambda g, step=step: setattr(g.model.options, "factor", 1.0 + step))
            twins.step(*batch())
    assert len(caught) == 1
    assert not twins.replayed.programs
    for _ in range(4):  # until the settings are compared again, and for the step that finds them unchanged
        twins.step(*batch())
    assert len(twins.replayed.programs) == 1 and not twins.replayed.not_recorded


@pytest.mark.filterwarnings("ignore:this model runs without")
def test_settings_that_change_at_every_step_are_compared_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[Any] = []
    monkeypatch.setattr(replayed, "Fingerprint", lambda *roots: walks.append(roots) or Fingerprint(*roots))
    twins = Twins(build)
    for step in range(36):
        twins.change(lambda g, step=step: setattr(g.model.options, "factor", 1.0 + step))
        twins.step(*batch())
    assert len(walks) <= 12


@pytest.mark.filterwarnings("ignore:this model runs without")
def test_a_layer_replaced_during_a_pause_is_noticed() -> None:
    twins = Twins(lambda: (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), plain))
    for step in range(5):
        twins.change(lambda g, step=step: setattr(g.model[1], "p", 0.1 * step))
        twins.step(*batch())
        twins.predict(batch()[0])
    assert twins.replayed.pause
    twins.change(lambda g: setattr(g.model, "0", nn.Linear(4, 4)))
    for _ in range(5):
        twins.step(*batch())
        twins.predict(batch()[0])
    assert twins.replayed.programs and twins.prediction.programs


def test_a_prediction_notices_changes() -> None:
    model = Net()
    prediction = Prediction(model)
    x, _ = batch()
    for name in ("activation", "slope", "eps", "object", "no block", "closure"):
        CHANGES[name](types.SimpleNamespace(model=model))
        with nn.evaluating(model):
            expected = model(x).numpy()
        assert prediction(x).tobytes() == prediction(x).tobytes() == expected.tobytes()
    assert not prediction.not_recorded
