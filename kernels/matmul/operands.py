"""How kernels for matrix products find the numbers of a and b, stored as they are or transposed."""

from __future__ import annotations

from typing import NamedTuple

from numpy import ndarray


class Left(NamedTuple):
    """The matrix a: a[m, k] is numbers[m * row + k * step]; row or step is 1."""

    numbers: ndarray
    row: int
    step: int


class Right(NamedTuple):
    """The matrix b: b[k, n] is numbers[k * step + n * column], and panel number p begins at numbers[p * panel].

    packed: whether all panels are packed (reference.py); then column is 1, within a panel.
    """

    numbers: ndarray
    panel: int
    step: int
    column: int
    packed: bool
