"""Dropout with counter-based random numbers.

Whether element i is kept is a pure function of (seed, offset + i). Therefore no mask is stored: the backward pass
evaluates the function again. A checkpoint needs only the integers seed and offset to continue with the same bits.
"""

from __future__ import annotations

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError


class Dropout(Function):
    def forward(self, x: np.ndarray, p: float, seed: int, offset: int) -> np.ndarray:
        self.options = p, seed, offset
        return self.masked(x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.masked(dy)

    def masked(self, x: np.ndarray) -> np.ndarray:
        y = self.device.empty(x.shape, x.dtype)
        self.device.dropout.dropout(x.ravel(), *self.options, y.ravel())
        return y


def dropout(x: Tensor, p: float, seed: int, offset: int) -> Tensor:
    """Set each element to 0 with probability p, and divide the others by 1 - p (Srivastava et al. 2014).

    seed, offset: the position in the random sequence (see engine/random.py). Raises ConfigError unless 0 <= p < 1.
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p = {p}; expected 0 <= p < 1")
    return Dropout.apply(x, p=float(p), seed=seed, offset=offset) if p else x
