"""Arguments for the tests of kernels: for each folder kernels/<op>, tests/test_kernels.py uses kernel_cases/<op>.py.

Each of these files has a function `cases`. It yields the name of a kernel and {parameter: argument} of one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Arguments = dict[str, Any]
Cases = Iterator[tuple[str, Arguments]]


class Arrays:
    """A source of arrays. `normal` returns a random input, `empty` an array of sevens that a kernel must overwrite."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.random = np.random.default_rng(0)

    def constant(self, value: float) -> np.floating:
        """Return a number of the arrays' type, so that adding it to an array keeps the array's type."""
        return np.dtype(self.dtype).type(value)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return abs(self.normal(*shape)) + self.constant(0.5)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        return self.random.integers(below, size=shape)

    def empty(self, *shape: int) -> np.ndarray:
        return np.full(shape, 7, self.dtype)
