"""A gradient in parts equals the gradient of the whole batch, and each part has its own cores and memory."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import models, nn, ops
from minidl.engine import random
from minidl.engine.jit import threads
from minidl.errors import ConfigError, ShapeError
from minidl.program import partitioned
from minidl.program.partitioned import PartitionedGradient
from minidl.program.replay import Gradient

CORES = sorted(os.sched_getaffinity(0))


def batch(rows: int, shape: Sequence[int] = (12, 12, 1), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(seed)
    return values.standard_normal((rows, *shape)), values.integers(0, 10, rows)


def model_of(name: str, dtype: str = "float64") -> nn.Module:
    nn.seed(1)
    if name == "norm and dropout":
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(400, 10)]
        return nn.Sequential(*layers).astype(dtype)
    return models.build(name, (12, 12, 1), 10).astype(dtype)


def in_parts(model: nn.Module, parts: int, each: int = 1) -> PartitionedGradient:
    cores = [[CORES[part % len(CORES)]] for part in range(parts)]
    return PartitionedGradient(model, ops.cross_entropy, cores=cores, threads=each)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool(np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected))


@pytest.fixture(scope="module")
def whole() -> Gradient:
    return Gradient(model_of("mlp"), ops.cross_entropy)


@pytest.fixture(scope="module")
def parted() -> Iterator[dict[int, PartitionedGradient]]:
    yield {parts: in_parts(model_of("mlp"), parts) for parts in (2, 3, 4, 7)}


@settings(max_examples=25)
@given(parts=st.sampled_from([2, 3, 4, 7]), rows=st.integers(1, 9), cuts=st.sets(st.integers(0, 11)))
def test_equals_the_gradient_of_the_whole_batch(
    whole: Gradient, parted: dict[int, PartitionedGradient], parts: int, rows: int, cuts: set[int]
) -> None:
    """Also if parts have no rows, and in any ranges of the gradient."""
    gradient, (x, y) = parted[parts], batch(rows, seed=rows)
    loss, correct = whole(x, y)
    arena = gradient.model.flatten()
    arena.grad[:] = np.nan
    ends = [arena.slots[cut % len(arena.slots)].start for cut in sorted(cuts)]
    found = []
    for start, stop, done in gradient.parts(x, y, sorted({*ends, arena.size} if ends else ())):
        found.append((start, stop))
        assert 0 <= done <= 1 and close(arena.grad[start:stop], whole.arena.grad[start:stop], 1e-12)
    assert found == sorted(found, reverse=True)
    assert gradient.result == (pytest.approx(loss, rel=1e-12), correct)
    assert close(arena.grad, whole.arena.grad, 1e-12)


def test_float32_is_as_near_to_the_reference_as_without_parts() -> None:
    x, y = batch(64, seed=1)  # on a CPU with AMX, all images and a part of 16 use the same kernels
    reference, gradient = Gradient(model_of("lenet"), ops.cross_entropy), in_parts(model_of("lenet", "float32"), 4)
    single = Gradient(model_of("lenet", "float32"), ops.cross_entropy)
    reference(x, y)
    loss, correct = single(x.astype(np.float32), y)
    assert gradient(x.astype(np.float32), y) == (pytest.approx(loss, rel=1e-6), correct)
    assert close(gradient.arena.grad, single.arena.grad, 1e-6)
    error, usual = (np.linalg.norm(found.arena.grad - reference.arena.grad) for found in (gradient, single))
    assert error < 1.01 * usual


@pytest.mark.parametrize("rows", [8, 7])
def test_norm_and_dropout_are_those_of_each_part(rows: int) -> None:
    x, y = batch(rows)
    gradient = in_parts(model_of("norm and dropout"), 2)
    single = Gradient(model_of("norm and dropout"), ops.cross_entropy)
    random.seed(3)
    loss, _ = gradient(x, y)
    drawn = random.random_state()
    random.seed(3)
    before, found = single.model.statistics.theta.copy(), []
    for some in (slice(0, 4), slice(4, rows)):
        single.model.statistics.theta[:] = before
        loss -= single(x[some], y[some])[0] * len(y[some]) / rows
        found.append((single.arena.grad.copy(), single.model.statistics.theta.copy()))
    assert random.random_state() == drawn and abs(loss) < 1e-12
    share = (rows - 4) / rows
    for vector, one, two in zip((gradient.arena.grad, gradient.model.statistics.theta), *found, strict=True):
        assert close(vector, one + share * (two - one), 1e-12) and not close(one, two, 1e-3)


def trained(gradient: Gradient, steps: int = 4) -> list[bytes]:
    random.seed(5)
    arena, found = gradient.model.flatten(), []
    for step in range(steps):
        x, y = batch(9 - step % 2, seed=step)
        gradient(x.astype(arena.dtype), y)
        arena.theta[:] -= 0.1 * arena.grad
        arena.touch()
        found.append(arena.theta.tobytes() + gradient.model.statistics.theta.tobytes())
    return found


def test_bits_are_equal_from_run_to_run_with_any_threads_and_on_the_tape() -> None:
    found = [trained(in_parts(model_of("norm and dropout", "float32"), 3, each)) for each in (1, 1, 2)]
    with nn.watching(lambda module, output: None):  # then nothing is recorded
        found.append(trained(in_parts(model_of("norm and dropout", "float32"), 3)))
    assert found[0] == found[1] == found[2] == found[3] and len(set(found[0])) == 4


def test_the_replicas_of_a_simulation_bind_their_vectors() -> None:
    gradient, (x, y) = in_parts(model_of("mlp"), 2), batch(6)
    gradient(x, y)
    expected = gradient.arena.grad.copy()
    theta, grad = gradient.arena.theta.copy(), gradient.arena.new_vector()
    gradient.bind(theta=theta, grad=grad)
    gradient.arena.theta[:] = gradient.arena.grad[:] = np.nan
    gradient(x, y)
    np.testing.assert_array_equal(grad, expected)
    assert np.isnan(gradient.arena.grad).all()


def test_each_part_has_a_thread_on_its_cores_which_touches_its_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: dict[int, int] = {}
    fresh = partitioned.fresh

    def noted(size: int, dtype: Any) -> np.ndarray:
        vector = fresh(size, dtype)
        touched[vector.ctypes.data] = threading.get_native_id()
        return vector

    monkeypatch.setattr(partitioned, "fresh", noted)
    gradient = in_parts(model_of("norm and dropout"), 2, each=1)
    gradient(*batch(6))

    def place() -> tuple[int, set[int], int]:
        return threading.get_native_id(), os.sched_getaffinity(0), threads()

    found = [group.thread.submit(place).result() for group in gradient.groups]
    assert found[0][0] != found[1][0] and threading.get_native_id() not in (found[0][0], found[1][0])
    for cores, group, (thread, bound, number) in zip(gradient.cores, gradient.groups, found, strict=True):
        assert bound == set(cores) and number == 1
        assert group.vectors.keys() == {"theta", "grad", "statistics"}
        for memory in (*group.vectors.values(), group.workspace.memory):
            assert memory.size and touched[memory.ctypes.data] == thread
    assert os.sched_getaffinity(0) == set(CORES), "the calling thread stays where it was"


def test_the_caller_is_told_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a replica with long steps is not taken for a frozen one."""
    monkeypatch.setattr(partitioned, "BEAT", 0.001)
    gradient, calls = in_parts(model_of("mlp"), 2), []
    gradient.groups[1].thread.submit(threading.Event().wait, 0.1)
    gradient.waiting = lambda: calls.append(1)
    gradient(*batch(4))
    assert calls


