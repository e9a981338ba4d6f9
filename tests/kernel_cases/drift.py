from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases

SEGMENTS = {0: [(0, 0)], 1: [(0, 1)], 511: [(0, 511)], 513: [(0, 7), (7, 513)], 1_037: [(0, 1_037), (13, 13), (5, 900)]}


def cases(a: Arrays) -> Cases:
    large = {a.many: [(0, a.many), (3, a.many // 2), (a.many // 2, a.many)]}
    for n, segments in (SEGMENTS | large).items():
        starts, stops = np.array(segments, np.int64).T.copy()
        before = a.normal(n)
        moved = before + before.dtype.type(1e-3) * a.normal(n)
        for x in (moved, a.normal(n)):
            partial = np.zeros(a.scratch_size("drift", "drift_partial", len(segments)))
            squares = np.full((len(segments), 3), np.nan)
            yield "drift", dict(x=x, before=before, starts=starts, stops=stops, partial=partial, squares=squares)
