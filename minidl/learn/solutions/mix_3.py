"""Mix 3: two vectors pull each other, in one pass: a solution."""

from collections.abc import MutableSequence


def elastic(x: MutableSequence[float], center: MutableSequence[float], weight: float) -> None:
    """Change x and center in place."""
    for i in range(len(x)):
        here, there = x[i], center[i]
        d = weight * (here - there)
        x[i] = here - d
        center[i] = there + d
