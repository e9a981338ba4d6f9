"""The kernel of all matrix products on a GPU: out (M, N) = a (M, K) @ b (K, N), in tiles whose sums stay in registers.

A block of 64 to 256 threads computes a tile of out, ROWS x COLUMNS; in float32, a thread computes 64 numbers of it. For
each DEPTH k, tiles of a and b are copied to shared memory (cuda_loader.py), one tile ahead of the sums: while the
threads multiply tile t, the copies of tile t + 1 are on their way. Shared memory has two halves that are used in turn,
and the loop over tiles contains both turns, so that all addresses in it are constants plus one register.

For each k, a thread loads 8 (or 16 and 4) numbers of a and b, 16 bytes at a time, and does 8 x 8 multiply-adds:

    b: 4 numbers, and 4 more half a tile to the right      [ b0 b1 b2 b3 | b4 b5 b6 b7 ]
    a: 4 numbers, and 4 more half a tile below   a0 .. a7  [ 64 sums in registers      ]     sums[i, j] += a_i b_j

The threads of a warp lie in a Z curve: neighbours share rows or columns, so a warp's load needs few different words.
The first tile takes the k that are left over after whole tiles, so that the loop needs no bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel
from minidl.engine.cuda_memory import commit, get, load4, put, store4, wait_all

from .cuda_loader import DEPTH, across, along, by_rows, elements

VECTOR = 4  # numbers that are loaded together


@dataclass(frozen=True)
class Tile:
    """A tile of out: rows x columns for a block, height x width of it for each of its threads.

    blocks: an SM must be able to hold so many; 0: as many as have 512 threads, with 128 registers each
    """

    rows: int
    columns: int
    height: int
    width: int
    blocks: int = 0

    @property
    def threads(self) -> int:
        return self.rows // self.height * (self.columns // self.width)

    @property
    def blocks_per_sm(self) -> int:
        return self.blocks or 512 // self.threads


def positions(threads_across: int) -> Any:
    """Return a function of a thread's number: its (row, column) among the threads of a tile.

    A warp is 4 x 8 threads, or 8 x 4, 16 x 2 or 32 x 1 if so few lie side by side. Bits of a thread's number within its
    warp belong alternately to its column and its row: this is a Z curve.
    """
    wide = min(8, threads_across)
    warps = threads_across // wide  # side by side
    high = 32 // wide

    @device
    def position(thread: int) -> tuple[int, int]:
        warp, lane = thread >> 5, thread & 31
        if wide == 8:
            x, y = lane & 1 | lane >> 1 & 2 | lane >> 2 & 4, lane >> 1 & 1 | lane >> 2 & 2
        elif wide == 4:
            x, y = lane & 1 | lane >> 1 & 2, lane >> 1 & 1 | lane >> 2 & 6
        else:  # one warp wide
            return int32(thread // wide), int32(thread & (wide - 1))
        return int32(warp // warps * high + y), int32(warp % warps * wide + x)

    return position


def fragments(length: int, count: int) -> Any:
    """Return a function that loads a thread's `count` numbers for one k: quads, at equal distances in the tile."""
    quads = count // VECTOR
    further = length // quads

    @device
    def load(numbers: ndarray, shared: ndarray, at: int) -> None:
        for i in range(0, count, VECTOR):
            numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3] = load4(shared, at + i // VECTOR * further)

    return load


def multiplier(tile: Tile, a_stride: int, b_stride: int, rows_stay: bool = False) -> Any:
    """Return a function that adds the products of one tile of a and one of b to a thread's sums.

    p, q: room for its numbers of a and b; at_a, at_b: where the first of them are in shared memory.
    rows_stay: a's tile keeps its rows (`by_rows` in cuda_loader.py); p then has room for four k of each row.
    """
    if rows_stay:
        return _multiplier_by_rows(tile, b_stride)
    HEIGHT, WIDTH = tile.height, tile.width
    load_a, load_b = fragments(tile.rows, HEIGHT), fragments(tile.columns, WIDTH)

    @device
    def step(sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int) -> None:
        """Add the products of one k."""
        load_a(p, sa, at_a)
        load_b(q, sb, at_b)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                sums[i, j] += p[i] * q[j]

    @device
    def multiply(sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int) -> None:
        """Add the products of one tile. The steps are written out, since the compiler would not unroll a loop."""
        step(sums, p, q, sa, sb, at_a, at_b)
        step(sums, p, q, sa, sb, at_a + a_stride, at_b + b_stride)
        step(sums, p, q, sa, sb, at_a + 2 * a_stride, at_b + 2 * b_stride)
        step(sums, p, q, sa, sb, at_a + 3 * a_stride, at_b + 3 * b_stride)
        step(sums, p, q, sa, sb, at_a + 4 * a_stride, at_b + 4 * b_stride)
        step(sums, p, q, sa, sb, at_a + 5 * a_stride, at_b + 5 * b_stride)
        step(sums, p, q, sa, sb, at_a + 6 * a_stride, at_b + 6 * b_stride)
        step(sums, p, q, sa, sb, at_a + 7 * a_stride, at_b + 7 * b_stride)

    return multiply


def _multiplier_by_rows(tile: Tile, b_stride: int) -> Any:
    """As `multiplier`, for a tile of a that keeps its rows: a load delivers four successive k of a row."""
    HEIGHT, WIDTH, APART = tile.height, tile.width, tile.rows // tile.height * DEPTH
    load_b = fragments(tile.columns, WIDTH)

    @device
    def load_row(p: ndarray, i: int, sa: ndarray, at: int) -> None:
        p[i, 0], p[i, 1], p[i, 2], p[i, 3] = load4(sa, at)

    @device
    def step(sums: ndarray, p: ndarray, q: ndarray, k: int, sb: ndarray, at_b: int) -> None:
        load_b(q, sb, at_b)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                sums[i, j] += p[i, k] * q[j]

    @device
    def quad(sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int) -> None:
        """Add the products of four k."""
        for i in range(HEIGHT):
            load_row(p, i, sa, at_a + i * APART)
        step(sums, p, q, 0, sb, at_b)
        step(sums, p, q, 1, sb, at_b + b_stride)
        step(sums, p, q, 2, sb, at_b + 2 * b_stride)
        step(sums, p, q, 3, sb, at_b + 3 * b_stride)

    @device
    def multiply(sums: ndarray, p: ndarray, q: ndarray, sa: ndarray, sb: ndarray, at_a: int, at_b: int) -> None:
        quad(sums, p, q, sa, sb, at_a, at_b)
        quad(sums, p, q, sa, sb, at_a ^ VECTOR, at_b + VECTOR * b_stride)  # the other half of the row

    return multiply


def places(tile: Tile, rows_stay: bool) -> tuple[Any, Any]:
    """Return two functions of y, a thread's row among the threads of a tile.

    begin(y)    where the thread's first number of a is in shared memory
    row(y, i)   the row of the tile to which its sums[i] belong
    """
    FURTHER, DOWN = tile.rows * VECTOR // tile.height, tile.rows // tile.height

    @device
    def begin(y: int) -> int:
        return int32(y * DEPTH + (y & VECTOR)) if rows_stay else int32(y * VECTOR)

    @device
    def row(y: int, i: int) -> int:
        return int32(y + i * DOWN) if rows_stay else int32(y * VECTOR + i % VECTOR + i // VECTOR * FURTHER)

    return begin, row


@cache
def product(
    tile: Tile, a_along: bool, b_along: bool, wide: bool, item: int, planes: bool = False, rows_stay: bool = False
) -> Kernel:
    """Return the kernel for a tile. a_along, b_along: whether a's and b's numbers for successive k are neighbours.

    wide: the other matrices, and out, are accessed by 16 bytes. item: bytes of an element. planes: the third dimension
    of the grid counts products, whose matrices follow one another in memory. rows_stay: a's tile keeps its rows.
    """
    ROWS, COLUMNS, HEIGHT, WIDTH, THREADS = tile.rows, tile.columns, tile.height, tile.width, tile.threads
    loader = across if wide else elements
    load_a = by_rows if rows_stay else along if a_along else loader
    A_STRIDE, first_a, fetch_a, fetch_part_a = load_a(ROWS, item, THREADS)
    B_STRIDE, first_b, fetch_b, fetch_part_b = (along if b_along else loader)(COLUMNS, item, THREADS)
    A_HALF, B_HALF = (ROWS if rows_stay else DEPTH) * A_STRIDE, DEPTH * B_STRIDE  # elements
    A_SIZE, B_SIZE = 2 * A_HALF, 2 * B_HALF
    position, (begin, row_of) = positions(COLUMNS // WIDTH), places(tile, rows_stay)
    multiply, P_SHAPE = multiplier(tile, A_STRIDE, B_STRIDE, rows_stay), (HEIGHT, VECTOR) if rows_stay else HEIGHT

    def product(
        a: ndarray, b: ndarray, bias: ndarray, relu: bool, out: ndarray,
        rows: int, columns: int, depth: int, a_step: int, b_step: int,
    ) -> None:  # fmt: skip
        sa, sb = cuda.shared.array(A_SIZE, a.dtype, 16), cuda.shared.array(B_SIZE, a.dtype, 16)
        sums = cuda.local.array((HEIGHT, WIDTH), a.dtype)
        p, q = cuda.local.array(P_SHAPE, a.dtype), cuda.local.array(WIDTH, a.dtype)
        zero = a.dtype.type(0)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                sums[i, j] = zero
        thread = int32(cuda.threadIdx.x)
        y, x = position(thread)
        first_row, column0 = int32(cuda.blockIdx.x * ROWS), int32(cuda.blockIdx.y * COLUMNS)
        row0 = int32(min(first_row, rows - ROWS)) if rows_stay else first_row
        plane = int32(cuda.blockIdx.z) if planes else int32(0)
        if depth > 0:
            ak, ai = first_a(thread)
            bk, bi = first_b(thread)
            a_size, b_size = int32(rows - row0), int32(columns - column0)
            if a_along:
                a_at, a_next = int32((row0 + ai) * a_step + ak), int32(DEPTH)
            else:
                a_at, a_next = int32(ak * a_step + row0 + ai), int32(DEPTH * a_step)
            if b_along:
                b_at, b_next = int32((column0 + bi) * b_step + bk), int32(DEPTH)
            else:
                b_at, b_next = int32(bk * b_step + column0 + bi), int32(DEPTH * b_step)
            if planes:
                a_at, b_at = int32(a_at + plane * rows * depth), int32(b_at + plane * depth * columns)
            to_a = ai * A_STRIDE + (ak ^ ai & VECTOR) if rows_stay else ak * A_STRIDE + ai
            to_a, to_b = int32(to_a), int32(bk * B_STRIDE + bi)
            at_a, at_b = begin(y), int32(x * VECTOR)
            part = int32((depth - 1) % DEPTH + 1)
            fetch_part_a(sa, to_a, a, a_at, a_step, ak, ai, a_size, part)
            fetch_part_b(sb, to_b, b, b_at, b_step, bk, bi, b_size, part)
            commit()
            a_at = int32(a_at + (part if a_along else part * a_step))
            b_at = int32(b_at + (part if b_along else part * b_step))
            tiles = int32((depth - part) // DEPTH)  # after the first
            turns = int32(tiles >> 1)
            while turns > 0:
                turns = int32(turns - 1)
                wait_all()
                cuda.syncthreads()
                fetch_a(sa, to_a + A_HALF, a, a_at, a_step, ak, ai, a_size, DEPTH)
                fetch_b(sb, to_b + B_HALF, b, b_at, b_step, bk, bi, b_size, DEPTH)
                commit()
                multiply(sums, p, q, sa, sb, at_a, at_b)
                a_at = int32(a_at + a_next)
                b_at = int32(b_at + b_next)
                wait_all()
                cuda.syncthreads()
                fetch_a(sa, to_a, a, a_at, a_step, ak, ai, a_size, DEPTH)
                fetch_b(sb, to_b, b, b_at, b_step, bk, bi, b_size, DEPTH)
                commit()
                multiply(sums, p, q, sa, sb, at_a + A_HALF, at_b + B_HALF)
                a_at = int32(a_at + a_next)
                b_at = int32(b_at + b_next)
            wait_all()
            cuda.syncthreads()
            if tiles & 1:
                fetch_a(sa, to_a + A_HALF, a, a_at, a_step, ak, ai, a_size, DEPTH)
                fetch_b(sb, to_b + B_HALF, b, b_at, b_step, bk, bi, b_size, DEPTH)
                commit()
                multiply(sums, p, q, sa, sb, at_a, at_b)
                wait_all()
                cuda.syncthreads()
                at_a, at_b = int32(at_a + A_HALF), int32(at_b + B_HALF)
            multiply(sums, p, q, sa, sb, at_a, at_b)
        if bias.size > 0 or relu:
            for j in range(WIDTH):
                n = int32(column0 + x * VECTOR + j % VECTOR + j // VECTOR * (COLUMNS // 2))
                summand = get(bias, n) if bias.size > 0 and n < columns else zero
                for i in range(HEIGHT):
                    total = sums[i, j] + summand
                    sums[i, j] = zero if relu and total < zero else total
        for i in range(HEIGHT):
            m = int32(row0 + row_of(y, i))
            if first_row <= m < rows:
                row = int32(plane * rows + m) if planes else m
                for half in range(WIDTH // VECTOR):
                    n = int32(column0 + x * VECTOR + half * (COLUMNS // 2))
                    j = half * VECTOR
                    if wide:
                        if n < columns:
                            store4(out, row * columns + n, (sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3]))
                    else:
                        for more in range(VECTOR):
                            if n + more < columns:
                                put(out, row * columns + n + more, sums[i, j + more])

    return kernel(THREADS, tile.blocks_per_sm)(product)
