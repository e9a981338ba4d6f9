"""Dropout (Srivastava et al. 2014): the definition and the oracle of the tests."""

from __future__ import annotations

from numpy import ndarray

__all__ = ["dropout"]

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: consecutive multiples are far apart
MASK64, MASK32 = 2**64 - 1, 2**32 - 1


def mix64(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): 64 bits, each of which depends on all bits of z."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def mix32(z: int, key: int) -> int:
    """A function like mix64 for 32 bits: "triple32" (Wellons 2018), with a key added between two of its steps."""
    z = ((z ^ (z >> 17)) * 0xED5AD4BB) & MASK32
    z = ((z ^ (z >> 11)) + key) & MASK32
    z = (z * 0xAC4C1B51) & MASK32
    z = ((z ^ (z >> 15)) * 0x31848BAB) & MASK32
    return z ^ (z >> 14)


def dropout(x: ndarray, p: float, seed: int, offset: int, y: ndarray) -> None:
    """y_i = x_i / (1 - p) with probability 1 - p, else 0; x, y (n,), 0 <= p <= 1, 0 <= offset.

    Element i depends only on number offset + i of the random stream with this `seed`: a second call with the same seed
    and offset drops the same elements, so the backward pass is this kernel applied to dy.

    Number k of the stream: the upper 32 bits of k and the seed are mixed into two 32-bit keys, which 2^32 numbers
    share; the lower 32 bits of k are mixed with these keys. So a loop over elements multiplies only 32-bit integers,
    and many of them simultaneously.
    """
    for i in range(x.size):
        block, number = divmod(offset + i, 2**32)
        keys = mix64((mix64((seed + GOLDEN) & MASK64) + block * GOLDEN) & MASK64)
        uniform = (mix32((number + keys) & MASK32, keys >> 32) >> 1) / 2**31  # in [0, 1)
        y[i] = x[i] / (1 - p) if uniform >= p else 0
