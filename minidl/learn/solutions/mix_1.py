"""Mix 1: theta += weight * (other - theta), in one pass: a solution."""

from collections.abc import MutableSequence


def mix(theta: MutableSequence[float], other: MutableSequence[float], weight: float) -> None:
    """Compute theta += weight * (other - theta) in place."""
    for i in range(len(theta)):
        here = theta[i]
        theta[i] = here + weight * (other[i] - here)
