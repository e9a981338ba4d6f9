"""The memory and the time of a simulation, predicted before it begins."""

from __future__ import annotations

from minidl import resources
from minidl.errors import ConfigError

VECTORS = 4  # vectors of a replica, each with one value per parameter: weights, gradient, at most two of the optimizer
OBJECTS = 60_000  # bytes of a replica's Python objects
PER_PAIR = 40  # bytes of statistics for each pair of ranks
INDEX = 8  # bytes for each training image, in the shuffled order of a replica
SPEED = 10e9  # FLOP/s that a core reaches in a step of a small model
STEP = 1e-3  # seconds of a step besides its arithmetic


def require_memory(ranks: int, parameters: int, images: int) -> None:
    """Raise ConfigError if the memory for all ranks exceeds the free memory."""
    needed = ranks * (VECTORS * 4 * parameters + OBJECTS + INDEX * images + PER_PAIR * ranks)
    free = resources.available()
    if needed > free:
        raise ConfigError(f"{ranks:,} ranks with {parameters:,} parameters each need about "
                          f"{resources.size(needed)} of memory, and {resources.size(free)} are free: "
                          "use fewer --ranks or a smaller model")  # fmt: skip


def duration(ranks: int, steps: int, flops: float) -> str:
    """Return the predicted real time as text; "" for less than a minute. flops: FLOPs of a step of one rank."""
    minutes = ranks * steps * (flops / (SPEED * resources.cores()) + STEP) / 60
    if minutes < 1:
        return ""
    return f", about {minutes:.0f} real minutes" if minutes < 120 else f", about {minutes / 60:,.0f} real hours"
