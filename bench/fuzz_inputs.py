"""Mutated inputs for bench/fuzz.py and tests/test_fuzz.py: valid files, changed as an attacker or a bad disk would.

`mutated(rng, content)` changes bytes; `mutated_json(rng, value)` changes a JSON value and returns its text.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = (-1, 0, 1, 7, 255, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, -(10**18), 0.5, -0.0, 1e-320,
           1e308)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 50, "9" * 5000, "-" + "1" * 4400, "[" * 3000 + "]" * 3000,
       '{"a":' * 3000 + "1" + "}" * 3000, '{"a": 1, "a": 2}', '"\\ud800"', '"\\u0000"', "[" * 40 + "]" * 40, "01",
       "[" + "0," * 3000 + "0]", '"' + "x" * 5000 + '"')  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, False, "", "x", "é\U0001f600", "../x", [], {}, [[]], {"": {}}, [1, 2], *NUMBERS)


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Return the content after 1 to 3 random changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, data)
    return bytes(data)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 4, 16))):
        if data:
            data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at : at + rng.choice((1, 2, 4, 8))] = rng.randbytes(rng.choice((1, 2, 4, 8)))


def _number(rng: random.Random, data: bytearray) -> None:
    """Overwrite bytes with a whole number, in one of the forms in which headers store numbers."""
    form = rng.choice(("<H", "<I", ">I", "<Q"))
    bits = 8 * struct.calcsize(form)
    at = _place(rng, data)
    number = rng.choice((0, 1, 2**bits - 1, 2 ** (bits - 1), rng.getrandbits(bits)))
    data[at : at + bits // 8] = struct.pack(form, number)


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = _place(rng, data)
    part = data[start : start + rng.choice((1, 8, 64, 512))]
    data[start:start] = part * rng.choice((1, 2, 50))


def _remove(rng: random.Random, data: bytearray) -> None:
    start = _place(rng, data)
    del data[start : start + rng.choice((1, 2, 8, 64))]


def _append(rng: random.Random, data: bytearray) -> None:
    data += rng.choice((b"\0", b"\0" * 1000, rng.randbytes(20), bytes(data[:100])))


def _digits(rng: random.Random, data: bytearray) -> None:
    """Replace a digit with another number, because some headers are text."""
    digits = [i for i in range(min(len(data), 4000)) if 48 <= data[i] < 58]
    if digits:
        at = rng.choice(digits)
        data[at : at + 1] = rng.choice((b"-1", b"0", b"99999999999", b"1e9", b"nan", b"9" * 5000, b"[[[", b"()", b"2"))


CHANGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _cut, _flip, _flip, _overwrite, _number, _number, _repeat, _remove, _append, _digits, _digits,
)  # fmt: skip


def _place(rng: random.Random, data: bytearray) -> int:
    """Return a random index, more often in the first or last 300 bytes, which often hold headers."""
    length = max(1, len(data))
    where = rng.random()
    if where < 0.4:
        return rng.randrange(min(length, 300))
    return rng.randrange(max(0, length - 300) if where < 0.6 else 0, length)


# JSON.


def mutated_json(rng: random.Random, value: Any) -> str:
    """Return the JSON text of a value after 1 to 3 random changes: of values, types, keys, or of the text."""
    value, raw = copy.deepcopy(value), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_value(rng, value, raw)
    text = json.dumps(value)
    for number, token in enumerate(raw):
        text = text.replace(f'"@RAW{number}@"', token)
    return mutated(rng, text.encode()).decode("utf-8", "replace") if rng.random() < 0.2 else text


def _change_value(rng: random.Random, value: Any, raw: list[str]) -> None:
    places = list(_places(value))
    if not places:
        return
    parent, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(("", "x", "1", "-1", "01", "1000000", str(key) + "x"))] = parent.pop(key)
    elif kind == 2:
        raw.append(rng.choice(RAW))
        parent[key] = f"@RAW{len(raw) - 1}@"
    elif kind == 3:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 4:
        parent[key] = [copy.deepcopy(parent[key])] * rng.choice((1, 2, 100))
    else:
        parent[key] = rng.choice(NUMBERS)


def _places(value: Any) -> Any:
    """Yield (container, key) of each value inside a JSON value."""
    for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(one, (dict, list)):
            yield from _places(one)
