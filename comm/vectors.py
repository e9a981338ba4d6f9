"""Arithmetic on flat vectors, and copies: what methods compute with, besides a replica's gradient and update.

Every operation is one kernel of the device's table: one pass over memory. It counts as "mix" in the statistics, and a
simulated clock advances by its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.comm.fabric.base import Fabric
from minidl.comm.fabric.wire import EXACT
from minidl.engine.device import Device
from minidl.errors import MinidlError

UNCHANGED = -0.0  # the summand that changes no number: 0.0 would turn -0.0 into 0.0


class VectorArithmetic:
    """Operations on vectors (n,) of one type. All vectors of a call have the same length and are contiguous.

    Raises MinidlError for vectors of different lengths.
    """

    fabric: Fabric

    def mix_into(self, target: np.ndarray, other: np.ndarray, weight: float) -> None:
        """target <- target + weight * (other - target)"""
        _check_lengths(target, other)
        with self.fabric.working("mix", target.size):
            _table().mix.mix(target, other, float(weight))
        self._changed(target)

    def copy(self, vector: np.ndarray, out: np.ndarray) -> None:
        """out <- vector"""
        _check_lengths(vector, out)
        with self.fabric.working("mix", vector.size):
            out[:] = vector
        self._changed(out)

    def scale(self, vector: np.ndarray, factor: float, out: np.ndarray | None = None) -> None:
        """out <- factor * vector; by default, out is the vector itself."""
        out = vector if out is None else out
        _check_lengths(vector, out)
        with self.fabric.working("mix", vector.size):
            _table().elementwise.affine(vector, float(factor), UNCHANGED, out)
        self._changed(out)

    def axpy(self, factor: float, x: np.ndarray, y: np.ndarray) -> None:
        """y <- y + factor * x"""
        _check_lengths(x, y)
        with self.fabric.working("mix", y.size):
            _table().mix.axpy(float(factor), x, y)
        self._changed(y)

    def pull(self, x: np.ndarray, center: np.ndarray, weight: float, out: np.ndarray) -> None:
        """out <- weight * (x - center)"""
        _check_lengths(x, center)
        _check_lengths(x, out)
        with self.fabric.working("mix", x.size):
            _table().mix.pull(x, center, float(weight), out)
        self._changed(out)

    def elastic(self, x: np.ndarray, center: np.ndarray, weight: float) -> None:
        """Pull two vectors towards each other (Zhang, Choromanska, LeCun: NeurIPS 2015). Their sum stays the same.

        d = weight * (x - center),    x <- x - d,    center <- center + d
        """
        _check_lengths(x, center)
        with self.fabric.working("mix", x.size):
            _table().mix.elastic(x, center, float(weight))
        self._changed(x)
        self._changed(center)

    def drift(self, x: np.ndarray, before: np.ndarray) -> float:
        """Return |x - before| / |before|, with Euclidean norms; 0 if both vectors are 0."""
        moved, square, _ = self.norms_of_change(x, before, [(0, x.size)])[0].tolist()
        return moved / square if square else math.inf if moved else 0.0

    def norms_of_change(self, x: np.ndarray, before: np.ndarray, blocks: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the norms |x - before|, |before| and |x| of each range (start, stop), (B, 3) float64."""
        _check_lengths(x, before)
        kernels: Any = _table().drift
        starts, stops = np.array(blocks, np.int64).reshape(-1, 2).T.copy()
        squares = np.empty((len(blocks), 3))
        with self.fabric.working("mix", x.size):
            kernels.drift(x, before, starts, stops, np.empty(kernels.drift_partial(len(blocks))), squares)
        return np.sqrt(squares)

    def compile_arithmetic(self) -> None:
        """Compile the kernels of all operations, or load them from the cache, so that no step does."""
        x, y = np.ones(1, np.float32), np.ones(1, np.float32)  # writable, like received messages
        self.mix_into(x, y, 0.5)
        self.scale(x, 1.0)
        self.axpy(0.0, x, y)
        self.elastic(x, y, 0.0)
        self.pull(x, y, 0.0, np.empty_like(x))
        self.drift(x, y)
        for summand in (x, y):
            EXACT.add(y, x, summand)

    def _changed(self, vector: np.ndarray) -> None:
        """Called after a vector was written to. A replica's weights may share its memory."""


def _table() -> Device:
    return Device("cpu")


def _check_lengths(x: np.ndarray, y: np.ndarray) -> None:
    if x.size != y.size:
        raise MinidlError(f"vectors of {x.size} and {y.size} elements: expected two of one length")
