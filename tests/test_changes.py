"""What a user changes between two steps is noticed: the recorded step equals the tape, or is refused with a warning."""

from __future__ import annotations

import collections
import functools
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
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
    """A loss object, and a trainer: `steps` changes at every step but is not read by the loss."""

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
    """A trainer's count of steps, a history in the model, other modules: the recorded step remains valid."""

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
    twins.step(*batch())
    twins.step(*batch())
    assert len(twins.replayed.programs) == 1 and not twins.replayed.not_recorded


# Steps that cannot be recorded.


class Odd(nn.Module):
    """A model with the given function in its forward pass: it returns a factor of the output."""

    def __init__(self, function: Callable[[Odd, Tensor], Any]) -> None:
        self.fc, self.norm, self.function = nn.Linear(4, 3), nn.BatchNorm1d(3), function
        self.count, self.counts, self.rng, self.python = 0, [0], np.random.default_rng(3), random.Random(3)
        self.last: Any = None
        self.order = iter([1.0] * 1000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.fc(x))
        return y * self.function(self, y)


def counted(self: Odd, y: Tensor) -> float:
    self.count += 1
    return 1.0 if self.count > 4 else 2.0


def appended(self: Odd, y: Tensor) -> float:
    self.counts.append(1)
    return len(self.counts)


def kept(self: Odd, y: Tensor) -> float:
    self.last = y
    return 1.0


def caught(self: Odd, y: Tensor) -> float:
    try:
        return float(y.numpy().max())
    except Exception:
        return 1.0


def switched(self: Odd, y: Tensor) -> float:
    self.fc.weight.requires_grad = not self.fc.weight.requires_grad
    return 1.0


def overwritten(self: Odd, y: Tensor) -> float:
    self.fc.bias.copy_(np.ones(3))
    return 1.0


