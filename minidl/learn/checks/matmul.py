"""Checks of the exercises for kernels/matmul/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from minidl.learn.grading import Wrong, call, compare, numbers

SIZES = ((1, 1, 1), (2, 5, 3), (5, 19, 9), (4, 8, 8), (9, 3, 17))  # M, K, N


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    for m, k, n in SIZES:
        for piece in (1, 4, 32):
            a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
            products = a[:, :, None] * b  # (M, K, N)
            parts = [products[:, start : start + piece].cumsum(1)[:, -1] for start in range(0, k, piece)]
            expected = np.stack(parts).cumsum(0)[-1]  # cumsum adds one number after the other
            out = np.full((m, n), np.nan, np.float32)
            answer.product(a.copy(), b.copy(), piece, out)
            compare(call("product", a=a, b=b, piece=piece), "out", out, expected, tolerance=0)


def check_2(answer: ModuleType) -> None:
    for depth, columns, first, width in ((1, 1, 0, 4), (3, 8, 4, 4), (5, 7, 4, 4), (2, 9, 0, 8), (7, 3, 2, 2)):
        matrix = 1.0 + np.arange(depth * columns).reshape(depth, columns)
        expected = np.zeros((depth, width))
        expected[:, : max(0, min(width, columns - first))] = matrix[:, first : first + width]
        for form, b, steps in (("nn", matrix, (columns, 1)), ("nt", matrix.T.copy(), (1, depth))):
            packed = np.full(depth * width, np.nan)
            answer.pack(b.reshape(-1), *steps, depth, columns, first, width, packed)
            given = f"pack(b, {steps[0]}, {steps[1]}, {depth=}, {columns=}, {first=}, {width=}), the form {form}"
            compare(given, "packed", packed, expected.reshape(-1), tolerance=0)


def check_3(answer: ModuleType) -> None:
    random, tile = np.random.default_rng(3), answer.tile
    calls: list[tuple[Any, ...]] = []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return tile(*arguments)

    vars(answer)["tile"] = counted
    for m, k, n in SIZES:
        calls.clear()
        a, b, out = numbers(random, m, k), numbers(random, k, n), np.full((m, n), np.nan)
        answer.product(a.copy(), b.copy(), out)
        given = call("product", a=a, b=b)
        compare(given, "out", out, a @ b)
        if len(calls) != (few := -(-m // 4) * -(-n // 8)):
            raise Wrong(given, f"{few} calls of tile", f"{len(calls)}")
