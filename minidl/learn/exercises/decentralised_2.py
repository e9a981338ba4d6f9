"""Decentralised 2: a step of D-PSGD.

    x_i <- sum_j W_ij * (x_j - eta * g_j(x_j))

Each replica makes a gradient step on its own data, and then they mix. All replicas make the step at the same time, so
each sum uses the weights that the others have after *this* gradient step, not after this round of mixing. Fill the
hole: return the new weights of all replicas. Do not change x. Compute each gradient once, from the weights before
mixing.

Read: "Training while mixing" in docs/decentralised.md.
Hint: first all gradient steps, then all sums.
"""

from collections.abc import Callable

from numpy import ndarray


def step(x: ndarray, gradient: Callable[[int, ndarray], ndarray], w: ndarray, eta: float) -> ndarray:
    """Return the next weights (P, n) of the replicas; x (P, n), w (P, P); gradient(j, x_j) is g_j(x_j)."""
    raise NotImplementedError  # HOLE
