"""While a recorded step runs, its threads stay on cores of their own; before and after, nothing is bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_void_p, cast

import numpy as np
import pytest

from minidl import nn
from minidl.engine import team
from minidl.engine.jit import set_threads, threads
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


@contextmanager
def watched(predict: Prediction, first_call: Callable[[], None]) -> Iterator[None]:
    """Call a function before the other calls of the program that has run."""
    (program,) = predict.programs.values()
    kernel = CFUNCTYPE(None, c_void_p)(lambda _: first_call())
    before, address = program.table, cast(kernel, c_void_p).value
    program.table = np.concatenate([np.array([[address, 0]]), before])
    yield
    program.table = before


def prediction() -> tuple[Prediction, np.ndarray]:
    """Return a prediction that has run several times, so that each call is short, and its images."""
    predict, x = Prediction(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))), np.ones((5, 2, 2, 3), np.float32)
    for _ in range(4):
        predict(x)
    return predict, x


def own_cores(seen: dict[int, set[int]]) -> list[tuple[int, ...]]:
    """Return the cores of the threads that have only one, sorted."""
    return sorted(tuple(each) for each in seen.values() if len(each) == 1)


def test_each_thread_has_a_core(every_core: None) -> None:
    predict, x = prediction()
    expected, seen = predict(x), []
    (program,) = predict.programs.values()
    program._short = False
    with watched(predict, lambda: seen.append(cores_of_all())):
        np.testing.assert_array_equal(predict(x), expected)
    (cores,) = seen
    assert len(cores[threading.get_native_id()]) == 1
    assert own_cores(cores) == [(core,) for core in sorted(CORES)]  # one thread for each; the others are not bound
    assert os.sched_getaffinity(0) == CORES


def test_a_short_step_leaves_a_thread_alone_that_is_on_its_own_core(every_core: None) -> None:
    predict, x = prediction()
    (first, *others), seen = sorted(CORES), []
    for core in CORES:
        found = set()
        for _ in range(20):  # the system may move the thread before the step begins
            os.sched_setaffinity(0, {core})  # now the thread is there
            os.sched_setaffinity(0, CORES)
            with watched(predict, lambda: seen.append(cores_of_all())):
                predict(x)
            cores = seen.pop()
            found.add(frozenset(cores.pop(threading.get_native_id())))
            assert own_cores(cores) == [(other,) for other in others]
            assert os.sched_getaffinity(0) == CORES
        assert found <= {frozenset(CORES), frozenset({first})}
        assert frozenset(CORES if core == first else {first}) in found


def test_a_thread_that_is_started_later_has_all_cores(every_core: None) -> None:
    predict, x = prediction()
    predict(x)
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert found == [CORES]


def test_fewer_threads_than_cores_are_not_bound(every_core: None) -> None:
    set_threads(len(CORES) - 1)
    team.renew()
    assert team.bind(team.cores(), False) == team.NOTHING
    assert os.sched_getaffinity(0) == CORES


def test_another_number_of_threads_or_other_cores(every_core: None) -> None:
    team.renew()
    assert team.bind(team.cores(), False) == team.RELEASE
    assert team.bind(team.cores(), False) == team.RENEW  # the thread has one core now
    team.release(team.cores())
    set_threads(len(CORES) - 1)
    assert team.bind(team.cores(), False) == team.RENEW


def test_a_process_that_loses_a_core(every_core: None) -> None:
    predict, x = prediction()
    expected, fewer = predict(x), sorted(CORES)[1:]
    os.sched_setaffinity(0, fewer)
    try:
        np.testing.assert_array_equal(predict(x), expected)
        assert os.sched_getaffinity(0) == {*fewer}
    finally:
        os.sched_setaffinity(0, CORES)


def test_a_core_that_is_not_available(every_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    def try_to_bind() -> None:  # in a new thread, which has a team of its own
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
        team.renew()
        found.append(team.bind(team.cores(), False))
        monkeypatch.undo()

    found: list[object] = []
    thread = threading.Thread(target=try_to_bind)
    thread.start()
    thread.join()
    assert found == [team.NOTHING]
