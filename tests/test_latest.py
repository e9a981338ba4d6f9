"""The shortcut of program/latest.py: a call that follows an equal one compares no settings, and misses no change."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.changes import latest_change
from minidl.engine.tensor import Tensor
from minidl.optim import SGD
from minidl.program.latest import COPIED
from minidl.program.replay import Gradient, Prediction
from minidl.program.workspace import Workspace

SHAPE = (3, 8, 8, 3)
RANDOM = np.random.default_rng(0)


class Scaled(nn.Module):
    """A network with a setting, and code that reads flags of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Linear(64, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y = self.linear(nn.GlobalAvgPool2d()(y).reshape(len(x), 64))
        return y * (self.scale if self.linear.weight.requires_grad else 3.0)


def images(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape or SHAPE).astype(np.float32)


def repeated(made: Prediction | Gradient, *batch: np.ndarray) -> None:
    """Call `made` until it takes the shortcut."""
    for _ in range(3):
        made(*batch)
    assert made.latest is not None


def compares(made: Prediction | Gradient, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows whenever `made` compares the settings."""
    calls, compare = [], made._renewed
    monkeypatch.setattr(made, "_renewed", lambda: (calls.append(1), compare())[1])
    return calls


def by_tape(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with nn.evaluating(model):
        return model(x).numpy()


def check(predict: Prediction, x: np.ndarray) -> None:
    np.testing.assert_allclose(predict(x), by_tape(predict.model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_equal_calls_compare_nothing(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    if flat:
        model.flatten()
    predict = Prediction(model)
    repeated(predict, images())
    calls = compares(predict, monkeypatch)
    some = images(), images()[:, ::-1], np.asfortranarray(images()), images()
    found = [*map(predict, some)]
    assert not calls
    for x, outputs in zip(some, found, strict=True):
        np.testing.assert_allclose(outputs, by_tape(model, x), rtol=1e-5, atol=1e-6)


def test_images_too_large_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    predict, large = Prediction(Scaled()), (8, 48, 48, 3)
    assert images(*large).nbytes > COPIED
    repeated(predict, images(*large))
    calls, x = compares(predict, monkeypatch), images(*large)
    found = predict(x)
    assert not calls
    np.testing.assert_allclose(found, by_tape(predict.model, x), rtol=1e-5, atol=1e-6)
    check(predict, images(*large)[:, ::-1])  # not contiguous


def flip(flag: bool) -> Callable[[Scaled], None]:
    def change(model: Scaled) -> None:
        model.linear.weight.requires_grad = flag

    return change


def replace_weight(model: Scaled) -> None:
    weight = model.linear.weight
    if weight.arena is None:
        weight.data = 2 * weight.data
    else:
        weight.copy_(2 * weight.data)


def replace_layer(model: Scaled) -> None:
    model.linear = nn.Linear(64, 4)


def rescale(model: Scaled) -> None:
    model.scale = 0.5


def new_statistics(model: Scaled) -> None:
    model.norm.running_mean.copy_(model.norm.running_mean.numpy() + 1)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("change", [flip(False), replace_weight, replace_layer, rescale, new_statistics])
def test_changes_of_the_model(change: Callable[[Scaled], None], flat: bool) -> None:
    model, x = Scaled(), images()
    if flat:
        model.flatten()
    predict = Prediction(model)
    repeated(predict, x)
    before = predict(x)
    change(model)
    for _ in range(4):
        check(predict, x)
    assert abs(predict(x) - before).max() > 1e-3


def test_a_model_that_moves_into_an_arena_and_out_of_it() -> None:
    model, x = Scaled(), images()
    predict = Prediction(model)
    repeated(predict, x)
    arena = model.flatten()
    check(predict, x)
    repeated(predict, x)
    model.linear.weight.copy_(2 * model.linear.weight.data)
    check(predict, x)
    repeated(predict, x)
    arena.dissolve()
    model.linear.weight.data[:] = 0.25
    check(predict, x)


def test_another_model_shape_type_or_container() -> None:
    predict = Prediction(Scaled())
    repeated(predict, images())
    check(predict, images(2, 8, 8, 3))
    check(predict, images(3, 9, 8, 3))
    repeated(predict, images())
    x = images()
    np.testing.assert_array_equal(predict(x.tolist()), predict(x))  # type: ignore[arg-type]
    np.testing.assert_array_equal(predict(Tensor(x)), predict(x))  # type: ignore[arg-type]
    repeated(predict, images())
    predict.model = Scaled()
    check(predict, x)


def test_settings_of_a_thread() -> None:
    predict, x, seen = Prediction(Scaled()), images(), []
    repeated(predict, x)
    with nn.watching(lambda module, output: seen.append(module)):
        check(predict, x)
    assert predict.model in seen
    found = []
    for fast in (True, False, True):
        with ops.conv.with_winograd(fast):
            check(predict, x)
            repeated(predict, x)
            found.append(predict.latest.program if predict.latest else None)
    assert found[0] is found[2] is not found[1]


def test_another_thread_has_its_own_settings() -> None:
    predict, x, found = Prediction(Scaled()), images(), []

    def other() -> None:
        with ops.conv.with_winograd(False):
            inside.set()
            outside.wait(60)  # meanwhile the main thread calls, and no setting changes after its calls
            predict(x)
            found.append(predict.latest)

    inside, outside = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    repeated(predict, x)
    latest = predict.latest
    outside.set()
    thread.join()
    assert latest is not None and found[0] is not latest


def test_a_workspace_that_grows() -> None:
    workspace = Workspace()
    small, large = (Prediction(Scaled(), workspace=workspace) for _ in range(2))
    repeated(small, images())
    check(large, images(4, 40, 40, 3))
    check(small, images())


def test_bound_vectors() -> None:
    model, x = Scaled(), images()
    arena = model.flatten()
    predict = Prediction(model)
    repeated(predict, x)
    before = predict(x)
    predict.bind(theta=np.zeros_like(arena.theta))
    assert not predict(x).any()
    predict.bind()
    np.testing.assert_array_equal(predict(x), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    predict, x = Prediction(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))), images()
    repeated(predict, x)
    other = copied(predict)
    other.model[1].weight.data[:] = 0
    np.testing.assert_allclose(other(x), np.broadcast_to(other.model[1].bias.numpy(), (3, 4)))
    check(predict, x)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of SGD with the shortcut, and changes between them, give the same bits as without it."""
    found, compared = [], []
    for shortcut in (True, False):
        random, model = np.random.default_rng(1), nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))
        for parameter in model.parameters():
            parameter.copy_(0.1 * random.standard_normal(parameter.shape))
        gradient, losses = Gradient(model, ops.cross_entropy), []
        optimizer = SGD(model, lr=0.1)
        calls = compares(gradient, monkeypatch)
        for step in range(12):
            x, y = random.standard_normal((6, 8, 8, 3)).astype(np.float32), random.integers(0, 4, 6)
            if step == 4:
                model[1].bias.requires_grad = False
            if step == 8:
                gradient.loss = lambda logits, labels: 2 * ops.cross_entropy(logits, labels)
            if not shortcut:
                gradient.latest = None
            losses.append(gradient(x, y))
            optimizer.step()
        found.append(losses)
        compared.append(len(calls))
    assert found[0] == found[1]
    assert compared[1] == 12 and compared[0] <= 6  # twice at the beginning and after each of the two changes


def test_a_fork_compares_again() -> None:
    before = latest_change()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, b"1" if latest_change() != before else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
    assert latest_change() == before
