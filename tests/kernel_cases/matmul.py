from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases

SHAPES = (1, 1, 1), (7, 33, 5), (67, 3, 129), (301, 5, 7), (65, 97, 41)
EMPTY = (0, 3, 5), (3, 0, 5), (3, 5, 0)  # two empty outputs, and an output whose sums have no terms


def cases(a: Arrays) -> Cases:
    deep = min(1100, a.many // 50)  # on the CPU, a sum of several pieces
    for m, n, k in (*SHAPES, (9, 70, deep), *EMPTY):
        scratch = a.empty(a.scratch_size("matmul", "nn_scratch", m, n, k))
        size = a.scratch_size("matmul", "packed_size", m, n, k)
        for bias, relu, keeps in ((0, False, 0), (n, False, 1), (n, True, 0)):
            yield "nn", dict(a=a.normal(m, k), b=a.normal(k, n), bias=a.normal(bias), relu=relu,
                             packed=np.zeros(size * keeps, a.dtype), scratch=scratch, out=a.empty(m, n))  # fmt: skip
        yield "nt", dict(a=a.normal(m, k), b=a.normal(n, k), scratch=scratch, out=a.empty(m, n))
        yield "tn", dict(a=a.normal(k, m), b=a.normal(k, n), scratch=scratch, out=a.empty(m, n))
    forms = [(False, False), (False, True), (True, False), (True, True)]
    batches = (1, 3, 5, 2), (5, 7, 33, 5), (3, 65, 20, 41), (37, 1, 3, 9), (0, 2, 3, 4), (2, 3, 4, 0)
    for number, (count, m, n, k) in enumerate(batches):
        scratch = a.empty(a.scratch_size("matmul", "batched_scratch", count, m, n, k))
        # One form of each batch on CUDA: a kernel takes seconds to compile, and is that of the products.
        for a_transposed, b_transposed in [forms[number % 4]] if a.kernels == "cuda" else forms:
            left = a.normal(count, *((k, m) if a_transposed else (m, k)))
            right = a.normal(count, *((n, k) if b_transposed else (k, n)))
            yield "batched", dict(a=left, a_transposed=a_transposed, b=right, b_transposed=b_transposed,
                                  scratch=scratch, out=a.empty(count, m, n))  # fmt: skip
