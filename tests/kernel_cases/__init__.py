"""Arguments for the tests of kernels: for each folder kernels/<op>, tests/test_kernels.py uses kernel_cases/<op>.py.

Each of these files has a function `cases`. It yields the name of a kernel and {parameter: argument} of one call.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

Arguments = dict[str, Any]
Cases = Iterator[tuple[str, Arguments]]


class Arrays:
    """A source of arrays. `normal` returns a random input, `empty` an array of sevens that a kernel must overwrite.

    many: the elements of a large vector, for several threads of the CPU. kernels: the file that is tested, which knows
    the sizes of its scratch arrays.
    """

    def __init__(self, dtype: str, many: int = 70_001, kernels: str = "cpu") -> None:
        self.dtype, self.many, self.kernels = dtype, many, kernels
        self.random = np.random.default_rng(0)

    def scratch_size(self, folder: str, function: str, *sizes: Any) -> int:
        """Return how many elements of scratch the tested file of kernels/<folder> needs."""
        module = importlib.import_module(f"minidl.kernels.{folder}.{self.kernels}")
        return int(getattr(module, function)(*sizes))

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
