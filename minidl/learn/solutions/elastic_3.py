"""Elastic 3: round robin, with gradients computed before the turn: a solution."""

from numpy import ndarray


def turns(x: ndarray, c: float, g: ndarray, eta: float, a: float) -> tuple[ndarray, float]:
    """Return (x, c) after a turn of each replica; x (P,), g (P,): the gradients before the round; a = eta * rho."""
    x = x.copy()
    for i in range(x.size):
        d = a * (x[i] - c)
        x[i] -= eta * g[i] + d
        c += d
    return x, c
