from __future__ import annotations

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    # The last two cross 2^32, and 2^33 inside a vector of four numbers.
    for n, p, seed, offset in ((1, 0.5, 0, 0), (7, 0.0, 1, 5), (7, 1.0, 1, 5), (40_000, 0.3, -3, 2**40),
                               (40_000, 0.3, 5, 2**32 - 20_000), (33, 0.4, 5, 2**33 - 18)):
        yield "dropout", dict(x=a.normal(n), p=p, seed=seed, offset=offset, y=a.empty(n))
