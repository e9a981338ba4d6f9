"""What cannot be recorded runs on the tape, with one warning, and recordings leave no trace."""

from __future__ import annotations

import _thread
import datetime
import random
import secrets
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine import random as random_numbers
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.program.replay import Gradient, Prediction
from tests.twins import Loss, Twins, batch, plain


class Odd(nn.Module):
    """A model whose forward pass multiplies the output by the result of the given function."""

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


def refused(self: Odd, y: Tensor) -> Any:
    try:
        return y + LIMITS
    except Exception:
        return 1.0


def replaced(self: Odd, y: Tensor) -> float:
    try:
        return float(y.numpy().max())
    except Exception as error:
        raise ValueError("no maximum") from error


def toggled(self: Odd, y: Tensor) -> float:
    self.training = not self.training
    return 1.0 if self.training else 2.0


def by_other_thread(self: Odd, y: Tensor) -> Any:
    """Normalise in a thread of `_thread`, which minidl/program/libraries.py does not list."""
    found: list[Any] = []
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        try:
            found.append(self.norm(y.detach()))
        except Exception as error:
            found.append(error)
        done.release()

    _thread.start_new_thread(work, ())
    done.acquire()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0].sum()


LIMITS = np.ones(3, np.float32)
POOL = ThreadPoolExecutor(1)
TEACHER = Prediction(nn.Linear(4, 3))
TODAY = datetime.date.today


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
    "refused and caught": refused,
    "another exception": replaced,
    "training": toggled,
    "theta": lambda self, y: float(np.asarray(self.arena.theta).max()),
    "theta by view": lambda self, y: float(self.arena.theta.view(np.ndarray).max()),
    "theta by memoryview": lambda self, y: float(max(memoryview(self.arena.theta))),
    "statistics by memoryview": lambda self, y: 1 + float(max(memoryview(self.statistics.theta))),
    "version": lambda self, y: 1.0 + self.fc.weight.arena.version,
    "copied tensor": lambda self, y: float(np.asarray(Tensor(y).data).max()),
    "drawn, bits": lambda self, y: 1.0 + (random_numbers.draw(1)[1] & 1),
    "drawn, shift": lambda self, y: 1.0 + (random_numbers.draw(1)[1] >> 1),
    "drawn, divmod": lambda self, y: 1.0 + divmod(random_numbers.draw(1)[1], 2)[1],
    "drawn, comparison": lambda self, y: 1.0 if random_numbers.draw(1)[1] > 2 else 2.0,
    "drawn, equality": lambda self, y: 1.0 if random_numbers.draw(1)[1] == 2 else 2.0,
    "drawn, boolean": lambda self, y: 1.0 if random_numbers.draw(1)[1] else 2.0,
    "drawn, hash": lambda self, y: 1.0 + hash(random_numbers.draw(1)) % 3,
    "drawn, float": lambda self, y: 1.0 + float(random_numbers.draw(1)[1]),
    "drawn, power": lambda self, y: 1.0 + random_numbers.draw(1)[1] ** 2,
    "drawn, text": lambda self, y: float(f"1{random_numbers.draw(1)[1]}"),
    "drawn, index": lambda self, y: float(np.arange(100)[random_numbers.draw(1)[1]]),
    "drawn, array": lambda self, y: float(np.asarray(random_numbers.draw(1)[1], np.float32)),
    "executor": lambda self, y: POOL.submit(self.norm, y).result().sum(),
    "value by an executor": lambda self, y: POOL.submit(lambda: float(self.fc.weight.numpy().max())).result(),
    "thread": by_other_thread,
    "prediction": lambda self, y: float(TEACHER(np.ones((6, 4), np.float32))[0, 0]),
    "local time": lambda self, y: 1.0 if time.localtime().tm_year else 2.0,
    "formatted time": lambda self, y: 1.0 if time.strftime("%Y") else 2.0,
    "date": lambda self, y: 1.0 if datetime.datetime.now() else 2.0,
    "method of a date": lambda self, y: 1.0 if TODAY() else 2.0,
    "token": lambda self, y: 1.0 if secrets.token_urlsafe() else 2.0,
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


def test_labels_are_an_array_for_isinstance() -> None:
    def loss(logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, y, 0.3 if isinstance(y, np.ndarray) else 0.0)

    twins = Twins(lambda: (nn.Linear(4, 3), loss))
    for step in range(2):
        twins.step(*batch(seed=step))
    assert twins.replayed.programs


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


def test_a_step_on_the_tape_uses_bound_vectors() -> None:
    """Replicas in a simulation share a model, and each has its own weights."""
    gradient = Gradient(Odd(ODD["rare"]), plain)
    theta, grad = gradient.arena.new_vector(), gradient.arena.new_vector()
    gradient.bind(theta=theta, grad=grad)
    with pytest.warns(UserWarning):
        loss, _ = gradient(*batch())
    assert loss == np.float32(np.log(3)) and grad.any()
