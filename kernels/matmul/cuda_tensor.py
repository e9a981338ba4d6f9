"""Matrix products on tensor cores: a and b are rounded to TF32 or BF16; products are exact, and sums are float32.

A block of 256 threads computes a tile of out, 128 x 128. Tiles of a and b, DEEP deep, are copied to shared memory as in
cuda_tile.py, one tile ahead. Each of the 8 warps computes 64 x 32 of out, as 4 x 4 squares of 16 x 8:

    cuda_mma.py: a warp multiplies 16 x 8 numbers of a with 8 x 8 of b (BF16: 16 x 16 with 16 x 8) in one instruction

A matrix whose numbers for successive k are neighbours keeps this order in shared memory, so that `ldmatrix` loads four
squares of 8 x 4 at once. Otherwise, threads load single numbers. Both happen in float32, and numbers are rounded in
registers: so one kernel serves both precisions. In BF16, the numbers k and k + 4 share a word. This changes the order
of k in the same way for a and for b, so the sum has the same terms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import float32, int32, uint32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch
from minidl.engine.cuda_memory import commit, copy_16_if, copy_if, get, put, wait_all
from minidl.engine.cuda_mma import ldmatrix, multiply_bf16, multiply_tf32, to_bf16, to_tf32
from minidl.engine.cuda_numbers import bits_of, of_bits
from minidl.engine.device import address

THREADS, WARP, WARPS_ACROSS = 256, 32, 4
SIDE = 128  # of the tile of a block
ROWS, COLUMNS = 64, 32  # of a warp's part of it
HEIGHT, WIDTH = ROWS // 16, COLUMNS // 8  # squares of 16 x 8 in it
DEEP = 16  # k in a tile
VECTOR = 4  # numbers in 16 bytes
LINE = SIDE + 8  # of a tile that is stored by k: the 4 x 8 numbers of a fragment lie in 32 different banks
HALF = DEEP * LINE  # elements of a tile in shared memory; there are two of each matrix
BOTH = 2 * HALF


@device
def _place(i: int, k: int) -> int:
    """Return where element (i, k) is in a tile that is stored by i: the quads of k are permuted against conflicts."""
    return int32(i * DEEP + ((k // VECTOR) ^ (i >> 1 & 3)) * VECTOR + k % VECTOR)


def fetches(is_along: bool, wide: bool) -> Any:
    """Return a function that copies a tile. is_along: k is contiguous in global memory; wide: copies have 16 bytes.

    row0, k0: the tile's first element in the matrix; rows, depth: the size of the matrix; step: its width.
    """
    vector = VECTOR if wide else 1
    inner = DEEP if is_along else SIDE  # contiguous elements of the tile in global memory
    lanes = inner // vector
    sweep = THREADS // lanes  # rows of `inner` elements that all threads copy at once
    copies = SIDE * DEEP // inner // sweep
    copy = copy_16_if if wide else copy_if

    @device
    def fetch(
        shared: ndarray, half: int, source: ndarray, row0: int, k0: int, rows: int, depth: int, step: int
    ) -> None:
        thread = int32(cuda.threadIdx.x)
        x, y = int32(thread % lanes * vector), int32(thread // lanes)
        for j in range(copies):
            line = int32(y + j * sweep)
            if is_along:
                i, k, to = int32(row0 + line), int32(k0 + x), _place(line, x)
                at = int32(i * step + k)
            else:
                i, k, to = int32(row0 + x), int32(k0 + line), int32(line * LINE + x)
                at = int32(k * step + i)
            copy(shared, int32(half + to), source, at, i < rows and k < depth)

    return fetch


@device
def _word(shared: ndarray, at: int) -> int:
    return uint32(bits_of(get(shared, at)))


def fragments_of_a(is_along: bool) -> Any:
    """Return a function that loads 16 x 8 numbers from row i and k on, distributed as cuda_mma.py describes."""

    @device
    def load(shared: ndarray, half: int, i: int, k: int, lane: int) -> tuple[int, int, int, int]:
        if is_along:
            return ldmatrix(shared, int32(half + _place(i + lane % 16, k + lane // 16 * VECTOR)))
        at = int32(half + (k + lane % 4) * LINE + i + lane // 4)
        further = int32(at + VECTOR * LINE)
        return _word(shared, at), _word(shared, at + 8), _word(shared, further), _word(shared, further + 8)

    return load


def fragments_of_b(is_along: bool) -> Any:
    """Return a function that loads 8 x 16 numbers from k and column i on: two words for each 8 columns."""

    @device
    def load(shared: ndarray, half: int, i: int, k: int, lane: int) -> tuple[int, int, int, int]:
        if is_along:
            return ldmatrix(shared, int32(half + _place(i + lane % 8 + lane // 16 * 8, k + lane // 8 % 2 * VECTOR)))
        at = int32(half + (k + lane % 4) * LINE + i + lane // 4)
        further = int32(at + VECTOR * LINE)
        return _word(shared, at), _word(shared, further), _word(shared, at + 8), _word(shared, further + 8)

    return load


@device
def _tf32(word: int) -> int:
    return to_tf32(of_bits(int32(word)))


@device
def _bf16(low: int, high: int) -> int:
    return to_bf16(of_bits(int32(low)), of_bits(int32(high)))


def squares(bf16: bool, a_along: bool, b_along: bool) -> Any:
    """Return a function that adds the products of k to k + 7 (BF16: k + 15) to the sums of a warp."""
    load_a, load_b = fragments_of_a(a_along), fragments_of_b(b_along)

    @device
    def round_a(shared: ndarray, half: int, i: int, k: int, lane: int) -> tuple[int, int, int, int]:
        p = load_a(shared, half, i, k, lane)
        if bf16:
            q = load_a(shared, half, i, k + 8, lane)
            return _bf16(p[0], p[2]), _bf16(p[1], p[3]), _bf16(q[0], q[2]), _bf16(q[1], q[3])
        return _tf32(p[0]), _tf32(p[1]), _tf32(p[2]), _tf32(p[3])

    @device
    def round_b(shared: ndarray, half: int, i: int, k: int, lane: int) -> tuple[int, int, int, int]:
        p = load_b(shared, half, i, k, lane)
        if bf16:
            q = load_b(shared, half, i, k + 8, lane)
            return _bf16(p[0], p[1]), _bf16(q[0], q[1]), _bf16(p[2], p[3]), _bf16(q[2], q[3])
        return _tf32(p[0]), _tf32(p[1]), _tf32(p[2]), _tf32(p[3])

    @device
    def add(sums: ndarray, i: int, j: int, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        c = sums[i, j, 0], sums[i, j, 1], sums[i, j, 2], sums[i, j, 3]
        c = multiply_bf16(c, a, b) if bf16 else multiply_tf32(c, a, b)
        sums[i, j, 0], sums[i, j, 1], sums[i, j, 2], sums[i, j, 3] = c

    @device
    def add_row(sums: ndarray, i: int, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        add(sums, i, 0, a, (b[0], b[1]))
        add(sums, i, 1, a, (b[2], b[3]))
        add(sums, i, 2, a, (b[4], b[5]))
        add(sums, i, 3, a, (b[6], b[7]))

    @device
    def multiply(sums: ndarray, sa: ndarray, sb: ndarray, half: int, row: int, column: int, k: int, lane: int) -> None:
        b0, b1, b2, b3 = round_b(sb, half, column, k, lane)
        b4, b5, b6, b7 = round_b(sb, half, column + 16, k, lane)
        b = b0, b1, b2, b3, b4, b5, b6, b7
        add_row(sums, 0, round_a(sa, half, row, k, lane), b)
        add_row(sums, 1, round_a(sa, half, row + 16, k, lane), b)
        add_row(sums, 2, round_a(sa, half, row + 32, k, lane), b)
        add_row(sums, 3, round_a(sa, half, row + 48, k, lane), b)

    return multiply


@device
def finish(
    out: ndarray, sums: ndarray, j: int, bias: ndarray, relu: bool, m: int, n: int, rows: int, columns: int
) -> None:
    """Store the sums of column j of a warp's squares. m, n: where this thread's first sum belongs in out."""
    zero = float32(0)
    for q in range(4):
        column = int32(n + q % 2)
        if column < columns:
            summand = get(bias, column) if bias.size > 0 else zero
            for i in range(HEIGHT):
                row = int32(m + i * 16 + q // 2 * 8)
                total = sums[i, j, q] + summand
                if row < rows:
                    put(out, row * columns + column, zero if relu and total < zero else total)


@cache
def product(bf16: bool, a_along: bool, b_along: bool, a_wide: bool, b_wide: bool) -> Kernel:
    """Return the kernel. along: whether numbers for successive k are neighbours; wide: whether copies have 16 bytes."""
    fetch_a, fetch_b = fetches(a_along, a_wide), fetches(b_along, b_wide)
    multiply = squares(bf16, a_along, b_along)

    def tensor_product(
        a: ndarray, b: ndarray, bias: ndarray, relu: bool, out: ndarray,
        rows: int, columns: int, depth: int, a_step: int, b_step: int,
    ) -> None:  # fmt: skip
        sa, sb = cuda.shared.array(BOTH, float32, 16), cuda.shared.array(BOTH, float32, 16)
        sums = cuda.local.array((HEIGHT, WIDTH, 4), float32)
        zero = float32(0)
        for i in range(HEIGHT):
            for j in range(WIDTH):
                for q in range(4):
                    sums[i, j, q] = zero
        warp, lane = int32(cuda.threadIdx.x) // WARP, int32(cuda.threadIdx.x) % WARP
        row, column = int32(warp // WARPS_ACROSS * ROWS), int32(warp % WARPS_ACROSS * COLUMNS)
        row0, column0 = int32(cuda.blockIdx.x * SIDE), int32(cuda.blockIdx.y * SIDE)
        half, k0 = int32(0), int32(0)
        if depth > 0:
            fetch_a(sa, half, a, row0, k0, rows, depth, a_step)
            fetch_b(sb, half, b, column0, k0, columns, depth, b_step)
            commit()
        while k0 < depth:
            wait_all()
            cuda.syncthreads()
            k0 = int32(k0 + DEEP)
            if k0 < depth:
                fetch_a(sa, HALF - half, a, row0, k0, rows, depth, a_step)
                fetch_b(sb, HALF - half, b, column0, k0, columns, depth, b_step)
                commit()
            multiply(sums, sa, sb, half, row, column, int32(0), lane)
            if not bf16:
                multiply(sums, sa, sb, half, row, column, int32(8), lane)
            half = int32(HALF - half)
        m, n = int32(row0 + row + lane // 4), int32(column0 + column + lane % 4 * 2)
        finish(out, sums, 0, bias, relu, m, n, rows, columns)
        finish(out, sums, 1, bias, relu, m, int32(n + 8), rows, columns)
        finish(out, sums, 2, bias, relu, m, int32(n + 16), rows, columns)
        finish(out, sums, 3, bias, relu, m, int32(n + 24), rows, columns)

    return kernel(THREADS, blocks_per_sm=2)(tensor_product)


def _wide(x: ndarray) -> bool:
    """Return whether each row of this matrix begins at a multiple of 16 bytes."""
    return address(x) % 16 == 0 and x.shape[1] % VECTOR == 0


def forms(bf16: bool) -> tuple[Any, Any, Any]:
    """Return (nn, nt, tn) for float32 arrays: the functions of reference.py, with rounded a and b."""

    def run(a: ndarray, b: ndarray, bias: ndarray, relu: bool, out: ndarray, a_along: bool, b_along: bool) -> None:
        rows, columns = out.shape
        depth = a.shape[1] if a_along else a.shape[0]
        compute = product(bf16, a_along, b_along, _wide(a), _wide(b))
        blocks = -(-rows // SIDE), -(-columns // SIDE)
        launch(compute, blocks, a, b, bias, relu, out, rows, columns, depth, a.shape[1], b.shape[1])

    def nn(
        a: ndarray, b: ndarray, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray
    ) -> None:
        run(a, b, bias, relu, out, a_along=True, b_along=False)

    def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
        run(a, b, scratch[:0], False, out, a_along=True, b_along=True)

    def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
        run(a, b, scratch[:0], False, out, a_along=False, b_along=False)

    return nn, nt, tn
