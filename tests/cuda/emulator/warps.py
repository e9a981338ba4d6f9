"""Instructions of a whole warp of 32 threads: numbers move between its threads."""

from __future__ import annotations

import numpy as np

from .checks import KernelError

WARP = 32


def check_whole(lanes: np.ndarray, what: str) -> None:
    """Raise KernelError unless these threads are whole warps, in order."""
    if lanes.size % WARP or (lanes.reshape(-1, WARP) != lanes[::WARP, None] + np.arange(WARP)).any():
        raise KernelError(f"{what} by a part of a warp")


def shuffle(how: str, values: np.ndarray, distance: np.ndarray, clamp: int) -> np.ndarray:
    """Return the value of another thread of the warp. Beyond the warp, threads keep their own value.

    how: bfly (thread ^ distance), down (+), up (-), idx (number `distance`). clamp: 31, or 0 for up: a whole warp.
    """
    if clamp & 31 not in (0, 31) or clamp >> 5:
        raise KernelError("a shuffle within a part of a warp")
    lane = np.arange(values.size) % WARP
    distance = distance.astype(np.int64)
    moved = {"bfly": lane ^ distance, "down": lane + distance, "up": lane - distance, "idx": distance % WARP}
    source = np.where((moved[how] < 0) | (moved[how] >= WARP), lane, moved[how])
    return values[np.arange(values.size) - lane + source]


def ballot(wanted: np.ndarray) -> np.ndarray:
    """Return to each thread a number with a bit for each thread of its warp: whether `wanted` is true there."""
    bits = (wanted.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
    return np.repeat(bits.astype(np.uint32), WARP)
