"""Checks of the exercises for docs/decentralised.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import numpy as np

from minidl.learn.grading import Wrong, call, compare, numbers


def check_1(answer: ModuleType) -> None:
    ring = [{(i - 1) % 5, (i + 1) % 5} for i in range(5)]
    star: list[set[int]] = [{1, 2, 3}, {0}, {0}, {0}]
    uneven = [{1, 2, 3}, {0, 2}, {0, 1}, {0}]
    graphs: list[list[set[int]]] = [[set()], [{1}, {0}], [{1}, {0, 2}, {1}], star, ring, uneven]
    for neighbours in graphs:
        edges = np.array([[j in each for j in range(len(neighbours))] for each in neighbours])
        degrees = edges.sum(1)
        expected = edges / (1 + np.maximum.outer(degrees, degrees))
        expected += np.diag(1 - expected.sum(0))
        compare(f"mixing_matrix({neighbours})", "W", answer.mixing_matrix(neighbours), expected)


def check_2(answer: ModuleType) -> None:
    random = np.random.default_rng(2)
    for size, n in ((1, 1), (2, 2), (5, 7)):
        w = random.random((size, size))
        w /= w.sum(1, keepdims=True)  # not symmetric: columns do not sum to 1
        x, minima = numbers(random, size, n), numbers(random, size, n)
        computed: list[int] = []

        def gradient(
            j: int, weights: np.ndarray, minima: np.ndarray = minima, computed: list[int] = computed
        ) -> np.ndarray:
            computed.append(j)
            return weights - minima[j]

        lent, given = x.copy(), call("step", x=x, gradient="gradient", w=w.round(4), eta=0.1)
        found = answer.step(lent, gradient, w, 0.1)
        compare(given, "the result", found, w @ (x - 0.1 * (x - minima)))
        compare(given, "x, after the call,", lent, x, tolerance=0)
        if sorted(computed) != list(range(size)):
            raise Wrong(given, "one gradient of each replica", f"gradients of the replicas {computed}")


def check_3(answer: ModuleType) -> None:
    random, size = np.random.default_rng(3), 5
    x, w = [float(i) for i in range(size)], [1.0] * size
    flying: dict[tuple[int, int], tuple[float, float]] = {}  # (sender, receiver): a message
    for turn in range(200):
        i, j = (int(each) for each in random.choice(size, 2, replace=False))
        inbox = [flying.pop(edge) for edge in sorted(flying) if edge[1] == i and random.random() < 0.5]
        refused = (i, j) in flying
        whole = np.array([(x[i], w[i]), *inbox]).sum(0)  # (x, w) before it sends
        given = f"step({x[i]:.4g}, {w[i]:.4g}, inbox of {len(inbox)}, send{' (refused)' * refused}), call {turn + 1}"
        sent: list[tuple[float, float]] = []
        found = answer.step(x[i], w[i], list(inbox), partial(_send, sent, refused))
        compare(given, "(x, w)", found, whole if refused else whole / 2)
        compare(given, "the messages (x, w) that were sent", sent, [whole / 2])
        if not refused:
            flying[i, j] = sent[0]
        x[i], w[i] = found


def _send(sent: list[tuple[float, float]], refused: bool, x: float, w: float) -> bool:
    sent.append((x, w))
    return not refused
