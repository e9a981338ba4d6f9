"""The loop over tiles that all convolutions share: it copies one tile ahead of the sums, as matmul/cuda_tile.py does.

A convolution is a matrix product whose first matrix does not exist: its elements are read from the image. So only the
copies differ from those of a product. A Walk is a way to find the elements of successive tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import commit, put, store4, wait_all

from ..matmul.cuda_loader import DEPTH
from ..matmul.cuda_tile import VECTOR, Tile, multiplier


class Walk(NamedTuple):
    """start(state, table, g, row0, column0, group) -> the number of tiles; prepares state and table

    fetch(sa, sb, half_a, half_b, state, a, b, table, g)   copies a tile, and moves on to the next one

    state: `integers` of each thread. table: `entries` integers in shared memory. g: the geometry. row0, column0: of the
    block's tile. half_a, half_b: where the tile begins in shared memory. a, b: global memory.
    """

    a_stride: int  # of a's tile in shared memory, see matmul/cuda_loader.py
    rows_stay: bool  # a's tile keeps its rows (`by_rows` there)
    integers: int
    entries: int
    start: Any
    fetch: Any


def pipeline(tile: Tile, walk: Walk, b_stride: int, in_pairs: bool = False) -> Any:
    """Return a function that adds the products of all tiles to a thread's sums. The parameters: `multiplier`, Walk.

    in_pairs: the number of tiles is even, and `fetch` may copy one tile more. Then the function takes fewer registers.
    """
    A_HALF, B_HALF = (tile.rows if walk.rows_stay else DEPTH) * walk.a_stride, DEPTH * b_stride  # elements
    multiply, fetch = multiplier(tile, walk.a_stride, b_stride, walk.rows_stay), walk.fetch

    @device
    def add_all(
        sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int, tiles: int,
        state: ndarray, a: ndarray, b: ndarray, table: ndarray, g: Any,
    ) -> None:  # fmt: skip
        if tiles > 0:
            fetch(sa, sb, 0, 0, state, a, b, table, g)
            commit()
            turns = int32((tiles if in_pairs else tiles - 1) >> 1)
            while turns > 0:
                turns = int32(turns - 1)
                wait_all()
                cuda.syncthreads()
                fetch(sa, sb, A_HALF, B_HALF, state, a, b, table, g)
                commit()
                multiply(sums, p, q, sa, sb, at_a, at_b)
                wait_all()
                cuda.syncthreads()
                fetch(sa, sb, 0, 0, state, a, b, table, g)
                commit()
                multiply(sums, p, q, sa, sb, at_a + A_HALF, at_b + B_HALF)
            wait_all()
            cuda.syncthreads()
            if not in_pairs:
                if (tiles - 1) & 1:
                    fetch(sa, sb, A_HALF, B_HALF, state, a, b, table, g)
                    commit()
                    multiply(sums, p, q, sa, sb, at_a, at_b)
                    wait_all()
                    cuda.syncthreads()
                    at_a, at_b = int32(at_a + A_HALF), int32(at_b + B_HALF)
                multiply(sums, p, q, sa, sb, at_a, at_b)

    return add_all


def row_writer(tile: Tile, wide: bool) -> Any:
    """Return a function that writes row i of a thread's sums: out[at + n] for the columns n < columns.

    x: the thread's first column. wide: by 16 bytes.
    """
    COLUMNS, WIDTH = tile.columns, tile.width

    @device
    def write(out: ndarray, at: int, sums: ndarray, i: int, x: int, columns: int) -> None:
        for half in range(WIDTH // VECTOR):
            n = int32(x + half * (COLUMNS // 2))
            j = half * VECTOR
            if wide:
                if n < columns:
                    store4(out, at + n, (sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3]))
            else:
                for more in range(VECTOR):
                    if n + more < columns:
                        put(out, at + n + more, sums[i, j + more])

    return write
