"""The steps of README.md as code: theta += weight * (other - theta). bench/bench_mix.py prints the table."""

from __future__ import annotations

from numpy import ndarray

from . import cpu


def in_numpy(theta: ndarray, other: ndarray, weight: float) -> None:
    """Make three passes: two compute the difference and its multiple, as new vectors, and one adds the multiple."""
    theta += weight * (other - theta)


RUNGS = {"1 NumPy expression": in_numpy, "2 one pass, one thread": cpu.mix.part, "3 one pass, all threads": cpu.mix}
