from __future__ import annotations

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for n in (0, 1, 7, 33, a.many):
        for weight in (0.0, 0.3, 1.0):
            yield "mix", dict(theta=a.normal(n), other=a.normal(n), weight=weight)
            yield "axpy", dict(factor=weight, x=a.normal(n), y=a.normal(n))
            yield "pull", dict(x=a.normal(n), center=a.normal(n), weight=weight, out=a.empty(n))
            yield "elastic", dict(x=a.normal(n), center=a.normal(n), weight=weight)
