"""Checks of the exercises for kernels/mix/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minidl.kernels.mix import reference
from minidl.learn.grading import Wrong, compare


class Counted:
    """A vector that counts the accesses to its elements."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers.copy()
        self.reads, self.writes = np.zeros((2, numbers.size), int)

    def __len__(self) -> int:
        return self.numbers.size

    def __getitem__(self, i: int) -> float:
        self.reads[_single(i)] += 1
        return float(self.numbers[i])

    def __setitem__(self, i: int, value: float) -> None:
        self.writes[_single(i)] += 1
        self.numbers[i] = value

    @property
    def size(self) -> int:
        return len(self)


def _single(i: int) -> int:
    if not isinstance(i, int | np.integer):
        raise TypeError(f"this vector is read and written one element at a time, not with {i}")
    return int(i)


def check_1(answer: ModuleType) -> None:
    _check("mix", answer.mix, reference.mix, ("theta", "other"), written=1)


def check_3(answer: ModuleType) -> None:
    _check("elastic", answer.elastic, reference.elastic, ("x", "center"), written=2)


def _check(name: str, given: Callable, right: Callable, names: tuple[str, str], written: int) -> None:
    """Compare two functions of two vectors and a weight. The first `written` vectors are written, once."""
    random = np.random.default_rng(1)
    for n, weight in ((1, 0.5), (5, 0.0), (7, 1.0), (17, 0.3)):
        expected = random.standard_normal((2, n))
        vectors = [Counted(each) for each in expected]
        right(*expected, weight)
        given(*vectors, weight)
        call = f"{name}({names[0]} ({n},), {names[1]} ({n},), {weight=})"
        for k, (vector, numbers) in enumerate(zip(vectors, expected)):
            compare(call, names[k], vector.numbers, numbers)
            compare(call, f"reads of {names[k]}", vector.reads, np.ones(n, int), tolerance=0)
            compare(call, f"writes of {names[k]}", vector.writes, np.full(n, int(k < written)), tolerance=0)


def check_2(answer: ModuleType) -> None:
    for size, parts in ((1, 1), (16, 2), (100, 3), (1000, 7), (37, 5), (5000, 4)):
        call = f"chunks({size=}, {parts=})"
        found: Any = answer.chunks(size, parts)
        try:
            pairs = [(int(start), int(stop)) for start, stop in found]
        except (TypeError, ValueError):
            raise Wrong(call, "pairs of numbers", str(found)) from None
        if len(pairs) != parts:
            raise Wrong(call, f"{parts} chunks", f"{len(pairs)}")
        covered = [i for start, stop in pairs for i in range(start, stop)]
        if covered != list(range(size)):
            raise Wrong(call, f"chunks that cover 0 to {size - 1} once, in order", str(pairs))
        lines = [-(-(stop - start) // 16) for start, stop in pairs]
        if late := [start for start, stop in pairs if start < stop and start % 16]:
            raise Wrong(call, "chunks that begin at multiples of 16", f"one that begins at {late[0]}")
        if max(lines) - min(lines) > 1:
            raise Wrong(call, "numbers of lines that differ by at most 1", str(lines))
