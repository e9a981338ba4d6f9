"""Softmax 1: no overflow.

About ten minutes.

    p_j = e^x_j / sum_k e^x_k

e^1000 is larger than any float64, so this formula gives NaN for a row with the logits 1000 and 999. But the result does
not change if the same number is subtracted from all logits of a row. Fill the hole: compute the softmax of each row
without an overflow.

Read: the first lines of kernels/softmax/README.md.
Hint: which number makes all exponents at most 0, and one of them 0?
"""

from numpy import ndarray


def softmax(x: ndarray) -> ndarray:
    """Return the softmax of each row of x (rows, classes)."""
    raise NotImplementedError  # HOLE
