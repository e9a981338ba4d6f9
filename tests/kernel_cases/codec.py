from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases
from minidl.kernels.codec.reference import BLOCK, blocks, kept

SIZES = (1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 13)


def cases(a: Arrays) -> Cases:
    for n in SIZES:
        count, weight = len(list(blocks(n))), 0.3 if n == 7 else 1.0
        yield "bfloat16_encode", dict(rest=a.normal(n), codes=np.empty(n, np.uint16))
        yield "bfloat16_decode", dict(codes=(a.integers(2**14, n) + 2**13).astype(np.uint16) & 0x40FF, weight=weight,
                                      out=a.normal(n))  # fmt: skip
        scales = abs(np.float32(a.normal(count)))
        yield "int8_encode", dict(rest=_with_zeros(a, n), scales=scales.copy(), codes=np.empty(n, np.int8))
        yield "int8_decode", dict(scales=scales, codes=(a.integers(255, n) - 127).astype(np.int8), weight=weight,
                                  out=a.normal(n))  # fmt: skip
        bits = a.integers(256, -(-n // 8)).astype(np.uint8)
        yield "sign_encode", dict(rest=a.normal(n), scales=scales.copy(), bits=bits.copy())
        yield "sign_decode", dict(scales=scales, bits=bits, weight=weight, out=a.normal(n))
        for keep in (1, 41, BLOCK // 2, BLOCK):  # half of them: some of those in _with_ties
            places = [np.sort(a.random.permutation(size)[: kept(size, keep)]) for _, size in blocks(n)]
            indices = np.concatenate(places).astype(np.uint16)
            values = np.float32(a.normal(indices.size))
            yield "topk_encode", dict(rest=_with_ties(a, n), keep=keep, indices=indices.copy(), values=values.copy())
            yield "topk_decode", dict(indices=indices, values=values, keep=keep, weight=weight, out=a.normal(n))
            yield "randk_encode", dict(rest=a.normal(n), keep=keep, key=2**61 + n, values=values.copy())
            yield "randk_decode", dict(values=values, keep=keep, key=3, weight=weight, out=a.normal(n))


def _with_zeros(a: Arrays, n: int) -> np.ndarray:
    """Return a vector whose second block is 0."""
    x = a.normal(n)
    x[BLOCK : 2 * BLOCK] = 0
    return x


def _with_ties(a: Arrays, n: int) -> np.ndarray:
    """Return a vector with elements of the same absolute value."""
    x = a.normal(n)
    x[::3] = a.constant(0.5)
    x[1::6] = a.constant(-0.5)
    return x