ODD: dict[str, Callable[[Odd, Tensor], Any]] = {
    "np.random": lambda self, y: 1.0 if np.random.random() < 0.5 else 2.0,
    "rare": lambda self, y: 1.0 if np.random.random() < 0.9 else 2.0,
    "random": lambda self, y: 1.0 if random.random() < 0.1 else 2.0,
    "generator": lambda self, y: 1.0 if self.rng.random() < 0.1 else 2.0,
    "python generator": lambda self, y: 1.0 if self.python.random() < 0.1 else 2.0,
    "new generator": lambda self, y: 1.0 if np.random.default_rng(self.fc.weight.size).random() < 2 else 2.0,
    "seeded": lambda self, y: (np.random.seed(3), np.random.random())[1],
    "counter": counted,
    "list": appended,
    "kept output": kept,
    "iterator": lambda self, y: next(self.order),
    "asarray": lambda self, y: 1.0 if np.asarray(y).max() > 0 else 2.0,
    "array": lambda self, y: float(np.array(y)[0, 0]),
    "memoryview": lambda self, y: memoryview(y.data)[0, 0],
    "data": lambda self, y: float(y.data.max()),
    "flat": lambda self, y: float(next(y.data.flat)),
    "item": lambda self, y: y.sum().item(),
    "float": lambda self, y: float(y.sum()),
    "caught": caught,
    "weight": lambda self, y: float(self.fc.weight.data.max()),
    "weight by numpy": lambda self, y: float(self.fc.weight.numpy().sum()),
    "statistics": lambda self, y: float(self.norm.running_mean.data.max()) + 1,
    "gradient": lambda self, y: 1.0 if self.fc.weight.grad is None else float(self.fc.weight.grad.sum()),
    "state_dict": lambda self, y: float(self.state_dict()["fc.weight"].max()),
    "requires_grad": switched,
    "overwritten": overwritten,
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_recorded_runs_on_the_tape(name: str) -> None:
    twins = Twins(lambda: (Odd(ODD[name]), plain))
    with pytest.warns(UserWarning, match="runs without a recorded program") as caught:
        for step in range(5):
            twins.change(lambda g, step=step: g.model.fc.weight.copy_(g.model.fc.weight.numpy() + step))
            twins.step(*batch(seed=step))
    assert len(caught) == 1
    one, other = (gradient.model for gradient in twins.pair)
    assert (one.count, one.counts) == (other.count, other.counts)
    assert one.rng.random() == other.rng.random() and one.python.random() == other.python.random()


LABELS: dict[str, Callable[[np.ndarray], float]] = {
    "asarray": lambda y: float(np.asarray(y).max()),
    "array": lambda y: float(np.array(y)[0]),
    "index": lambda y: float(y[0]),
    "method": lambda y: float(y.max()),
    "memoryview": lambda y: float(memoryview(y)[0]),
    "flat": lambda y: float(next(y.flat)),
    "one-hot": lambda y: float(np.eye(3)[y][0, 0]),
    "gathered": lambda y: float(np.arange(10)[y].sum()),
    "comparison": lambda y: 1.0 if (y == 0).any() else 2.0,
    "arithmetic": lambda y: float((y + np.arange(len(y)))[0]),
    "list": lambda y: float(max(list(y))),
    "frombuffer": lambda y: float(np.frombuffer(y, np.int64)[0]),
    "caught": lambda y: float(y[0]) if hasattr(y, "sum") else 1.0,
}


@pytest.mark.parametrize("name", LABELS)
def test_a_loss_that_reads_labels_runs_on_the_tape(name: str) -> None:
    twins = Twins(lambda: (nn.Linear(4, 3), lambda logits, y: plain(logits, y) * (1.0 + LABELS[name](y))))
    with pytest.warns(UserWarning, match="runs without a recorded program"):
        for step in range(3):
            twins.step(*batch(seed=step))


def test_labels_for_each_token_are_recorded() -> None:
    def loss(logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits.reshape(-1, 5), y.reshape(-1))

    twins = Twins(lambda: (nn.Linear(4, 5), loss))
    rng = np.random.default_rng(0)
    for _ in range(2):
        twins.step(rng.standard_normal((3, 7, 4)).astype(np.float32), rng.integers(5, size=(3, 7)))
    assert twins.replayed.programs


@pytest.mark.parametrize("loss", [plain, lambda logits, y: (logits * logits).mean()])
def test_labels_that_do_not_fit_the_batch_are_refused(loss: Loss) -> None:
    gradient = Gradient(nn.Linear(4, 3), loss)
    x, y = batch(8)
    gradient(x, y)
    for labels in (y[:5], y[:0], np.concatenate([y, y]), y.reshape(2, 4)[:1]):
        with pytest.raises(ShapeError, match="labels"):
            gradient(x, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradient(x, y) == gradient.by_tape(x, y) and gradient.programs


def test_an_empty_batch_does_not_end_recording() -> None:
    twins = Twins(lambda: (nn.Linear(4, 3), plain))
    for count in (0, 6, 0, 5):
        twins.step(*batch(count))
    assert len(twins.replayed.programs) == 2
    prediction = Prediction(nn.Linear(4, 3))
    assert prediction(np.zeros((0, 4), np.float32)).shape == (0, 3)
    prediction(batch()[0])
    assert len(prediction.programs) == 1


def test_a_value_computed_at_the_first_call_is_recorded_at_the_second() -> None:
    def lazy(self: Odd, y: Tensor) -> float:
        if self.last is None:
            self.last = 2.0
        return self.last

    twins = Twins(lambda: (Odd(lazy), plain))
    with pytest.warns(UserWarning, match="last changes"):
        twins.step(*batch())
    twins.step(*batch())
    assert len(twins.replayed.programs) == 1 and not twins.replayed.not_recorded


def test_a_recording_leaves_no_trace() -> None:
    def trace(self: Odd, y: Tensor) -> float:
        self.counts.append(1), self.rng.random(), np.random.random(), random.random(), self.python.random()
        self.last, self.new = y, 1
        return 1.0

    twins = Twins(lambda: (Odd(trace), plain))
    gradient = twins.replayed
    states = np.random.get_state()[1].tobytes(), random.getstate(), gradient.model.rng.bit_generator.state
    with pytest.warns(UserWarning):
        gradient.prepare(*batch())
    model = gradient.model
    assert (model.counts, model.last, hasattr(model, "new")) == ([0], None, False)
    assert states == (np.random.get_state()[1].tobytes(), random.getstate(), model.rng.bit_generator.state)


def test_large_settings_are_refused() -> None:
    table = list(range(5000))
    twins = Twins(lambda: (nn.Linear(4, 3), lambda logits, y: plain(logits, y) * table[1]))
    with pytest.warns(UserWarning, match="table is too large to compare"):
        twins.step(*batch())
    table[1] = 7
    twins.step(*batch())


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


def test_a_step_on_the_tape_uses_bound_vectors() -> None:
    """Replicas in a simulation share a model, and each has its own weights."""
    gradient = Gradient(Odd(ODD["rare"]), plain)
    theta, grad = gradient.arena.new_vector(), gradient.arena.new_vector()
    gradient.bind(theta=theta, grad=grad)
    with pytest.warns(UserWarning):
        loss, _ = gradient(*batch())
    assert loss == np.float32(np.log(3)) and grad.any()
