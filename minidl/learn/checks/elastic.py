"""Checks of the exercises for docs/elastic.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.comm.stability import sync_bound
from minidl.learn.grading import Wrong, call, compare, numbers


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    for size, n in ((1, 1), (2, 5), (7, 3)):
        x, c, g = numbers(random, size, n), numbers(random, n), numbers(random, size, n)
        eta, rho = 0.1, 0.7
        given, lent = call("step", x=x, c=c, g=g, eta=eta, rho=rho), (x.copy(), c.copy(), g.copy())
        new_x, new_c = _pair(given, answer.step(*lent, eta, rho))
        compare(given, "x", new_x, (1 - eta * rho) * x + eta * rho * c - eta * g)
        compare(given, "c", new_c, (1 - size * eta * rho) * c + eta * rho * x.sum(0))
        for name, before, after in zip("xcg", (x, c, g), lent):
            compare(given, f"{name}, the argument after the call,", after, before, tolerance=0)


def check_2(answer: ModuleType) -> None:
    for size in (1, 2, 5, 8):
        for s in (0.1, 1.5):
            bound = sync_bound(size, s)
            a = 0.95 * bound
            states = np.eye(size + 1)  # columns: replicas and center, moved one at a time
            pulls = a * (states[:-1] - states[-1])
            expected = np.vstack([(1 - s) * states[:-1] - pulls, states[-1:] + pulls.sum(0)])
            compare(f"matrix({size}, {s=}, {a=:.4f})", "m", answer.matrix(size, s, a), expected)
            for part in (0.95, 1.05):
                given = f"converges({size}, {s=}, a={part * bound:.4f})"
                compare(given, "the result", bool(answer.converges(size, s, part * bound)), part < 1)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    for size in (1, 2, 5, 8):
        x, c, g = numbers(random, size), float(numbers(random)), numbers(random, size)
        given, lent = call("turns", x=x, c=c, g=g, eta=0.1, a=0.3), (x.copy(), g.copy())
        centers = [c]  # before each turn, and at the end: each visit moves the center by 0.3 of the distance
        for number in x:
            centers.append(0.7 * centers[-1] + 0.3 * number)
        new_x, new_c = _pair(given, answer.turns(lent[0], c, lent[1], 0.1, 0.3))
        compare(given, "x", new_x, 0.7 * x + 0.3 * np.array(centers[:-1]) - 0.1 * g)
        compare(given, "c", new_c, centers[-1])
        for name, before, after in zip("xg", (x, g), lent):
            compare(given, f"{name}, the argument after the call,", after, before, tolerance=0)


def _pair(given: str, found: object) -> tuple[object, object]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(given, "two results, x and c", "another result")
    return found[0], found[1]
