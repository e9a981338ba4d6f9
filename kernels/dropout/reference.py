"""Dropout (Srivastava et al. 2014): the definition and the oracle of the tests."""

from __future__ import annotations

from numpy import ndarray

__all__ = ["dropout"]

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: consecutive multiples lie far apart
MASK = 2**64 - 1


def _mix(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): 64 bits, each depending on each bit of z."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def dropout(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """y_i = x_i / (1 - p) with probability 1 - p, else 0; x, y (n,), 0 <= p <= 1.

    Element i is decided by number offset + i of the random stream that `seed` begins, and by nothing else: a
    second call with the same numbers drops the same elements, so that the backward pass is this kernel on dy.
    """
    key = _mix((seed + GOLDEN) & MASK)
    for i in range(x.size):
        uniform = (_mix((key + (offset + i) * GOLDEN) & MASK) >> 11) / 2**53  # in [0, 1)
        y[i] = x[i] / (1 - p) if uniform >= p else 0
