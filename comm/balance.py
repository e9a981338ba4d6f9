"""Shares by speed: how synchronous replicas of unequal speed divide each global batch, so that none waits for another.

    t_i = (n_i + f_i) / v_i       seconds of a gradient of n_i images
    n_i = v_i * T - f_i           T: the same for all. By largest remainder, in multiples of a grain (data/shared.py)

f_i is the fixed part of a gradient (launches of kernels, Python), counted in images. It is 0 until replica i has been
measured with two sizes n, n' in seconds t, t': f_i = (n t' - n' t) / (t - t'). sum n_i = P * batch size never changes.

    step        0 1 2 3 | 4 5 6 7 | 8 9 10 11    | 12 ... 15 | 16 ...
    reviews             r         r              r           r   all tell each other their times (a sum of 4 P numbers)
    division    equal   | equal   | by the times | the same  | by the times
                                    of steps 1-3               of steps 9-11, and f

t_i is the median of the last WINDOW steps with the present division. So a few steps that the system has disturbed do
not change the division, and a replica that slows down or recovers has another share within twelve steps. Each size of
a batch is recorded separately, which takes as long as about three steps. So a new division must make steps shorter by
NEW_GAIN, a known one by GAIN, and a run uses at most MOST divisions.

A division begins with the review after the one that has chosen it. All replicas that begin this review know it. So if
a replica dies, the others know what each has trained, also those that had not finished the review.

Moreno-Alvarez, Paoletti, Rico-Gallego, Haut (J. Supercomputing 2022) give replicas parts by their speed. That their
measurement is repeated during the run, and damped, is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidl.data.shared import Division, divide
from minidl.schema import Mismatch

REVIEW = 4  # steps between two reviews
WINDOW = 9  # steps of which a time is the median: more than two reviews, so four disturbed steps do not change it
GAIN = 0.03  # the part by which steps must become shorter with another division
NEW_GAIN = 0.05  # the same for a division that must be recorded
APART = 0.25  # relative difference of two sizes from which f is computed
FIXED = 2  # f is at most the images of so many batches
MOST = 8  # divisions in a run
DIGITS = 6  # of a time: a clock that begins at another time measures other last digits
PRIOR = 10  # steps that each replica is assumed to have made before the first one


def per_step(weight: float, steps: np.ndarray, place: int) -> float:
    """Return how much a gradient counts in a replica that waits for no other: the less, the more steps it makes.

    weight: of all its gradients together. steps (P,): made by each replica. place: of this one.
    """
    return float(weight * (PRIOR + steps.mean()) / (PRIOR + steps[place]))


class Balancer:
    """The division among P replicas of now, the same on all of them.

    shares: (P,), constant; None: by speed. once: whether the first measured division is kept.
    division: of the present step. coming: from the next review on. known: all divisions of the run. due: steps until
    the next review. measured: seconds of this replica's gradients since the last review; 0: not comparable.
    times: seconds of all replicas in the last steps with this division. fixed: f of all replicas. past: the division
    before this one and its times, until f is computed from them.
    """

    def __init__(self, batch_size: int, replicas: int, shares: Sequence[float] | None = None, once: bool = False):
        self.batch_size, self.replicas, self.once = batch_size, replicas, once
        self.division: Division = divide(batch_size, [1.0] * replicas if shares is None else shares)
        self.coming, self.known = self.division, [self.division]
        self.times: deque[list[float]] = deque(maxlen=WINDOW)
        self.fixed, self.past = [0.0] * replicas, list[Sequence[float]]()
        self.constant = shares is not None
        self.due = REVIEW
        self.new = True  # whether the next step is the first one with its division: it may record a program
        self.measured: list[float] = []

    def stepped(self, seconds: float, whole: bool) -> None:
        """Note the end of a step, and the time of this replica's gradient. whole: whether it was a full batch."""
        self.due = max(0, self.due - 1)
        if not self.constant:
            self.measured.append(seconds if whole and not self.new else 0.0)
        self.new = False

    def review(self, measured: np.ndarray) -> None:
        """Begin the next division, or choose one. measured (P, REVIEW): `measured` of all replicas, filled with 0."""
        self.due, self.measured = REVIEW, []
        constant = self.once and len(self.times) > 0
        self.times.extend([float(f"{one:.{DIGITS}g}") for one in step] for step in measured.T if (step > 0).all())
        if self.coming != self.division:
            self.past = [self.division, self._medians()] if self.times else []
            self.times.clear()
            self.division, self.new = self.coming, True
        elif self.times and not constant:
            self._fit()
            self.coming = self._chosen()
        self.constant = constant

    def _medians(self) -> list[float]:
        """Return t (P,), in seconds."""
        return [float(one) for one in np.median(self.times, axis=0)]

    def _fit(self) -> None:
        """Compute f from the times with this division and the one before, where the sizes differ enough."""
        for place, (n, t, m, s) in enumerate(zip(self.division, self._medians(), *self.past or ((), ()))):
            if abs(n - m) >= APART * m and (n - m) * (t - s) > 0:
                self.fixed[place] = min(max(0.0, (n * s - m * t) / (t - s)), float(FIXED * self.batch_size))
        self.past = []

    def _chosen(self) -> Division:
        """Return the next division."""
        fixed = np.array(self.fixed)
        speeds = (np.array(self.division) + fixed) / self._medians()

        def seconds(division: Division) -> float:
            return float(((np.array(division) + fixed) / speeds).max())

        equal = (self.batch_size * self.replicas + fixed.sum()) / speeds.sum()  # T
        best, used = divide(self.batch_size, np.maximum(0.0, speeds * equal - fixed)), min(self.known, key=seconds)
        if len(self.known) < MOST and seconds(best) < (1 - NEW_GAIN) * seconds(used):
            self.known.append(best)
            return best
        return used if seconds(used) < (1 - GAIN) * seconds(self.division) else self.division

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must contain. It is the same on all replicas."""
        return {
            "division": [*self.division], "coming": [*self.coming], "known": [[*one] for one in self.known],
            "times": [*self.times], "fixed": [*self.fixed], "past": [[*one] for one in self.past], "due": self.due,
            "new": int(self.new), "constant": int(self.constant),
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises Mismatch if it does not fit."""
        divisions = [*saved["known"], saved["division"], saved["coming"]]
        whole, replicas = self.batch_size * self.replicas, self.replicas
        if any(len(one) != replicas or sum(one) != whole or min(one) < 1 for one in divisions):
            raise Mismatch(f"a division of {whole} images among {replicas} replicas is not possible: "
                              f"{divisions[:4]}")  # fmt: skip
        times, fixed, past = saved["times"], saved["fixed"], saved["past"]
        if any(len(one) != replicas or min(one) <= 0 for one in [*times, *past]) or len(past) not in (0, 2):
            raise Mismatch(f"expected positive times of {replicas} replicas, got {[*times, *past][:4]}")
        if len(fixed) != replicas or saved["due"] > REVIEW:
            raise Mismatch(f"expected a fixed time of {replicas} replicas and a review within {REVIEW} steps, got "
                           f"{fixed[:4]} and {saved['due']}")  # fmt: skip
        self.division, self.coming = tuple(saved["division"]), tuple(saved["coming"])
        self.known = [tuple(one) for one in saved["known"]]
        self.times, self.fixed, self.past = deque(times, maxlen=WINDOW), [*fixed], [*past]
        self.due, self.new, self.constant = saved["due"], bool(saved["new"]), bool(saved["constant"])
