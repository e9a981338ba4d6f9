from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    small = (1, 1, 1), (7, 33, 5), (3, 1001, 1), (1, 101, 65), (1, 2000, 17), (2, 3, 700)
    for outer, n, inner in (*small, (401, 100, 1), (97, 7, 64)):
        x = a.normal(outer, n, inner)
        for chunks in (1, 5):
            yield "sum", dict(x=x, partial=np.full((chunks, outer, inner), 7.0), out=a.empty(outer, inner))
        for values in (x, a.integers(3, *x.shape).astype(a.dtype)):
            yield "maximum", dict(x=values, out=a.empty(outer, inner), winner=np.full((outer, inner), -1))
        winner = a.integers(n, outer, inner)
        yield "maximum_backward", dict(dy=a.normal(outer, inner), winner=winner, dx=a.empty(*x.shape))
