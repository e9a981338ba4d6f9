"""The consensus distance: a measure of how much the replicas' weights differ.

    mean = 1/P * sum_i x_i      distance = sqrt(1/P * sum_i |x_i - mean|^2)      relative = distance / |mean|

`distance` is the consensus distance of Kong, Lin, Koloskova, Jaggi and Stich (Consensus Control for Decentralized Deep
Learning, ICML 2021). They find that decentralised training loses no accuracy as long as the distance stays below a
critical value. `relative` can be compared between models and between moments of a run: 0.01 means that a replica's
weights differ from the mean of all replicas by about 1%.

`Fabric.gather` yields one vector at a time. Each vector updates the mean and the sum of squares (Welford 1962), in
float64. The simpler formula sum_i |x_i|^2 - P * |mean|^2 would give mostly rounding error for a small distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

BLOCK = 1 << 15  # number of elements that are processed at a time, so that they stay in the cache


class Consensus:
    """The consensus distance of the vectors added so far. mean: their average, float64 (size,)."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size)
        self.squares = 0.0  # sum_i |x_i - mean|^2
        self.count = 0

    def add(self, vector: np.ndarray) -> None:
        """Add a vector (size,) of any float type. No reference to it is kept."""
        self.count += 1
        for start in range(0, self.mean.size, BLOCK):
            mean = self.mean[start : start + BLOCK]
            before = vector[start : start + BLOCK] - mean
            mean += before / self.count
            # squares grow by (x - old mean) @ (x - new mean), and x - new mean = (count - 1) / count * (x - old mean).
            self.squares += float(before @ before) * (self.count - 1) / self.count

    @property
    def distance(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def relative(self) -> float:
        """distance / |mean|, or the distance if the mean is zero."""
        return self.distance / (float(np.linalg.norm(self.mean)) or 1.0)


def consensus_distance(vectors: Iterable[np.ndarray]) -> float:
    """Return `Consensus.relative` for vectors of the same length; 0 if there are no vectors."""
    consensus = None
    for vector in vectors:
        consensus = consensus or Consensus(vector.size)
        consensus.add(vector)
    return consensus.relative if consensus else 0.0
