"""Decentralised 1: weights for any graph: a solution."""

import numpy as np
from numpy import ndarray


def mixing_matrix(neighbours: list[set[int]]) -> ndarray:
    """Return W (P, P); neighbours[i] has the replicas with which replica i exchanges, without i."""
    size = len(neighbours)
    w = np.zeros((size, size))
    for i in range(size):
        for j in neighbours[i]:
            w[i, j] = 1 / (1 + max(len(neighbours[i]), len(neighbours[j])))
        w[i, i] = 1 - w[i].sum()
    return w
