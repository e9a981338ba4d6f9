"""Checks of the exercises for kernels/softmax/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.kernels.softmax import reference
from minidl.learn.grading import Wrong, compare


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    cases = [np.array(rows) for rows in ([[0.0, 0.0]], [[1000.0, 999.0], [-1000.0, -1001.0]], [[5.0], [-5.0]])]
    for x in [*cases, random.standard_normal((3, 7)), 100 * random.standard_normal((5, 17))]:
        expected = np.empty(x.shape)
        reference.softmax(x, expected)
        call = f"softmax({x.tolist()})" if x.size < 5 else f"softmax(x {x.shape}, up to {x.max():.3g})"
        compare(call, "the result", answer.softmax(x.copy()), expected)


def check_2(answer: ModuleType) -> None:
    random = np.random.default_rng(2)
    for rows, classes in ((1, 2), (3, 5), (7, 10)):
        for smoothing in (0.0, 0.1):
            p, expected = np.empty((rows, classes)), np.empty((rows, classes))
            reference.softmax(random.standard_normal((rows, classes)), p)
            labels = random.integers(0, classes, rows)
            reference.cross_entropy_backward(np.ones(1), p, labels, smoothing, expected)
            call, given = f"gradient(p {p.shape}, labels={labels.tolist()}, {smoothing=})", p.copy()
            compare(call, "the gradient", answer.gradient(given, labels, smoothing), expected)
            compare(call, "p, after the call,", given, p, tolerance=0)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    few: list[list[float]] = [[2.0], [0.0, 1.0], [1.0, 0.0], [-1000.0, 1000.0, 999.0], [-800.0, -801.0]]
    for values in [*few, (9 * random.standard_normal(37)).tolist()]:
        call = f"one_pass({values})" if len(values) < 5 else f"one_pass({len(values)} numbers)"
        found = answer.one_pass(iter(values))
        if not isinstance(found, tuple) or len(found) != 2:
            raise Wrong(call, "two numbers", str(found))
        compare(call, "largest", found[0], max(values))
        compare(call, "total", found[1], np.exp(np.array(values) - max(values)).sum())
