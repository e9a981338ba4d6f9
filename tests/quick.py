"""Which cases of a parametrised test are quick. The others repeat what these show, and run with `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(every: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return all cases; those that are not `chosen` are slow. A tuple contains the values of several parameters.

    Raises ValueError if a chosen case is missing.
    """
    cases = [*every]
    if missing := [one for one in chosen if one not in cases]:
        raise ValueError(f"no such cases: {missing}")
    values = [one if isinstance(one, tuple) else (one,) for one in cases]
    return [pytest.param(*each, marks=[pytest.mark.slow] * (one not in chosen)) for one, each in zip(cases, values)]
