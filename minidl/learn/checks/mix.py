"""Checks of the exercises for kernels/mix/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minidl.kernels.mix import reference
from minidl.learn.grading import Wrong, call, compare, numbers


class Counted:
    """A vector that counts the accesses to its elements."""

    def __init__(self, elements: np.ndarray) -> None:
        self.elements = elements.copy()
        self.reads, self.writes = np.zeros((2, elements.size), int)

    def __len__(self) -> int:
        return self.elements.size

    def __getitem__(self, i: int) -> float:
        self.reads[_single(i)] += 1
        return float(self.elements[i])

    def __setitem__(self, i: int, value: float) -> None:
        self.writes[_single(i)] += 1
        self.elements[i] = value

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


def _check(
    name: str, tested: Callable[..., Any], right: Callable[..., Any], names: tuple[str, str], written: int
) -> None:
    """Compare two functions of two vectors and a weight. The first `written` vectors are written, once."""
    random = np.random.default_rng(1)
    for n, weight in ((1, 0.5), (5, 0.0), (7, 1.0), (17, 0.3)):
        expected = numbers(random, 2, n)
        vectors = [Counted(each) for each in expected]
        given = call(name, **dict(zip(names, expected)), weight=weight)
        right(*expected, weight)
        tested(*vectors, weight)
        for k, (vector, elements) in enumerate(zip(vectors, expected)):
            compare(given, names[k], vector.elements, elements)
            compare(given, f"reads of {names[k]}", vector.reads, np.ones(n, int), tolerance=0)
            compare(given, f"writes of {names[k]}", vector.writes, np.full(n, int(k < written)), tolerance=0)


def check_2(answer: ModuleType) -> None:
    for size, parts in ((1, 1), (16, 2), (100, 3), (1000, 7), (37, 5), (5000, 4)):
        given = f"chunks({size=}, {parts=})"
        found: Any = answer.chunks(size, parts)
        try:
            pairs = [(int(start), int(stop)) for start, stop in found]
        except (TypeError, ValueError):
            raise Wrong(given, "pairs of numbers", str(found)) from None
        if len(pairs) != parts:
            raise Wrong(given, f"{parts} chunks", f"{len(pairs)}")
        covered = [i for start, stop in pairs for i in range(start, stop)]
        if covered != list(range(size)):
            raise Wrong(given, f"chunks that cover 0 to {size - 1} once, in order", str(pairs))
        lines = [-(-(stop - start) // 16) for start, stop in pairs]
        if late := [start for start, stop in pairs if start < stop and start % 16]:
            raise Wrong(given, "chunks that begin at multiples of 16", f"one that begins at {late[0]}")
        if max(lines) - min(lines) > 1:
            raise Wrong(given, "numbers of lines that differ by at most 1", str(lines))
