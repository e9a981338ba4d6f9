"""Mix 1: theta += weight * (other - theta), in one pass.

About ten minutes.

NumPy computes this expression in three passes, with two temporary vectors. One pass needs 12 bytes for each float32:
read theta, read other, write theta. Fill the hole with such a pass. The check counts the accesses: each number is read
once, and each number of theta is written once. So keep what you have read in a local variable, as a compiled loop keeps
it in a register. The two vectors are not NumPy arrays: they have len() and single elements, no slices.

Read: kernels/mix/README.md.
Hint: theta[i] += ... theta[i] ... reads theta[i] twice.
"""

from collections.abc import MutableSequence


def mix(theta: MutableSequence[float], other: MutableSequence[float], weight: float) -> None:
    """Compute theta += weight * (other - theta) in place."""
    raise NotImplementedError  # HOLE
