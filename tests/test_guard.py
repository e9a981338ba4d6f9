"""A recording leaves no trace: not in the model, in caches, in other threads, or in the objects that record."""

from __future__ import annotations

import functools
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import MinidlError
from minidl.program.replay import Gradient, Prediction
from minidl.program.replayed import PATIENCE
from tests.twins import Twins, batch, plain

QUEUE: queue.SimpleQueue[Tensor] = queue.SimpleQueue()


@functools.lru_cache
def scale_of(model: Scaled) -> Tensor:
    return ops.exp(model.scale)


@functools.cache
def drawn() -> float:
    return 1.0 + np.random.random()


@functools.cache
def rows() -> list[float]:
    return [2.0]


class Scaled(nn.Module):
    """A model whose forward pass multiplies the output by the result of the given function."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        self.fc, self.drop, self.scale = nn.Linear(4, 3), nn.Dropout(0.5), Parameter(np.full((6, 3), 2.0, np.float32))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.fc(x))
        return y * self.function(self, y)


def test_a_cached_tensor_is_not_of_a_recording() -> None:
    """The cache must keep the tensor that the tape computes, and the step must run on the tape."""
    model = Scaled(lambda self, y: scale_of(self))
    prediction = Prediction(model)
    scale_of.cache_clear()
    with pytest.warns(UserWarning, match="keeps tensors of a step") as caught:
        found = [prediction(batch()[0]) for _ in range(3)]
    assert len(caught) == 1
    with nn.evaluating(model):
        expected = model(batch()[0]).numpy()
    np.testing.assert_allclose(expected, model.fc(Tensor(batch()[0])).numpy() * np.exp(2), rtol=1e-5)
    assert all((each == expected).all() for each in found)


def test_a_cached_random_number_is_not_of_a_recording() -> None:
    def build() -> tuple[nn.Module, Any]:
        drawn.cache_clear()
        return nn.Linear(4, 3), lambda logits, y: plain(logits, y) * drawn()

    found = []
    for replay in (True, False):
        gradient = Gradient(*build())
        gradient.model.fc = gradient.model.flatten().theta[:] = 0.5
        np.random.seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([(gradient if replay else gradient.by_tape)(*batch()) for _ in range(2)])
    assert found[0] == found[1]


def test_cached_numbers_are_recorded() -> None:
    twins = Twins(lambda: (nn.Linear(4, 3), lambda logits, y: plain(logits, y) * rows()[0]))
    twins.step(*batch())
    assert twins.replayed.programs


def test_a_tensor_that_outlives_its_recording_cannot_be_used() -> None:
    prediction = Prediction(Scaled(lambda self, y: QUEUE.put(y) or 1.0))
    with pytest.warns(UserWarning, match="keeps tensors of a step"):
        prediction(batch()[0])
    kept = QUEUE.get()
    uses: list[Callable[[], Any]] = [
        lambda: kept + 1, lambda: ops.relu(kept), lambda: kept.numpy() + 1, lambda: np.asarray(kept),
        lambda: repr(kept), lambda: kept.detach().item(), lambda: kept.reshape(-1), lambda: nn.Linear(3, 3)(kept),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(MinidlError, match="do not keep tensors of one step for another"):
            use()


def test_a_variable_of_a_recursive_function_does_not_outlive_the_step() -> None:
    def factor(self: Scaled, y: Tensor) -> Tensor:
        def power(count: int) -> Tensor:
            return ops.exp(y) if count == 0 else power(count - 1)

        return power(3)

    prediction = Prediction(Scaled(factor))
    prediction(batch()[0])
    assert prediction.programs and not prediction.not_recorded


class Trainer:
    """A user's trainer, whose loss may read the trainer."""

    def __init__(self, reads: Callable[[Trainer], float]) -> None:
        self.smoothing, self.reads, self.training = 0.1, reads, 2.0
        self.gradient = Gradient(nn.Linear(4, 3), self.loss)

    def loss(self, logits: Tensor, y: np.ndarray) -> Tensor:
        return ops.cross_entropy(logits, y) * self.reads(self)


READS: dict[str, Callable[[Any], float]] = {
    "getattr": lambda trainer: getattr(trainer, "smooth" + "ing"),
    "vars": lambda trainer: vars(trainer)["smoothing"],
    "training": lambda trainer: trainer.training if trainer.gradient else 0.0,
    "model": lambda trainer: float(len(list(trainer.gradient.model.parameters()))),
}


