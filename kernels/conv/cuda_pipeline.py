"""The loop over tiles that all convolutions share: it copies one tile ahead of the sums, as matmul/cuda_tile.py does.

A convolution is a matrix product whose first matrix does not exist: its elements are read from the image. So only the
copies differ from those of a product. A Walk is a way to find the elements of successive tiles. What all threads must
know about a tile is computed ahead, and stored in a table in shared memory, for up to `chunk` tiles at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device
from minidl.engine.cuda_memory import commit, put, store4, wait_all

from ..matmul.cuda_loader import DEPTH
from ..matmul.cuda_tile import VECTOR, Tile, multiplier

ENTRY = 4  # integers of an entry in the table: a thread reads it at once


class Walk(NamedTuple):
    """start(state, g, row0, column0, group) -> the number of tiles; prepares what a thread knows

    fill(state, table, g, begin, count)   writes the table for `count` tiles from `begin` on, and an empty one
    fetch(sa, sb, half_a, half_b, state, a, b, table, g)   copies a tile, and moves on to the next one

    state: `integers` of each thread. table: `entries` integers in shared memory. g: the geometry. row0, column0: of the
    block's tile. half_a, half_b: where the tile begins in shared memory. a, b: global memory.
    """

    a_stride: int  # of a's tile in shared memory, see matmul/cuda_loader.py
    b_stride: int
    rows_stay: bool  # a's tile keeps its rows (`by_rows` there)
    integers: int
    entries: int
    chunk: int  # even
    start: Any
    fill: Any
    fetch: Any


def pipeline(tile: Tile, walk: Walk) -> Any:
    """Return a function that adds the products of all tiles to a thread's sums. The parameters: `multiplier`, Walk.

    It copies one tile too many, which is empty.
    """
    A_HALF, B_HALF = (tile.rows if walk.rows_stay else DEPTH) * walk.a_stride, DEPTH * walk.b_stride  # elements
    multiply = multiplier(tile, walk.a_stride, walk.b_stride, walk.rows_stay)
    CHUNK, fill, fetch = walk.chunk, walk.fill, walk.fetch

    @device
    def add_all(
        sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int, tiles: int,
        state: ndarray, a: ndarray, b: ndarray, table: ndarray, g: Any,
    ) -> None:  # fmt: skip
        begin = int32(0)
        while begin < tiles:
            count = int32(min(tiles - begin, CHUNK))
            fill(state, table, g, begin, count)
            cuda.syncthreads()  # the table is complete
            fetch(sa, sb, 0, 0, state, a, b, table, g)
            commit()
            turns = int32(count >> 1)
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
            if count & 1:
                multiply(sums, p, q, sa, sb, at_a, at_b)
            begin = int32(begin + CHUNK)

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
