"""Checks of the exercises for kernels/softmax/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.kernels.softmax import reference
from minidl.learn.grading import Wrong, call, compare


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    cases = [np.array(rows) for rows in ([[0.0, 0.0]], [[1000.0, 999.0], [-1000.0, -1001.0]], [[5.0], [-5.0]])]
    for x in [*cases, random.standard_normal((3, 7)), 100 * random.standard_normal((5, 17))]:
        expected = np.empty(x.shape)
        reference.softmax(x, expected)
        compare(call("softmax", x=x), "the result", answer.softmax(x.copy()), expected)


def check_2(answer: ModuleType) -> None:
    random = np.random.default_rng(2)
    for rows, classes in ((1, 2), (3, 5), (7, 10)):
        for smoothing in (0.0, 0.1):
            p, expected = np.empty((rows, classes)), np.empty((rows, classes))
            reference.softmax(random.standard_normal((rows, classes)), p)
            labels = random.integers(0, classes, rows)
            reference.cross_entropy_backward(np.ones(1), p, labels, smoothing, expected)
            given, lent = call("gradient", p=p.round(4), labels=labels, smoothing=smoothing), p.copy()
            compare(given, "the gradient", answer.gradient(lent, labels, smoothing), expected)
            compare(given, "p, after the call,", lent, p, tolerance=0)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    few = map(np.array, ([2.0], [0.0, 1.0], [1.0, 0.0], [-1000.0, 1000.0, 999.0], [-800.0, -801.0]))
    for values in (*few, 9 * random.standard_normal(37)):
        given, found = call("one_pass", values=values), answer.one_pass(iter(values.tolist()))
        if not isinstance(found, tuple) or len(found) != 2:
            raise Wrong(given, "two numbers", str(found))
        compare(given, "largest", found[0], values.max())
        compare(given, "total", found[1], np.exp(values - values.max()).sum())
