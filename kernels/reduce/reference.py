"""Reductions along the middle axis of x (outer, n, inner): the definition and the oracle of the tests.

Any sequence of neighbouring axes can be merged into one such axis.
"""

from __future__ import annotations

import numpy as np

__all__ = ["maximum", "maximum_backward", "sum"]


def sum(x: np.ndarray, partial: np.ndarray, out: np.ndarray) -> None:
    """Compute out (outer, inner) = sum over the middle axis of x (outer, n, inner), in float64.

    partial: scratch of a fast kernel, not used here.
    """
    for o in range(x.shape[0]):
        for i in range(x.shape[2]):
            total = np.float64(0)
            for k in range(x.shape[1]):
                total += x[o, k, i]
            out[o, i] = total


def maximum(x: np.ndarray, out: np.ndarray, winner: np.ndarray) -> None:
    """Compute out (outer, inner) = the largest of x (outer, n, inner); winner (int64) = its first index. NaN wins."""
    for o in range(x.shape[0]):
        for i in range(x.shape[2]):
            best = 0
            for k in range(1, x.shape[1]):
                if x[o, best, i] == x[o, best, i] and not x[o, k, i] <= x[o, best, i]:
                    best = k
            out[o, i], winner[o, i] = x[o, best, i], best


def maximum_backward(dy: np.ndarray, winner: np.ndarray, dx: np.ndarray) -> None:
    """Compute dx (outer, n, inner) = dy (outer, inner) at the index `winner` of the middle axis, else 0."""
    for o in range(dx.shape[0]):
        for i in range(dx.shape[2]):
            for k in range(dx.shape[1]):
                dx[o, k, i] = dy[o, i] if winner[o, i] == k else 0
