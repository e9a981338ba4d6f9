"""Matmul 2: pack a panel, from a matrix that may be transposed.

A tile needs `width` successive columns of b, for all k. In memory the rows of these columns are far apart. `pack`
copies them into a panel that the tile reads from beginning to end. b is given as a vector, its memory: the number for k
and n is b[k * k_step + n * n_step]. In `nn` the steps are (N, 1). In `nt`, b is stored transposed, and they are (1, K).
Fill the hole: write all depth * width numbers of the panel. If the matrix ends before the panel does, the remaining
columns of the panel are 0.

Read: step 4 of the ladder in kernels/matmul/README.md, and the docstring of kernels/matmul/pack.py.
Hint: row k of the panel begins at packed[k * width]; column j of the panel is column first + j of the matrix.
"""

from numpy import ndarray


def pack(
    b: ndarray, k_step: int, n_step: int, depth: int, columns: int, first: int, width: int, packed: ndarray
) -> None:
    """Copy columns first, first + 1, ... of a matrix (depth, columns) into a panel (depth, width), a vector."""
    raise NotImplementedError  # HOLE