def test_after_an_interrupt_no_part_computes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned, "BEAT", 0.001)
    gradient, (x, y) = in_parts(model_of("mlp"), 2), batch(4)
    expected = gradient(x, y)
    slow = gradient.groups[1].thread.submit(threading.Event().wait, 0.1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    gradient.waiting = interrupt
    with pytest.raises(KeyboardInterrupt):
        gradient(x, y)
    assert slow.done()
    gradient.waiting = lambda: None
    assert gradient(x, y) == expected


def test_bad_labels_are_refused_as_without_parts() -> None:
    x, y = batch(6)
    for labels, rows in ((np.where(np.arange(6) == 5, 99, y), x), (y[:5], x), (y, x[:5])):
        for gradient in (Gradient(model_of("mlp"), ops.cross_entropy), in_parts(model_of("mlp"), 2)):
            with pytest.raises(ShapeError):
                gradient(rows, labels)


def test_a_copy_has_its_own_groups() -> None:
    gradient, (x, y) = in_parts(model_of("mlp"), 2), batch(6)
    expected = gradient(x, y)
    other = copy.deepcopy(gradient)
    gradient.arena.theta[:] = np.nan
    gradient.arena.touch()
    assert other(x, y) == expected and len(other.groups) == 2 and not {*other.groups} & {*gradient.groups}


def test_a_layer_that_changed_is_detected() -> None:
    nn.seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    gradient, (x, y) = in_parts(model.astype("float64"), 2), batch(6)
    gradient(x, y)
    setattr(model, "1", nn.Sequential(nn.Linear(144, 12), nn.Linear(12, 10)).astype("float64"))
    loss, correct = gradient(x, y)
    found = gradient.arena.grad.copy()
    assert Gradient(model, ops.cross_entropy)(x, y) == (pytest.approx(loss, rel=1e-12), correct)
    assert close(found, gradient.arena.grad, 1e-12)


def test_a_threading_layer_of_one_thread_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned, "one_at_a_time", lambda: True)
    with pytest.raises(ConfigError, match="parts 2: Numba's threading layer, workqueue"):
        in_parts(model_of("mlp"), 2)
