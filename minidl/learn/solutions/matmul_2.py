"""Matmul 2: pack a panel, from a matrix that may be transposed: a solution."""

from numpy import ndarray


def pack(
    b: ndarray, k_step: int, n_step: int, depth: int, columns: int, first: int, width: int, packed: ndarray
) -> None:
    """Copy columns first, first + 1, ... of a matrix (depth, columns) into a panel (depth, width), a vector."""
    for k in range(depth):
        for j in range(width):
            n = first + j
            packed[k * width + j] = b[k * k_step + n * n_step] if n < columns else 0
