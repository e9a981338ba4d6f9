"""While a recorded step runs, its threads stay on cores of their own; before and after, nothing is bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from minidl import nn
from minidl.engine import team
from minidl.engine.jit import set_threads, threads
from minidl.program import table
from minidl.program.replay import Prediction

CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture
def every_core() -> Iterator[None]:
    before = threads()
    set_threads(len(CORES))
    if threads() != len(CORES):
        pytest.skip("Numba has fewer threads than cores")
    yield
    set_threads(before)
    assert os.sched_getaffinity(0) == CORES


def cores_of_all() -> dict[int, set[int]]:
    """Return the cores of each thread of this process."""
    return {int(number): os.sched_getaffinity(int(number)) for number in os.listdir("/proc/self/task")}


def test_each_thread_has_a_core(every_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    predict, x = Prediction(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))), np.ones((5, 2, 2, 3), np.float32)
    expected, seen, run = predict(x), [], table.run_calls

    def run_calls(*arguments: object) -> None:
        seen.append(cores_of_all())
        run(*arguments)

    monkeypatch.setattr(table, "run_calls", run_calls)
    np.testing.assert_array_equal(predict(x), expected)
    (cores,) = seen
    alone = [tuple(each) for each in cores.values() if len(each) == 1]
    assert len(cores[threading.get_native_id()]) == 1
    assert sorted(alone) == sorted((core,) for core in CORES)  # one thread for each core; the others are not bound
    assert os.sched_getaffinity(0) == CORES


def test_a_thread_that_is_started_later_has_all_cores(every_core: None) -> None:
    team.release(team.bind())
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert found == [CORES]


def test_cores_are_released_if_a_step_fails(every_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    predict, x = Prediction(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))), np.ones((5, 2, 2, 3), np.float32)
    predict(x)

    def fails(*_: object) -> None:
        assert len(os.sched_getaffinity(0)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "run_calls", fails)
    with pytest.raises(KeyboardInterrupt):
        predict(x)
    assert os.sched_getaffinity(0) == CORES


def test_fewer_threads_than_cores_are_not_bound(every_core: None) -> None:
    set_threads(len(CORES) - 1)
    assert team.bind() is None


def test_a_core_that_is_not_available(every_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    def try_to_bind() -> None:  # in a new thread, which has a team of its own
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
        found.append(team.bind())
        monkeypatch.undo()

    found: list[object] = []
    thread = threading.Thread(target=try_to_bind)
    thread.start()
    thread.join()
    assert found == [None]
