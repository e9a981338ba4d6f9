"""Elastic averaging: for which rho does it converge? Bounds, a default, warnings, and the curvature of a loss.

Near a minimum a loss is a sum of parabolas, one for each eigenvector of its Hessian. On a parabola of curvature h the
gradient is h x, so a step of the method is linear. It converges if and only if the eigenvalues of this linear map have
moduli below 1. With

    s = eta h         what a gradient step takes away from x
    a = eta rho       the pull of the center on a replica
    b = P a           the pull of all P replicas on the center

the mean m of all replicas, and the difference d of two of them, make these steps in synchronous elastic averaging:

    m <- (1 - s - a) m + a c                       d <- (1 - s - a) d
    c <- b m + (1 - b) c

By Jury's criterion for 2 x 2 matrices, they converge if and only if

    4 - 2s - 2a - 2b + s b > 0,      |1 - s - a - b + s b| < 1,      |1 - s - a| < 1

For 0 < s < 2 and a > 0, the first inequality implies the others. It holds for all smaller s, too, so the largest
curvature decides. Solved for a:

    synchronous       a < 2 (2 - s) / (2 + P (2 - s))      exact
    round robin       a <= (4 - 2s) / (4 - s)              sufficient only (Zhang, Choromanska, LeCun: NeurIPS 2015)

So a constant rho fails as P grows. The usual choice is P eta rho = 0.9. For a period above 1, for momentum, and for
workers that come in no fixed order, we know no bound; parabola.py simulates them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from minidl.comm.parabola import Case, largest_pull
from minidl.comm.replica import Batch, Mark, Replica

USUAL = 0.9  # P eta rho
MARGIN = 0.9  # a lowered default is this fraction of the largest stable rho
ITERATIONS = 20  # of the power iteration, at most
ENOUGH = 0.01  # it ends when an iteration changes the result by less than this, relative to it
DIGITS = 3  # of the result
NEAR = 1e-4  # distance of the two points of a finite difference, relative to |theta|


class Limit(NamedTuple):
    """The largest stable rho; 0 if no rho is stable. source: "exact", "sufficient" or "simulated"."""

    rho: float
    source: str


def default_rho(
    replicas: int, rate: float, curvature: float, period: int = 1, momentum: float = 0.0, kind: str = "sync"
) -> float:
    """Return the rho with P eta rho = 0.9, lowered to 0.9 of the largest stable rho. Arguments: see `limit`.

    If no rho is stable, because the learning rate is too large for the curvature, rho is not lowered.
    """
    usual, largest = USUAL / (replicas * rate), limit(kind, rate, replicas, period, momentum, curvature).rho
    return min(usual, MARGIN * largest) if largest else usual


def warning(
    kind: str, rate: float, rho: float, replicas: int, period: int, momentum: float, curvature: float
) -> str | None:
    """Return one line if the method may diverge with this rho: the bound, and the largest rho inside it. Else None.

    Arguments: see `limit`.
    """
    largest, source = limit(kind, rate, replicas, period, momentum, curvature)
    if rho <= largest and largest:
        return None
    where = f"with {replicas} replicas, --lr {rate:g} and an estimated curvature h = {curvature:.3g}"
    if not largest:
        why = "in a simulation on parabolas" if source == "simulated" else f"eta h = {rate * curvature:.3g} is above 2"
        return f"elastic averaging may diverge: {where}, no rho is stable ({why}); use a smaller --lr"
    causes = [f"a period of {period}"] * (period > 1) + [f"a momentum of {momentum:g}"] * (momentum > 0)
    reason = {
        "exact": "the bound of the synchronous method, 4 - 2s - 2a - 2b + s b > 0",
        "sufficient": "the bound of the round robin, a <= (4 - 2s) / (4 - s), which is sufficient, not necessary",
        "simulated": f"no bound is known for {' and '.join(causes) or 'asynchronous workers'}; a simulation on "
                     "parabolas",
    }[source]  # fmt: skip
    symbols = {"exact": ", with s = eta h, a = eta rho, b = P a,", "sufficient": ", with s = eta h, a = eta rho,"}
    return (f"elastic averaging may diverge: {where}, rho = {rho:.4g} is too large: {reason}{symbols.get(source, '')} "
            f"allows at most {largest:.3g}")  # fmt: skip


@cache
def limit(kind: str, rate: float, replicas: int, period: int, momentum: float, curvature: float) -> Limit:
    """Return the largest rho that is stable for all curvatures from 0 to this one.

    kind: one of `parabola.KINDS`. rate: eta, the largest of the run. period: local steps per exchange.
    """
    step = rate * curvature
    if period > 1 or momentum or kind not in ("sync", "round robin"):
        return Limit(largest_pull(Case(kind, replicas, step, period, momentum)) / rate, "simulated")
    if kind == "sync":
        return Limit(sync_bound(replicas, step) / rate, "exact")
    return Limit(round_robin_bound(step) / rate, "sufficient")


def sync_bound(replicas: int, step: float) -> float:
    """Return the largest stable a = eta rho of synchronous elastic averaging, for s = step; 0 if there is none."""
    return 2 * (2 - step) / (2 + replicas * (2 - step)) if step < 2 else 0.0


def round_robin_bound(step: float) -> float:
    """Return an a = eta rho up to which the round robin is stable, for s = step and any P; 0 if there is none."""
    return (4 - 2 * step) / (4 - step) if step < 2 else 0.0


def curvature(replica: Replica, batches: Sequence[Batch]) -> float:
    """Return the largest curvature of the mean loss of these batches, at theta, by power iteration.

    The product of the Hessian and a direction u is a finite difference of gradients, so an iteration needs two
    gradients of each batch:

        H u = (g(theta + e u) - g(theta - e u)) / 2e,      u <- H u / |H u|,      h = |H u|

    The first direction is the same in each run, and the result has DIGITS digits. So replicas with equal weights and
    batches get equal results, also if their processors round differently. The replica does not change, except for
    `grad`. It counts no time and no images. Returns infinity if a gradient is not finite.
    """
    theta, mark = replica.theta, replica.mark()
    before = theta.copy()
    near = NEAR * (_norm(before) or 1.0)
    direction, found = np.random.default_rng(0).standard_normal(theta.size), 0.0
    try:
        for _ in range(ITERATIONS):
            direction *= near / _norm(direction)
            direction = (_gradient(replica, mark, batches, before + direction)
                         - _gradient(replica, mark, batches, before - direction)) / (2 * near)  # fmt: skip
            last, found = found, _norm(direction)
            if not math.isfinite(found):
                return math.inf
            if abs(found - last) <= ENOUGH * found:  # also if both are 0
                break
    finally:
        theta[:] = before
        replica.touch()
        replica.undo(mark)
    return float(f"{found:.{DIGITS}g}")


def _norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm, without a BLAS, which would round differently with another number of threads."""
    return math.sqrt(float(np.square(vector, dtype=np.float64).sum()))


def _gradient(replica: Replica, mark: Mark, batches: Sequence[Batch], theta: np.ndarray) -> np.ndarray:
    """Return the mean gradient of some batches at these weights, float64, with the same dropout in each call."""
    replica.theta[:] = theta
    replica.touch()
    total = np.zeros(theta.size)
    for batch in batches:
        replica.undo(mark)
        replica.bound_engine().gradient(*batch)
        total += replica.grad
    return total / len(batches)
