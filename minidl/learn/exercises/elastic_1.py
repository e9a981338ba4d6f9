"""Elastic 1: a step of elastic averaging.

About ten minutes.

    d_i = eta * rho * (x_i - c)
    x_i <- x_i - eta * g_i - d_i
    c   <- c + sum_i d_i                         all right-hand sides are those before the step

Springs connect P replicas with the center c. Fill the hole: return the new replicas and the new center. Do not change
the arrays that you are given.

Read: "The spring" in docs/elastic.md.
Hint: compute all d_i first.
"""

from numpy import ndarray


def step(x: ndarray, c: ndarray, g: ndarray, eta: float, rho: float) -> tuple[ndarray, ndarray]:
    """Return the new (x, c); x (P, n): the replicas, c (n,): the center, g (P, n): the gradients."""
    raise NotImplementedError  # HOLE