@pytest.mark.parametrize("name", READS)
def test_a_loss_may_reach_its_own_gradient(name: str) -> None:
    twins = [Trainer(READS[name]) for _ in range(2)]
    twins[1].gradient.model.load_state_dict(twins[0].gradient.model.state_dict())
    for count in (6, 5, 6):
        x, y = batch(count)
        assert twins[0].gradient(x, y) == twins[1].gradient.by_tape(x, y)
    assert len(twins[0].gradient.programs) == 2 and not twins[0].gradient.not_recorded


def test_a_loss_that_reads_the_last_result_runs_on_the_tape() -> None:
    trainer = Trainer(lambda trainer: 1.0 + trainer.gradient.result[0])
    found, expected = [], []
    with pytest.warns(UserWarning, match="result changes from step to step"):
        found = [trainer.gradient(*batch()) for _ in range(8)]
    trainer.gradient.result = (0.0, 0)
    for _ in range(8):
        trainer.gradient.result = trainer.gradient.by_tape(*batch())
        expected.append(trainer.gradient.result)
    assert found == expected


def test_a_layer_that_keeps_its_own_mode_is_recorded() -> None:
    """Monte Carlo dropout: the layer is in training mode while the model is evaluated."""
    prediction = Prediction(Scaled(lambda self, y: self.drop.train() and 1.0))
    prediction(batch()[0])
    assert prediction.programs and {module.training for module in prediction.modules} == {True}


def test_a_recording_keeps_the_mode_that_another_thread_restores() -> None:
    prediction = Prediction(Scaled(lambda self, y: 1.0))
    other, record = nn.evaluating(prediction.model), prediction.record
    other.__enter__()  # stands for another thread, whose evaluation ends during the recording

    def recorded(*batch: Any) -> Any:
        results = record(*batch)
        if not ended:
            ended.append(other.__exit__(None, None, None))
        return results

    ended: list[Any] = []
    prediction.record = recorded  # type: ignore[method-assign]
    prediction(batch()[0])
    assert ended and all(module.training for module in prediction.modules)


def test_a_recording_that_fails_by_chance_is_repeated() -> None:
    prediction = Prediction(Scaled(lambda self, y: 1.0))
    record, drawn = prediction.record, []

    def disturbed(*batch: Any) -> Any:
        if not drawn:
            drawn.append(np.random.random())  # as another thread may do
        return record(*batch)

    prediction.record = disturbed  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"np\.random"):
        prediction(batch()[0])
    prediction(batch()[0])
    assert prediction.programs and not prediction.not_recorded


def test_recordings_that_always_fail_end() -> None:
    prediction = Prediction(Scaled(lambda self, y: y.sum().item()))
    record, calls = prediction.record, []
    prediction.record = lambda *batch: calls.append(batch) or record(*batch)  # type: ignore[method-assign,assignment]
    with pytest.warns(UserWarning, match="values are read") as caught:
        for _ in range(2 * PATIENCE):
            prediction(batch()[0])
    assert len(calls) == PATIENCE and len(caught) == 1


def test_a_step_whose_calls_differ_is_not_recorded_again() -> None:
    """Two equal recordings later would prove nothing: the step depends on something that is not in the fingerprint."""
    factors = [1.0, 2.0]
    prediction = Prediction(Scaled(lambda self, y: 1.0))
    record = prediction.record

    def varying(recorder: Any, batch: Any) -> Any:
        results = record(recorder, batch)
        recorder.calls[-1] = recorder.calls[-1].replaced(varying=factors.pop() if factors else 3.0)
        return results

    prediction.record = varying  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="calls differ"):
        prediction(batch()[0])
    prediction(batch()[0])
    assert not prediction.programs and not factors


def test_recordings_of_two_threads_do_not_overlap() -> None:
    """Otherwise the recording that ends last would restore the random states from the middle of the other one."""
    first, second = (Prediction(Scaled(lambda self, y: 1.0)) for _ in range(2))
    inside, over = threading.Event(), threading.Event()
    record_first, record_second = first.record, second.record

    def wait_for_second(*batch: Any) -> Any:
        thread.start() if not thread.ident else None
        inside.wait(0.2)
        return record_first(*batch)

    def wait_for_first(*batch: Any) -> Any:
        inside.set()
        over.wait(0.2)
        return record_second(*batch)

    first.record, second.record = wait_for_second, wait_for_first  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: second(batch()[0]))
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    first(batch()[0])
    over.set()
    thread.join()
    assert np.random.random() == expected
    assert first.programs and second.programs
