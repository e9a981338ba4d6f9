"""Descriptions of values that come from a file, and the check of a value against one of them.

    PROGRESS = record({"step": whole(), "lr": number(), "name": text()})
    PROGRESS({"step": -1, "lr": 0.1, "name": "a"})        Mismatch: step is -1; expected a whole number of 0 or more

A description is a function of a value and its name. It raises Mismatch if the value does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 2**53  # whole numbers up to this one are exact as float64, which statistics use


class Mismatch(ValueError):
    """A value in a file is not as expected. The message names the value, not the file."""


Kind = Callable[..., None]  # (value, name="") -> None


def whole(least: int = 0, most: int = LARGEST) -> Kind:
    """Describe a whole number from `least` to `most`."""
    limits = f"of {least} or more" if most == LARGEST else f"from {least} to {most}"

    def check(value: Any, name: str = "") -> None:
        if type(value) is not int or not least <= value <= most:  # not isinstance: bool is a subclass of int
            raise _mismatch(value, name, f"a whole number {limits}")

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Kind:
    """Describe a finite number from `least` to `most`."""
    limits = "" if math.isinf(most) and math.isinf(least) else (
        f" of {least:g} or more" if math.isinf(most) else f" from {least:g} to {most:g}")  # fmt: skip

    def check(value: Any, name: str = "") -> None:
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise _mismatch(value, name, f"a finite number{limits}")

    return check


def count_or_number(most: int = LARGEST) -> Kind:
    """Describe a whole number from 0 to `most`, or any finite number with a decimal point."""
    count, decimal = whole(0, most), number()

    def check(value: Any, name: str = "") -> None:
        (decimal if isinstance(value, float) else count)(value, name)

    return check


def text(pattern: str = "", words: str = "text") -> Kind:
    """Describe a string that matches a regular expression completely. words: how messages describe it."""

    def check(value: Any, name: str = "") -> None:
        if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value)):
            raise _mismatch(value, name, words)

    return check


def several(kind: Kind, least: int = 0, most: int = LARGEST) -> Kind:
    """Describe a list of `least` to `most` values of one kind."""
    count = str(least) if least == most else f"{least} or more" if most == LARGEST else f"{least} to {most}"

    def check(value: Any, name: str = "") -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _mismatch(value, name, f"a list of {count} values")
        for number, one in enumerate(value):
            kind(one, f"{name}[{number}]")

    return check


def record(kinds: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None, others: bool = False) -> Kind:
    """Describe a table with these keys. others: whether further keys are allowed."""
    allowed = {**kinds, **(optional or {})}

    def check(value: Any, name: str = "") -> None:
        if not isinstance(value, dict):
            raise _mismatch(value, name, "a table")
        inside = f"{name} has" if name else "there is"
        for key in kinds:
            if key not in value:
                raise Mismatch(f"{inside} no {key!r}")
        for key, one in value.items():
            if key in allowed:
                allowed[key](one, f"{name}.{key}" if name else key)
            elif not others:
                raise Mismatch(f"{inside} an unknown key {shown(key)}; expected {', '.join(allowed)}")

    return check


def mapping(kind: Kind, key: Kind | None = None) -> Kind:
    """Describe a table whose values are all of one kind. key: the kind of its keys (None: any keys)."""

    def check(value: Any, name: str = "") -> None:
        if not isinstance(value, dict):
            raise _mismatch(value, name, "a table")
        for word, one in value.items():
            if key:
                key(word, f"{name} key")
            kind(one, f"{name}.{named(word)}")

    return check


def maybe(kind: Kind) -> Kind:
    """Describe a value of a kind, or None."""

    def check(value: Any, name: str = "") -> None:
        if value is not None:
            kind(value, name)

    return check


def is_plain(text: str) -> bool:
    """Return whether a text is valid Unicode without null characters."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON or from a file name that is not UTF-8
        return False
    return "\0" not in text


def named(name: str) -> str:
    """Format a name from a file for a message: unchanged if it is short and printable, else as in `shown`."""
    return name if name.isprintable() and len(name) <= 100 else shown(name)


def shown(value: Any) -> str:
    """Format a value for a message, in at most 64 characters. Tables and lists are only counted."""
    if isinstance(value, (dict, list)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to format very long numbers
        return f"a number of {value.bit_length():,} bits"
    words = repr(value[:60] if isinstance(value, str) else value)
    return words if len(words) <= 64 else words[:60] + "..."


def _mismatch(value: Any, name: str, expected: str) -> Mismatch:
    return Mismatch(f"{name or 'the value'} is {shown(value)}; expected {expected}")
