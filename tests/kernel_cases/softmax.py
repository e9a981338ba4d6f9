from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for rows, classes in ((1, 1), (7, 10), (33, 101)):
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
    yield "softmax", dict(x=np.array([[1000, -1000, -np.inf]], a.dtype), y=a.empty(1, 3))
