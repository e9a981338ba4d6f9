"""The consensus distance: how far apart the replicas are.

    mean = 1/P sum_i x_i        distance = sqrt(1/P sum_i |x_i - mean|^2)        relative = distance / |mean|

`distance` is the consensus distance of Kong, Lin, Koloskova, Jaggi and Stich (Consensus Control for Decentralized Deep
Learning, ICML 2021). They explain with it how much worse a model becomes if it is trained without a center: not at all,
as long as the distance stays below some value. Divided by |mean| it is comparable between models, and between moments
of one run: 0.01 means that a replica's weights are 1% away from the average of all.

The vectors come one at a time, as `Fabric.gather` yields them. Mean and squares are updated together (Welford 1962), in
float64. A mean that is known only at the end would need a difference of large sums, which loses a small distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

BLOCK = 1 << 15  # elements processed at a time, so that they stay in the cache


class Consensus:
    """The consensus distance of the vectors added so far. mean (size,): their average, float64."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size)
        self.squares = 0.0  # sum_i |x_i - mean|^2
        self.count = 0

    def add(self, vector: np.ndarray) -> None:
        """Add a vector (size,) of any float type. It is not kept."""
        self.count += 1
        for start in range(0, self.mean.size, BLOCK):
            mean = self.mean[start : start + BLOCK]
            before = vector[start : start + BLOCK] - mean
            mean += before / self.count
            # |x - mean before| |x - mean after|, and the second is (count - 1) / count of the first
            self.squares += float(before @ before) * (self.count - 1) / self.count

    @property
    def distance(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def relative(self) -> float:
        """Return distance / |mean|, or the distance itself if the mean is zero."""
        return self.distance / (float(np.linalg.norm(self.mean)) or 1.0)


def consensus_distance(vectors: Iterable[np.ndarray]) -> float:
    """Return `Consensus.relative` of vectors of the same length; 0 if there are none."""
    consensus = None
    for vector in vectors:
        consensus = consensus or Consensus(vector.size)
        consensus.add(vector)
    return consensus.relative if consensus else 0.0
