"""Softmax 3: the maximum and the sum in a single pass: a solution."""

import math
from collections.abc import Iterator


def one_pass(values: Iterator[float]) -> tuple[float, float]:
    """Return (largest, total): the largest of the values, and the sum of e^(value - largest)."""
    largest, total = -math.inf, 0.0
    for value in values:
        if value > largest:
            total *= math.exp(largest - value)
            largest = value
        total += math.exp(value - largest)
    return largest, total
