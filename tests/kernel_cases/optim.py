from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    yield from of_size(a, 5003)
    yield from of_size(a, a.many)  # enough for several threads


def of_size(a: Arrays, n: int) -> Cases:
    segments = dict(starts=np.array([0, 33, 40]), stops=np.array([1, 40, n - 2]))  # gaps between the segments
    rates = dict(lr=np.array([0.1, 0.2, 0.05]), weight_decay=np.array([0.01, 0.0, 0.1]))
    for nesterov, decoupled, momentum in ((False, False, 0.9), (True, False, 0.9), (False, True, 0.0)):
        yield "sgd", dict(
            theta=a.normal(n), grad=a.normal(n), velocity=a.normal(n), **segments, **rates,
            momentum=momentum, nesterov=nesterov, decoupled=decoupled, scale=0.5,
        )  # fmt: skip
    for step, decoupled, eps in ((1, False, 1e-8), (1000, True, 1e-2)):
        yield "adam", dict(
            theta=a.normal(n), grad=a.normal(n), first=a.normal(n), second=a.positive(n), **segments, **rates,
            beta1=0.9, beta2=0.999, eps=eps, step=step, decoupled=decoupled, scale=0.5,
        )  # fmt: skip
    partial = a.scratch_size("optim", "norms_partial", 3)
    yield "norms", dict(x=a.normal(n), **segments, partial=np.full(partial, 7.0), squares=np.full(3, 7.0))
    for adapt in ([True, True, False], [False, True, True]):
        yield "lars", dict(
            theta=a.normal(n), grad=a.normal(n), velocity=a.normal(n), **segments, **rates, adapt=np.array(adapt),
            momentum=0.9, trust=0.02, theta_squares=np.array([1.0, 2.0, 4000.0]),
            grad_squares=np.array([0.0, 3.0, 5000.0]), scale=0.5,
        )  # fmt: skip
