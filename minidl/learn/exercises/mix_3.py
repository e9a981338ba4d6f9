"""Mix 3: two vectors pull each other, in one pass.

    d = weight * (x - center),    x -= d,    center += d

In elastic averaging a replica x and the center pull each other. The sum of both does not change, because d is the same
in both lines: it is computed before either changes. Fill the hole with one pass, which moves 16 bytes for each float32:
each number of both vectors is read once and written once. The check counts the accesses, as in exercise 1.

Read: the paragraph about `elastic` in kernels/mix/README.md.
Hint: two local variables for what you have read, and one for d.
"""

from collections.abc import MutableSequence


def elastic(x: MutableSequence[float], center: MutableSequence[float], weight: float) -> None:
    """Change x and center in place."""
    raise NotImplementedError  # HOLE
