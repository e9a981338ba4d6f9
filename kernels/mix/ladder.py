"""The steps of README.md as code: theta += weight (other - theta). bench/bench_mix.py prints the table."""

from __future__ import annotations

from numpy import ndarray

from . import cpu


def in_numpy(theta: ndarray, other: ndarray, weight: float) -> None:
    """Make three passes: the difference and its multiple are new vectors; then the multiple is added."""
    theta += weight * (other - theta)


RUNGS = {"1 NumPy expression": in_numpy, "2 one pass, one thread": cpu.mix.part, "3 one pass, all threads": cpu.mix}
