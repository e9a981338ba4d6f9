"""Shares by speed: how synchronous replicas of unequal speed divide each global batch, so that none waits for another.

    v_i            images per second of replica i's gradients, since the last review
    s_i = v_i / sum v
    b_i = s_i * B, by largest remainder, in multiples of a grain (data/shared.py); B = P * batch size never changes

    step        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 ...
    reviews             r         r           r           all tell each other their speeds (a sum of 2 P numbers)
    division    equal   | equal   | by the    | by the speeds of the first two reviews
                                    speeds of the first review

A speed is the median of the last three reviews: one step that the system has disturbed does not change the division,
and a replica that slows down or recovers has another share within twelve steps. A division changes only if this makes
steps shorter by GAIN. A run uses at most MOST divisions, since each size of a batch is recorded separately.

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
MEDIAN = 3  # reviews from which a speed is computed
GAIN = 0.03  # by which the steps of a new division must be shorter
MOST = 8  # divisions in a run
DIGITS = 6  # of a speed: a clock that begins at another time measures other last digits
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
    the next review. measured: images and seconds of this replica's gradients since the last review.
    """

    def __init__(self, batch_size: int, replicas: int, shares: Sequence[float] | None = None, once: bool = False):
        self.batch_size, self.replicas, self.once = batch_size, replicas, once
        self.division: Division = divide(batch_size, [1.0] * replicas if shares is None else shares)
        self.coming, self.known = self.division, [self.division]
        self.speeds: deque[list[float]] = deque(maxlen=MEDIAN)
        self.constant = shares is not None
        self.due = REVIEW
        self.new = True  # whether the next step is the first one with its division: it may record a program
        self.measured = [0.0, 0.0]

    def stepped(self, images: int, seconds: float, whole: bool) -> None:
        """Note the end of a step, and the time of this replica's gradient. whole: whether it was a full batch."""
        self.due = max(0, self.due - 1)
        if whole and not self.new:
            self.measured = [self.measured[0] + images, self.measured[1] + seconds]
        self.new = False

    def review(self, measured: np.ndarray) -> None:
        """Begin the next division, and choose the one after it. measured (P, 2): `measured` of all replicas."""
        self.due, self.measured = REVIEW, [0.0, 0.0]
        self.new = self.coming != self.division
        self.division = self.coming
        if self.once and self.speeds:
            self.constant = True
            return
        if (measured > 0).all():
            self.speeds.append([float(f"{images / seconds:.{DIGITS}g}") for images, seconds in measured])
            self.coming = self._chosen(np.median(self.speeds, axis=0))

    def _chosen(self, speeds: np.ndarray) -> Division:
        """Return the next division for these speeds (P,) in images per second."""

        def seconds(division: Division) -> float:
            return float((np.array(division) / speeds).max())

        best = divide(self.batch_size, speeds)
        if best not in self.known:
            used = min(self.known, key=seconds)
            if len(self.known) == MOST or seconds(used) <= (1 + GAIN) * seconds(best):
                best = used
        if seconds(best) > (1 - GAIN) * seconds(self.coming):
            return self.coming
        if best not in self.known:
            self.known.append(best)
        return best

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must contain. It is the same on all replicas."""
        return {
            "division": [*self.division], "coming": [*self.coming], "known": [[*one] for one in self.known],
            "speeds": [*self.speeds], "due": self.due, "new": int(self.new), "constant": int(self.constant),
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises Mismatch if it does not fit."""
        divisions = [*saved["known"], saved["division"], saved["coming"]]
        whole, replicas = self.batch_size * self.replicas, self.replicas
        if any(len(one) != replicas or sum(one) != whole or min(one) < 1 for one in divisions):
            raise Mismatch(f"a division of {whole} images among {replicas} replicas is not possible: "
                              f"{divisions[:4]}")  # fmt: skip
        if any(len(one) != replicas or min(one) <= 0 for one in saved["speeds"]) or saved["due"] > REVIEW:
            raise Mismatch(f"expected positive speeds of {replicas} replicas, and a review within {REVIEW} steps")
        self.division, self.coming = tuple(saved["division"]), tuple(saved["coming"])
        self.known = [tuple(one) for one in saved["known"]]
        self.speeds = deque(saved["speeds"], maxlen=MEDIAN)
        self.due, self.new, self.constant = saved["due"], bool(saved["new"]), bool(saved["constant"])
