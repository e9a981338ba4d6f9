from __future__ import annotations

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for n in (1, 7, 33, a.many):
        for name in ("add", "subtract", "multiply", "divide", "maximum"):
            yield name, dict(a=a.normal(n), b=a.positive(n), out=a.empty(n))
        for name in ("exp", "log", "sqrt", "absolute"):
            yield name, dict(x=a.positive(n), out=a.empty(n))
        yield "maximum_backward", dict(
            dy=a.normal(n), a=a.integers(3, n).astype(a.dtype), b=a.integers(3, n).astype(a.dtype),
            da=a.empty(n), db=a.empty(n),
        )  # fmt: skip
        yield "affine", dict(x=a.normal(n), scale=0.3, shift=-2.0, out=a.empty(n))
        yield "copy", dict(x=a.normal(n), out=a.empty(n))
        yield "fill", dict(value=0.1, out=a.empty(n))
        yield "accumulate", dict(x=a.normal(n), out=a.normal(n))
        yield "absolute_backward", dict(dy=a.normal(n), x=a.integers(3, n).astype(a.dtype) - 1, dx=a.empty(n))
        for exponent in (0.0, 2.0, 2.5, -1.0, -0.5, 0.5, 1.0, 3.0, 4.0):
            yield "power", dict(x=a.positive(n), exponent=exponent, out=a.empty(n))
            yield "power_backward", dict(dy=a.normal(n), x=a.positive(n), exponent=exponent, dx=a.empty(n))
    yield "add", dict(a=a.normal(0), b=a.normal(0), out=a.empty(0))
