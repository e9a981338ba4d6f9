"""Matrix products. The letters say how the two operands lie: n as it is, t transposed.

A layer y = x w needs all three: `nn` forward, `nt` for dx = dy w^T, `tn` for dw = x^T dy.
"""

from __future__ import annotations

import numpy as np

__all__ = ["nn", "nt", "tn"]


def nn(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out (M, N) = a (M, K) b (K, N)"""
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = out.dtype.type(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            out[m, n] = total


def nt(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out (M, N) = a (M, K) b (N, K)^T"""
    nn(a, b.T, out)


def tn(a: np.ndarray, b: np.ndarray, transposed: np.ndarray, out: np.ndarray) -> None:
    """out (M, N) = a (K, M)^T b (K, N).  transposed (M, K): scratch of a fast kernel, not used here"""
    nn(a.T, b, out)
