"""Decentralised 1: weights for any graph.

About ten minutes.

Replicas exchange along the edges of a graph. A mixing matrix W needs rows that sum to 1, so that replicas which agree
do not change, and columns that sum to 1, so that their average does not change. For any graph, these weights do it
(Metropolis, Hastings): W_ij = 1 / (1 + max(d_i, d_j)) for each edge, where d_i is the number of neighbours of i, and
W_ii is what is missing to 1. Fill the hole.

Read: "Mixing" in docs/decentralised.md.
Hint: W is symmetric, so it is enough that the rows sum to 1.
"""

import numpy as np
from numpy import ndarray


def mixing_matrix(neighbours: list[set[int]]) -> ndarray:
    """Return W (P, P); neighbours[i] has the replicas with which replica i exchanges, without i."""
    size = len(neighbours)
    w = np.zeros((size, size))
    raise NotImplementedError  # HOLE: fill w
    return w
