"""Learning-rate schedules: functions of the step that return a factor of the base rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from minidl.errors import ConfigError, nearest

Schedule = Callable[[int], float]


def constant(total: int) -> Schedule:
    """Always 1."""
    return lambda step: 1.0


def steps(total: int) -> Schedule:
    """1 in the first half of the run, then 0.1, and 0.01 in the last quarter."""

    def factor(step: int) -> float:
        if step >= total * 3 / 4:
            return 0.01
        return 0.1 if step >= total / 2 else 1.0

    return factor


def cosine(total: int) -> Schedule:
    """Half a cosine period, from 1 to 0 (Loshchilov and Hutter 2017)."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step / max(1, total), 1.0)))


def one_cycle(total: int, rise: float = 0.3, start: float = 1 / 25, end: float = 1e-4 / 25) -> Schedule:
    """From 1/25 up to 1 in the first 30% of the run, then down to almost 0, both along cosines (Smith and Topin 2018).

    total: the steps of the run. rise: the fraction of the run before the peak. start, end: the first and last factor.
    """

    def factor(step: int) -> float:
        peak = rise * total
        low, t = (start, 1 - step / peak) if step < peak else (end, (step - peak) / (total - peak or 1))
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(t, 1.0)))

    return factor


def warmed_up(schedule: Schedule, warmup: int) -> Schedule:
    """A linear rise to the first value of `schedule` in `warmup` steps, then the schedule (Goyal et al. 2017)."""
    return lambda step: schedule(0) * (step + 1) / (warmup + 1) if step < warmup else schedule(step - warmup)


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "constant": constant,
    "steps": steps,
    "cosine": cosine,
    "one-cycle": one_cycle,
}


def build(name: str, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """The schedule of that name for a run of total_steps, with a linear rise in the first warmup_steps.

    Raises ConfigError if the name is unknown or warmup_steps is not between 0 and total_steps.
    """
    if name not in SCHEDULES:
        known = list(SCHEDULES)
        raise ConfigError(f"unknown schedule {name!r}: expected one of {', '.join(known)}.{nearest(name, known)}")
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(f"warm-up of {warmup_steps} steps; expected 0 to {total_steps}, the length of the run")
    return warmed_up(SCHEDULES[name](total_steps - warmup_steps), warmup_steps)
