"""Shared by the cases of all kernels: tests/test_kernels.py runs kernel_cases/<op>.py for each folder kernels/<op>.

Such a file has a function `cases`, which yields the name of a kernel and the arguments of one call by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Arguments = dict[str, Any]
Cases = Iterator[tuple[str, Arguments]]


class Arrays:
    """Makes the arguments: `normal` draws inputs, `empty` contains sevens that must be overwritten."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.random = np.random.default_rng(0)

    def constant(self, value: float) -> np.floating:
        """Return a number of the arrays' type, so that sums with it have the same type."""
        return np.dtype(self.dtype).type(value)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return abs(self.normal(*shape)) + self.constant(0.5)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        return self.random.integers(below, size=shape)

    def empty(self, *shape: int) -> np.ndarray:
        return np.full(shape, 7, self.dtype)
