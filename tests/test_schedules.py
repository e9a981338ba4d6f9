"""Learning-rate schedules: their shapes and their errors. test_parity_optim.py compares them with PyTorch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import schedules
from minidl.errors import ConfigError


def curve(name: str, total: int, warmup: int = 0) -> list[float]:
    """Return the factors of all steps and of the step after the last."""
    return [schedules.build(name, total, warmup)(step) for step in range(total + 1)]


def test_constant() -> None:
    assert curve("constant", 7) == [1.0] * 8


def test_steps() -> None:
    assert curve("steps", 8) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])
    assert curve("steps", 7)[:7] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01])  # 3.5 and 5.25 are rounded up


def test_cosine() -> None:
    factors = curve("cosine", 10)
    assert factors[0] == 1 and factors[5] == pytest.approx(0.5) and factors[10] == pytest.approx(0, abs=1e-15)
    assert factors[2] == pytest.approx((1 + math.cos(math.pi / 5)) / 2)
    assert factors == sorted(factors, reverse=True)


def test_one_cycle() -> None:
    factors = curve("one-cycle", 100)
    assert factors[0] == pytest.approx(1 / 25) and factors[30] == 1 and factors[100] == pytest.approx(4e-6)
    assert factors[15] == pytest.approx((1 + 1 / 25) / 2)  # halfway up a cosine
    assert factors[:31] == sorted(factors[:31]) and factors[30:] == sorted(factors[30:], reverse=True)


def test_lines() -> None:
    assert curve("linear", 8) == pytest.approx([1 - step / 8 for step in range(9)])
    factors = curve("triangle", 100)
    assert [factors[step] for step in (0, 23, 100)] == pytest.approx([0.2, 1, 0.07])
    slopes = [after - before for before, after in pairwise(factors)]
    assert slopes == pytest.approx([0.8 / 23] * 23 + [-0.93 / 77] * 77)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_warm_up_is_a_straight_line_to_the_schedule(name: str) -> None:
    plain, warm = curve(name, 40), curve(name, 49, 9)
    assert warm[9:] == plain
    assert warm[:9] == pytest.approx([plain[0] * (step + 1) / 10 for step in range(9)])


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@given(total=st.integers(0, 300), data=st.data())
def test_every_factor_lies_between_zero_and_one(name: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    schedule = schedules.build(name, total, warmup)
    factors = [schedule(step) for step in range(total + 10)]  # also after the last step
    assert all(0 <= factor <= 1 for factor in factors)
    assert warmup == total or set(factors[total:]) == {factors[total]}
    assert all(factor > 0 for factor in factors[:total]), "a step with learning rate 0 is wasted"


@given(name=st.sampled_from(list(schedules.SCHEDULES)), total=st.integers(1, 300), step=st.integers(0, 400))
def test_a_schedule_is_a_function_of_the_step_alone(name: str, total: int, step: int) -> None:
    """So a resumed run needs only the number of the step to continue the schedule."""
    used = schedules.build(name, total, total // 10)
    for other in range(total):
        used(other)
    assert used(step) == schedules.build(name, total, total // 10)(step)


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"unknown schedule 'cosin': .* Did you mean 'cosine'"):
        schedules.build("cosin", 10)
    for warmup in (-1, 11):
        with pytest.raises(ConfigError, match=f"warm-up of {warmup} steps; expected 0 to 10"):
            schedules.build("cosine", 10, warmup)
