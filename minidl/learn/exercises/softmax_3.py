"""Softmax 3: the maximum and the sum in a single pass.

A softmax needs the maximum of a row before it can add the exponentials: two passes over the row. If a row is too long
for the cache, or arrives in pieces, one pass is better (Milakov, Gimelshein 2018). Keep the largest number so far, and
the sum of e^(x - largest) over all numbers so far. If a larger number comes, the sum must be corrected: which factor
changes e^(x - old) into e^(x - new)? Fill the hole for one number. `values` can be read only once.

Read: "Why the naive loop is slow" in kernels/softmax/README.md.
Hint: a number that is not larger needs no correction. e^(-inf) is 0.
"""

import math
from collections.abc import Iterator


def one_pass(values: Iterator[float]) -> tuple[float, float]:
    """Return (largest, total): the largest of the values, and the sum of e^(value - largest)."""
    largest, total = -math.inf, 0.0
    for value in values:
        raise NotImplementedError  # HOLE: update largest and total
    return largest, total
