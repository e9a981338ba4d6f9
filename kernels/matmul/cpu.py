"""Matrix products by BLAS (Numba's np.dot calls SciPy's OpenBLAS), the rows of the output split over threads.

The split depends on the number of rows only, never on the number of threads, so that the bits do not either. Where a
whole product is small, one thread is faster than two.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import __all__ as __all__

BLOCKS = 8  # at most this many blocks of rows
ROWS = 32  # with at least so many rows in each: a block packs all of b for itself


@jit
def _blocks(rows: int) -> int:
    return max(1, min(BLOCKS, rows // ROWS))


@parallel_jit
def nn(a: ndarray, b: ndarray, out: ndarray) -> None:
    rows = out.shape[0]
    blocks = _blocks(rows)
    for block in prange(blocks):
        lo, hi = block * rows // blocks, (block + 1) * rows // blocks
        np.dot(a[lo:hi], b, out[lo:hi])


@parallel_jit
def nt(a: ndarray, b: ndarray, out: ndarray) -> None:
    rows = out.shape[0]
    blocks = _blocks(rows)
    for block in prange(blocks):
        lo, hi = block * rows // blocks, (block + 1) * rows // blocks
        np.dot(a[lo:hi], b.T, out[lo:hi])


@parallel_jit
def tn(a: ndarray, b: ndarray, transposed: ndarray, out: ndarray) -> None:
    """A block of out's rows is a block of a's columns: it is transposed first, into the scratch that the caller gives,
    which costs little beside the product and lets BLAS take it."""
    rows, inner = out.shape[0], a.shape[0]
    blocks = _blocks(rows)
    for block in prange(blocks):
        lo, hi = block * rows // blocks, (block + 1) * rows // blocks
        piece = transposed[lo:hi]
        for k in range(inner):
            for m in range(hi - lo):
                piece[m, k] = a[k, lo + m]
        np.dot(piece, b, out[lo:hi])
