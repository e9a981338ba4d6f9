"""Instructions of tensor cores: small matrices, distributed over the registers of a warp (minidl/engine/cuda_mma.py).

A GPU adds the exact products in an order, and with a rounding, that NVIDIA does not document. Here, the sum is computed
in float64 and rounded once. Numbers that are not rounded to TF32 before a product are a mistake.
"""

from __future__ import annotations

import numpy as np

from .checks import KernelError
from .warps import WARP, check_whole

Words = list[np.ndarray]  # registers, each with a word for each thread
REST_OF_TF32 = np.uint32(0x1FFF)  # the bits of a float32 that a TF32 does not have


def by_rows(rows: np.ndarray, threads: np.ndarray) -> Words:
    """Return the four words of each thread after ldmatrix. rows (threads, 4): those whose addresses threads pass."""
    check_whole(threads, "ldmatrix")
    matrices = rows.reshape(-1, 4, WARP)  # 8 rows of 4 words
    return [matrices[:, m].reshape(-1) for m in range(4)]


def multiply(number: str, a: Words, b: Words, c: Words, threads: np.ndarray) -> Words:
    """Return c + a @ b. number: tf32, or bf16 with two elements in each word of a and b."""
    check_whole(threads, "mma")
    elements = _bf16 if number == "bf16" else _tf32
    columns = [_square(elements(word)) for word in a]  # each (warps, 8, 4 or 8): g by k
    rows = [_square(elements(word)) for word in b]
    left = np.concatenate([np.concatenate(columns[i : i + 2], 1) for i in (0, 2)], 2)  # (warps, 16, k)
    right = np.concatenate(rows, 2).swapaxes(1, 2)  # (warps, k, 8)
    sums = np.concatenate([_square(np.stack(c[i : i + 2], -1)) for i in (0, 2)], 1)  # (warps, 16, 8)
    result = (sums + left @ right).astype(np.float32)
    parts = [result[:, row : row + 8, q::2].reshape(-1) for row in (0, 8) for q in (0, 1)]
    return [np.ascontiguousarray(part) for part in parts]


def _square(elements: np.ndarray) -> np.ndarray:
    """(threads, n) -> (warps, 8, 4 n) in float64: thread 4 g + t has elements t n to t n + n - 1 of row g."""
    return elements.reshape(-1, 8, 4 * elements.shape[1]).astype(np.float64)


def _tf32(word: np.ndarray) -> np.ndarray:
    if (word & REST_OF_TF32).any():
        raise KernelError("mma of a number that is not rounded to TF32")
    return word.view(np.float32)[:, None]


def _bf16(word: np.ndarray) -> np.ndarray:
    return np.stack([word << np.uint32(16), word & np.uint32(0xFFFF0000)], -1).view(np.float32)


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to TF32, as words; ties away from 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & ~REST_OF_TF32
    return np.where(np.isfinite(x), rounded, bits & ~REST_OF_TF32)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to BF16, in the lower half of words; ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)
