"""Elastic averaging on parabolas: simulations that tell whether it converges, where no bound is known (stability.py).

On the parabola h/2 x^2 the gradient is h x. So x, the momentum v and the center c are numbers, and a method is a few
lines. With s = eta h and a = eta rho, each visit of a worker to the center is:

    v <- mu v - s x,           x <- x + v               period - 1 times
    d = a (x - c),    v <- mu v - s x,    x <- x + v - d,    c <- c + d             (EASGD, MEASGD)

    d = a (x - c),    x <- x - d,    c <- c + d
    v <- mu v - s (x + mu v),  x <- x + v               period times                (EAMSGD)

In `round robin` the workers visit in the order of their ranks, in `asynchronous` and `eamsgd` each visitor is drawn at
random. In `sync` all visit at the same time: then the mean of all x and the difference of two of them develop
independently, and only the mean moves the center.

A simulation runs many values of a (A) on many parabolas (H) at the same time, because a network has many curvatures.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

KINDS = ("sync", "round robin", "asynchronous", "eamsgd")
ROUNDS = 200  # of a simulation
WORKERS = 8  # more workers that visit one after the other are simulated as 8: the largest stable a hardly depends on P
CURVATURES = 16  # parabolas, evenly spaced up to the largest curvature
PULLS = 24  # values of a that are tried at the same time


class Case(NamedTuple):
    """What stability depends on, besides rho. kind: one of KINDS. step: eta h, for the largest curvature h."""

    kind: str
    replicas: int
    step: float
    period: int = 1
    momentum: float = 0.0


def largest_pull(case: Case) -> float:
    """Return the largest stable a = eta rho; 0 if even rho = 0 diverges.

    Tries values up to 2, or up to 4 / P in `sync`, which no method survives at any learning rate.
    """
    if not math.isfinite(case.step) or diverges(case, np.zeros(1))[0]:
        return 0.0
    low, high = 0.0, 4 / case.replicas if case.kind == "sync" else 2.0
    for _ in range(2):  # the second pass divides one interval of the first
        pulls = np.linspace(low, high, PULLS + 1)
        unstable = np.flatnonzero(diverges(case, pulls[1:]))
        if not unstable.size:
            return high
        low, high = pulls[unstable[0] : unstable[0] + 2]
    return float(low)


def diverges(case: Case, pulls: np.ndarray) -> np.ndarray:
    """Return for each a in `pulls` (A,) whether the method diverges on one of the parabolas, bool (A,)."""
    growth = 1.2 if case.kind in ("sync", "round robin") else 2.0  # a random order makes the norms fluctuate
    with np.errstate(all="ignore"):  # what diverges may become infinite
        norms = simulate(case, pulls)
        quarter = ROUNDS // 4
        before, after = norms[quarter : 2 * quarter].max(axis=0), norms[3 * quarter :].max(axis=0)
        return ~(after <= growth * before).all(axis=1)  # also True for NaN


def simulate(case: Case, pulls: np.ndarray) -> np.ndarray:
    """Run a method for ROUNDS rounds. Returns |(x, v, c)| after each round, (ROUNDS, A, H).

    pulls: the values of a, (A,). In a round each worker makes one visit, or at random one on average.
    """
    steps = case.step * np.arange(1, CURVATURES + 1) / CURVATURES
    workers = 2 if case.kind == "sync" else min(case.replicas, WORKERS)
    pull = pulls[:, None]
    chance = np.random.default_rng(0)
    x = np.empty((workers, len(pulls), CURVATURES))
    x[:] = chance.standard_normal((workers, 1, 1))
    v, c = np.zeros_like(x), np.zeros(x.shape[1:])
    one = local_step(steps, case.momentum, nesterov=case.kind == "eamsgd")
    before, all_of_them = power(one, case.period - 1), power(one, case.period)
    norms = np.empty((ROUNDS, *c.shape))
    for norm in norms:
        if case.kind == "sync":  # x[0]: the mean, x[1]: a difference
            x, v = apply(before, x, v)
            d = pull * np.stack([x[0] - c, x[1]])
            x, v = apply(one, x, v)
            x -= d
            c += case.replicas * d[0]
        for i in order(case.kind, workers, chance):
            if case.kind == "eamsgd":
                d = pull * (x[i] - c)
                x[i], v[i] = apply(all_of_them, x[i] - d, v[i])
            else:
                x[i], v[i] = apply(before, x[i], v[i])
                d = pull * (x[i] - c)
                x[i], v[i] = apply(one, x[i], v[i])
                x[i] -= d
            c += d
        norm[:] = np.sqrt((x * x + v * v).sum(axis=0) + c * c)
    return norms


def order(kind: str, workers: int, chance: np.random.Generator) -> list[int]:
    """Return which workers visit the center in a round, one after the other."""
    if kind == "sync":
        return []
    return list(range(workers)) if kind == "round robin" else chance.integers(workers, size=workers).tolist()


def local_step(steps: np.ndarray, momentum: float, nesterov: bool) -> np.ndarray:
    """Return the matrices of one local step: (x, v) <- matrix @ (x, v). steps: eta h, (H,). Returns (H, 2, 2)."""
    mu = momentum * (1 - steps) if nesterov else momentum + 0 * steps
    return np.moveaxis(np.array([[1 - steps, mu], [-steps, mu]]), -1, 0)


def power(matrices: np.ndarray, count: int) -> np.ndarray:
    """Return the matrices (H, 2, 2) of `count` local steps."""
    return np.linalg.matrix_power(matrices, count)


def apply(matrices: np.ndarray, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return matrices @ (x, v). matrices: (H, 2, 2); x, v: (..., H)."""
    (xx, xv), (vx, vv) = np.moveaxis(matrices, 0, -1)
    return xx * x + xv * v, vx * x + vv * v
