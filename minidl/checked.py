"""Checks of arguments that users give in Python. Each raises a ConfigError that shows the value and what was expected.

    self.p = real("Dropout", "p", p, below=1)        ConfigError: Dropout: p = 2; expected 0 <= p < 1

NumPy's numbers are accepted as numbers. Booleans are not.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from minidl.errors import ConfigError, nearest

LONGEST = 60  # characters of a value in a message


def whole(where: str, name: str, value: Any, least: float = 0) -> int:
    """Return a whole number of `least` or more as an int. where: the beginning of the message."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        limits = f" of {least} or more" if math.isfinite(least) else ""
        raise ConfigError(f"{where}: {name} = {shown(value)}; expected a whole number{limits}")
    return int(value)


def real(where: str, name: str, value: Any, least: float = 0.0, below: float = math.inf) -> float:
    """Return a finite number, least <= value < below, as a float. where: the beginning of the message."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number with hundreds of digits
            number = math.inf
    if not (math.isfinite(number) and least <= number < below):
        limits = f"{least:g} <= {name} < {below:g}" if math.isfinite(below) else "a finite number" + (
            f" >= {least:g}" if math.isfinite(least) else "")  # fmt: skip
        raise ConfigError(f"{where}: {name} = {shown(value)}; expected {limits}")
    return number


def one_of(what: str, value: Any, known: Collection[str], others: str = "") -> str:
    """Return a word that is in `known`. what: the kind of thing that it names. others: added to the message."""
    if not isinstance(value, str) or value not in known:
        hint = nearest(value, list(known)) if isinstance(value, str) else ""
        raise ConfigError(f"unknown {what} {shown(value)}: expected one of {', '.join(known)}{others}.{hint}")
    return value


def shown(value: Any) -> str:
    """Format a value for a message, in one line: text and numbers as Python writes them, others by their type."""
    plain = value is None or isinstance(value, str | bytes | Real)
    if plain or (isinstance(value, tuple | list) and len(value) <= 4 and all(isinstance(v, str | Real) for v in value)):
        try:
            words = repr(value[:LONGEST] if isinstance(value, str | bytes) else value)
        except ValueError:  # a number with thousands of digits
            return "a very long number"
        return words if len(words) <= LONGEST else words[:LONGEST] + "..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__.removeprefix("nd")  # "array" instead of "ndarray"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
