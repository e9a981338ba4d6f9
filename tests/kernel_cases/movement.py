from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    transpose = dict(source_offset=0, target_offset=0, source_strides=np.array([1, 7]), target_strides=np.array([5, 1]))
    yield "copy", dict(source=a.normal(35), **transpose, shape=np.array([7, 5]), target=a.empty(35))
    for n, rows, columns in ((3, 70, 131), (2, 300, 3), (40, 7, 260)):  # transposes of n matrices, some large
        size = n * rows * columns
        yield "copy", dict(
            source=a.normal(size), source_offset=0, source_strides=np.array([rows * columns, 1, columns]),
            shape=np.array([n, columns, rows]), target_offset=0,
            target_strides=np.array([rows * columns, rows, 1]), target=a.empty(size),
        )  # fmt: skip
    broadcast = dict(source_offset=1, target_offset=2, source_strides=np.array([0]), target_strides=np.array([3]))
    yield "copy", dict(source=a.normal(2), **broadcast, shape=np.array([4]), target=a.empty(12))
    for source_strides, shape in (([15, 5, 1], [2, 3, 5]), ([-15, 5, -2], [2, 3, 3]), ([15, 5, 1], [2, 0, 5])):
        n, offset = int(np.prod(shape)), 15 * (source_strides[0] < 0) + 4 * (source_strides[2] < 0)
        yield "copy", dict(
            source=a.normal(30), source_offset=offset, source_strides=np.array(source_strides), shape=np.array(shape),
            target_offset=1, target_strides=np.array([1, 2 * shape[2], 2]), target=a.empty(2 * n + 3),
        )  # fmt: skip
    for source_strides, shape, target_strides in (
        ([64, 16, 1], [3, 4, 8], [40, 8, 1]),  # rows of 8 neighbours
        ([32, 1, 2, 16, 4, 8], [2] * 6, [1, 32, 4, 8, 2, 16]),  # no two axes continue each other
    ):
        yield "copy", dict(
            source=a.normal(256), source_offset=0, source_strides=np.array(source_strides), shape=np.array(shape),
            target_offset=8, target_strides=np.array(target_strides), target=a.empty(128),
        )  # fmt: skip
    for n, step in ((40_009, 0), (40_009, 1), (33_000, 2)):  # one number to many, and vectors that are divided
        vector = dict(source_strides=np.array([step]), shape=np.array([n]), target_strides=np.array([1]))
        yield "copy", dict(source=a.normal(70_000), source_offset=3, **vector, target_offset=1, target=a.empty(n + 2))
    columns = dict(source_strides=np.array([1, 0]), shape=np.array([37, 70]), target_strides=np.array([70, 1]))
    yield "copy", dict(source=a.normal(38), source_offset=1, **columns, target_offset=0, target=a.empty(37 * 70))
    for n, rows, channels in ((1, 1, 1), (7, 33, 5), (33, 7, 17), (3, 0, 2), (5, 40, 132)):
        picked = a.integers(n, rows)
        yield "take", dict(x=a.normal(n, channels), rows=picked, out=a.empty(rows, channels))
        yield "take_backward", dict(dy=a.normal(rows, channels), rows=picked, dx=a.empty(n, channels))
