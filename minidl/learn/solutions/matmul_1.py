"""Matmul 1: add products in pieces, always in the same order: a solution."""

import numpy as np
from numpy import ndarray


def product(a: ndarray, b: ndarray, piece: int, out: ndarray) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N) in float32, in pieces of `piece` products."""
    rows, columns = out.shape
    depth = a.shape[1]
    for m in range(rows):
        for n in range(columns):
            total = np.float32(0)
            for start in range(0, depth, piece):
                part = np.float32(0)
                for k in range(start, min(start + piece, depth)):
                    part += a[m, k] * b[k, n]
                total += part
            out[m, n] = total
