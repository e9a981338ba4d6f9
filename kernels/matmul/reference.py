"""Matrix products: the definition. The names say how a and b are stored: n for not transposed, t for transposed.

A layer y = x @ w needs all three forms: `nn` forward, `nt` for dx = dy @ w^T, `tn` for dw = x^T @ dy. `batched`
multiplies many pairs of matrices, such as the queries and keys of each image.
"""

from __future__ import annotations

import numpy as np

__all__ = ["batched", "nn", "nt", "tn"]


def nn(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray, relu: bool, packed: np.ndarray, scratch: np.ndarray, out: np.ndarray
) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N), plus bias (N,) unless its size is 0; then apply relu if `relu`.

    Only cpu.py uses `packed` and `scratch`. packed: of size 0, or packed_size(M, N, K) numbers that the caller keeps
    for the next call, the last of which is 0 in the first call with these values of b: the call then packs b and sets
    the number to 1. Otherwise it reads `packed`, and not b.
    """
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = out.dtype.type(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            if bias.size:
                total += bias[n]
            out[m, n] = 0 if relu and total < 0 else total


def nt(a: np.ndarray, b: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """out (M, N) = a (M, K) @ b (N, K)^T"""
    nn(a, b.T, scratch[:0], False, scratch[:0], scratch, out)


def tn(a: np.ndarray, b: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """out (M, N) = a (K, M)^T @ b (K, N)"""
    nn(a.T, b, scratch[:0], False, scratch[:0], scratch, out)


def batched(
    a: np.ndarray, a_transposed: bool, b: np.ndarray, b_transposed: bool, scratch: np.ndarray, out: np.ndarray
) -> None:
    """Compute out[i] (M, N) = a[i] (M, K) @ b[i] (K, N) for each i < B. Matrices may be stored transposed, all a[i] as
    (K, M), or all b[i] as (N, K).
    """
    for i in range(len(out)):
        left, right = a[i].T if a_transposed else a[i], b[i].T if b_transposed else b[i]
        nn(left, right, scratch[:0], False, scratch[:0], scratch, out[i])


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch: here 0."""
    return 0


def packed_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of nn's `packed`: here 0."""
    return 0


nt_scratch = tn_scratch = nn_scratch


def batched_scratch(count: int, rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of batched's scratch: here 0."""
    return 0
