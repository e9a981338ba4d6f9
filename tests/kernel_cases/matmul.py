from __future__ import annotations

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for m, n, k in ((1, 1, 1), (7, 33, 5), (67, 3, 129), (301, 5, 7), (0, 3, 5), (3, 5, 0)):  # from 64 rows: blocks
        yield "nn", dict(a=a.normal(m, k), b=a.normal(k, n), out=a.empty(m, n))
        yield "nt", dict(a=a.normal(m, k), b=a.normal(n, k), out=a.empty(m, n))
        yield "tn", dict(a=a.normal(k, m), b=a.normal(k, n), transposed=a.empty(m, k), out=a.empty(m, n))
