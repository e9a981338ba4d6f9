from __future__ import annotations

from kernel_cases import Arrays, Cases

from minidl.kernels.matmul import cpu


def cases(a: Arrays) -> Cases:
    shapes = ((1, 1, 1), (7, 33, 5), (67, 3, 129), (301, 5, 7), (0, 3, 5), (3, 0, 5), (3, 5, 0), (65, 97, 41))
    for i, (m, n, k) in enumerate(shapes):
        scratch = a.empty(cpu.nn_scratch(m, n, k))
        bias = a.normal(n if i % 2 else 0)
        yield "nn", dict(a=a.normal(m, k), b=a.normal(k, n), bias=bias, relu=i % 3 == 1, scratch=scratch, out=a.empty(m, n))
        yield "nt", dict(a=a.normal(m, k), b=a.normal(n, k), scratch=scratch, out=a.empty(m, n))
        yield "tn", dict(a=a.normal(k, m), b=a.normal(k, n), scratch=scratch, out=a.empty(m, n))
