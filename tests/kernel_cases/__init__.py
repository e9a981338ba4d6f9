"""What the cases of all kernels share: tests/test_kernels.py runs kernel_cases/<op>.py for each folder kernels/<op>.

Such a file has one function, `cases`: it yields the name of a kernel and the arguments of one call, by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Arguments = dict[str, Any]
Cases = Iterator[tuple[str, Arguments]]


class Arrays:
    """Makes the arguments: `normal` draws what is read, `empty` holds sevens that must be overwritten."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.random = np.random.default_rng(0)

    def constant(self, value: float) -> np.floating:
        """A number of the arrays' type, which sums with it keep."""
        return np.dtype(self.dtype).type(value)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return abs(self.normal(*shape)) + self.constant(0.5)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        return self.random.integers(below, size=shape)

    def empty(self, *shape: int) -> np.ndarray:
        return np.full(shape, 7, self.dtype)
