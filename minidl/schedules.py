"""Learning-rate schedules: functions of the step that return the factor by which to multiply the base rate.

With several replicas, a step is the mean over the replicas: the batches of all, divided by their number. So the rate
depends on the samples of all replicas, and may be asked for in the middle of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from minidl.checked import one_of, whole
from minidl.errors import ConfigError

Schedule = Callable[[float], float]


def constant(total: int) -> Schedule:
    """Return a schedule that is always 1."""
    return lambda step: 1.0


def steps(total: int) -> Schedule:
    """Return a schedule: 1 in the first half of the run, then 0.1, and 0.01 in the last quarter."""

    def factor(step: float) -> float:
        if step >= total * 3 / 4:
            return 0.01
        return 0.1 if step >= total / 2 else 1.0

    return factor


def cosine(total: int) -> Schedule:
    """Return a schedule: half a cosine period, from 1 to 0 (Loshchilov and Hutter 2017)."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step / max(1, total), 1.0)))


def one_cycle(total: int, rise: float = 0.3, start: float = 1 / 25, end: float = 1e-4 / 25) -> Schedule:
    """Return a schedule: up from `start` to 1, then down to `end`, both along cosines (Smith and Topin 2018).

    total: the number of steps of the run. rise: the fraction of the run before the peak.
    """

    def factor(step: float) -> float:
        peak = rise * total
        low, t = (start, 1 - step / peak) if step < peak else (end, (step - peak) / (total - peak or 1))
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(t, 1.0)))

    return factor


def linear(total: int) -> Schedule:
    """Return a schedule: a line from 1 to 0."""
    return lambda step: 1 - min(step / max(1, total), 1.0)


def triangle(total: int, rise: float = 0.23, start: float = 0.2, end: float = 0.07) -> Schedule:
    """Return a schedule: a line from `start` up to 1, then a line down to `end` (Jordan 2024).

    total: the number of steps of the run. rise: the fraction of the run before the peak.
    """

    def factor(step: float) -> float:
        peak = rise * total
        low, t = (start, 1 - step / peak) if step < peak else (end, (step - peak) / (total - peak or 1))
        return 1 - (1 - low) * min(t, 1.0)

    return factor


def warmed_up(schedule: Schedule, warmup: int) -> Schedule:
    """Return a linear rise to `schedule(0)` in `warmup` steps, followed by the schedule (Goyal et al. 2017)."""
    return lambda step: schedule(0) * (step + 1) / (warmup + 1) if step < warmup else schedule(step - warmup)


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "constant": constant,
    "steps": steps,
    "cosine": cosine,
    "one-cycle": one_cycle,
    "linear": linear,
    "triangle": triangle,
}


def build(name: str, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """Return the schedule of that name for a run of total_steps. In the first warmup_steps it rises linearly.

    Raises ConfigError if the name is unknown, or if warmup_steps is not a whole number from 0 to total_steps.
    """
    one_of("schedule", name, SCHEDULES)
    total_steps = whole("schedule", "total_steps", total_steps)
    if not 0 <= whole("schedule", "warmup_steps", warmup_steps, -math.inf) <= total_steps:
        raise ConfigError(f"warm-up of {warmup_steps} steps; expected 0 to {total_steps}, the length of the run")
    return warmed_up(SCHEDULES[name](total_steps - warmup_steps), warmup_steps)
