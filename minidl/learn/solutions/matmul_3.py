"""Matmul 3: tiles at the edges: a solution."""

import numpy as np
from numpy import ndarray

MR, NR = 4, 8  # rows and columns of a tile


def tile(a: ndarray, rows: list[int], panel: ndarray) -> ndarray:
    """Return the sums (MR, NR) of a tile: of MR rows of a (M, K), and of a panel (K, NR)."""
    assert len(rows) == MR and panel.shape == (a.shape[1], NR), "a tile has 4 rows and 8 columns"
    return np.stack([a[row] @ panel for row in rows])


def product(a: ndarray, b: ndarray, out: ndarray) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N) with `tile`."""
    rows, columns = out.shape
    for n in range(0, columns, NR):
        wide = min(NR, columns - n)
        panel = np.zeros((b.shape[0], NR), b.dtype)
        panel[:, :wide] = b[:, n : n + wide]
        for m in range(0, rows, MR):
            high = min(MR, rows - m)
            sums = tile(a, [min(m + i, rows - 1) for i in range(MR)], panel)
            out[m : m + high, n : n + wide] = sums[:high, :wide]
