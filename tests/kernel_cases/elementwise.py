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
    few, many = a.many // 1000, a.many // 16
    for outer, n, inner in ((1, 1, 1), (1, 9, 7), (5, 6, 1), (2, 3, 4), (9, few, 33), (1, many, 12), (many, 5, 1),
                            (7, 3, many), (2, many, 1), (0, 3, 4), (2, 0, 3)):  # fmt: skip
        for name in ("add", "subtract", "multiply", "divide"):
            yield f"{name}_broadcast", dict(x=a.normal(outer * n * inner), w=a.positive(outer * inner), inner=inner,
                                            out=a.empty(outer * n * inner))  # fmt: skip
    yield "add", dict(a=a.normal(0), b=a.normal(0), out=a.empty(0))
