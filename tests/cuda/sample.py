"""Which cases of a parametrised test run by default. All of them together would take half an hour on two cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def each(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases. The first of each `step` is quick; the others are slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (k % step > 0)) for k, case in enumerate(cases)]


def each_row(step: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As `each`, for cases that are the values of several parameters."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (k % step > 0)) for k, case in enumerate(cases)]
