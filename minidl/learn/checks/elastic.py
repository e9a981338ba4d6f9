"""Checks of the exercises for docs/elastic.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.comm.stability import sync_bound
from minidl.learn.grading import Wrong, compare


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    for size, n in ((1, 1), (2, 5), (7, 3)):
        x, c, g = random.standard_normal((size, n)), random.standard_normal(n), random.standard_normal((size, n))
        eta, rho = 0.1, 0.7
        given = x.copy(), c.copy(), g.copy()
        call = f"step(x {x.shape}, c {c.shape}, g {g.shape}, {eta=}, {rho=})"
        new_x, new_c = _pair(call, answer.step(*given, eta, rho))
        compare(call, "x", new_x, (1 - eta * rho) * x + eta * rho * c - eta * g)
        compare(call, "c", new_c, (1 - size * eta * rho) * c + eta * rho * x.sum(0))
        for name, before, after in zip("xcg", (x, c, g), given):
            compare(call, f"{name}, the argument after the call,", after, before, tolerance=0)


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
                call = f"converges({size}, {s=}, a={part * bound:.4f})"
                compare(call, "the result", bool(answer.converges(size, s, part * bound)), part < 1)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    for size in (1, 2, 5, 8):
        x, c, g = random.standard_normal(size), float(random.standard_normal()), random.standard_normal(size)
        call, given = f"turns(x ({size},), c={c:.3f}, g ({size},), eta=0.1, a=0.3)", (x.copy(), g.copy())
        centers = [c]  # before each turn, and at the end: each visit moves the center by 0.3 of the distance
        for number in x:
            centers.append(0.7 * centers[-1] + 0.3 * number)
        new_x, new_c = _pair(call, answer.turns(given[0], c, given[1], 0.1, 0.3))
        compare(call, "x", new_x, 0.7 * x + 0.3 * np.array(centers[:-1]) - 0.1 * g)
        compare(call, "c", new_c, centers[-1])
        for name, before, after in zip("xg", (x, g), given):
            compare(call, f"{name}, the argument after the call,", after, before, tolerance=0)


def _pair(call: str, found: object) -> tuple[object, object]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(call, "two results, x and c", "another result")
    return found[0], found[1]
