from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for rows, classes in ((1, 1), (7, 10), (5, 24), (33, 101), (500, 10), (2, 300), (3, 5001)):
        shape = rows, classes
        labels = a.integers(classes, rows)
        for name in ("softmax", "log_softmax"):
            yield name, dict(x=9 * a.normal(*shape), y=a.empty(*shape))
            yield name + "_backward", dict(dy=a.normal(*shape), y=-a.positive(*shape), dx=a.empty(*shape))
        for logits in (a.normal(*shape), a.integers(3, *shape).astype(a.dtype)):
            yield "correct", dict(logits=logits, labels=labels, count=np.full(1, -1))
        for smoothing in (0.0, 0.1):
            yield "cross_entropy", dict(
                logits=9 * a.normal(*shape) + 1, labels=labels, smoothing=smoothing,
                probabilities=a.empty(*shape), loss=a.empty(1),
            )  # fmt: skip
            yield "cross_entropy_backward", dict(
                dloss=a.normal(1), probabilities=a.positive(*shape), labels=labels, smoothing=smoothing,
                dlogits=a.empty(*shape),
            )  # fmt: skip
        yield "correct", dict(logits=a.integers(3, *shape).astype(a.dtype), labels=labels, count=np.full(1, 7))
    for label in (-1, 3, -(2**62), 2**62):  # not a class: the result is NaN, without access outside the arrays
        wrong = dict(labels=np.array([0, label]), smoothing=0.1)
        yield "cross_entropy", dict(
            logits=a.normal(2, 3), **wrong, probabilities=a.empty(2, 3), loss=a.empty(1)
        )  # fmt: skip
        yield "cross_entropy_backward", dict(
            dloss=a.normal(1), probabilities=a.positive(2, 3), **wrong, dlogits=a.empty(2, 3)
        )  # fmt: skip
    x = a.normal(4, 40)
    x[0, 3] = x[1, 5] = x[2, :] = np.nan
    yield "correct", dict(logits=x, labels=np.array([3, 4, 0, 0]), count=np.full(1, 7))
    yield "softmax", dict(x=np.array([[1000, -1000, -np.inf]], a.dtype), y=a.empty(1, 3))
