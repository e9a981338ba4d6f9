"""Matmul 1: add products in pieces, always in the same order.

About ten minutes.

`product` computes out = a @ b. A fast kernel splits each sum over k into pieces. It adds the products of a piece in the
order of k, starting from 0, and then adds the piece to the sum of the pieces before it. This order is fixed, so the
bits of the result do not depend on the number of threads. Fill the hole: add the piece that begins at `start` to
`total`. The last piece may be shorter. All numbers stay float32, and the check compares bits.

Read: "Bits" and step 5 of the ladder in kernels/matmul/README.md.
Hint: the piece has a separate sum, which also begins with np.float32(0).
"""

import numpy as np
from numpy import ndarray


def product(a: ndarray, b: ndarray, piece: int, out: ndarray) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N) in float32, in pieces of `piece` products."""
    rows, columns = out.shape
    depth = a.shape[1]
    for m in range(rows):
        for n in range(columns):
            total = np.float32(0)
            for start in range(0, depth, piece):
                raise NotImplementedError  # HOLE: add the products k = start, start + 1, ... of this piece
            out[m, n] = total
