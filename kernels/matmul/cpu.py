"""Matrix products on the micro-kernel (product.py): packed panels of b, and tiles of the output divided among threads.

The output is divided into pairs of panels of NR columns, and each pair into strips of PRODUCT_MR rows. A strip of a
pair is one or two tiles (blocks.py contains the sizes; with 16 registers, a "pair" is a single panel). Each thread
computes an equal number of successive strips, down one pair, then down the next or, if the output is higher than wide,
an equal number of rows of all pairs (_divides_rows). It copies what its tiles need into its own small buffers: a block
of a, as strips (pack.py), and the panels of b. The first tile of a pair copies its panels while it multiplies
(product.py), unless b is transposed or the pair is not full (pack.py). The tiles read these buffers as contiguous
memory from the nearest caches. Some copies would cost more than they gain:

- a is read in place unless it is transposed, and a thread computes many panels or its sums are short: a tile reads
  only 6 rows at a time;
- b is read in place if a thread computes a single strip of a pair, unless b is transposed;
- b need not be copied if an earlier call has packed it: the weights of a prediction (reference.py, `packed`).

Two kinds of products have tiles in another order or of another form: those of short sums (short_sums.py), and
those of few rows (few.py).

Each sum is computed by a single thread: it sums pieces of KC products in the order of k, and adds the pieces up. KC
depends only on the depth. So bits depend neither on the number of threads nor on the number of rows and columns. Large
products of float32 numbers are computed on AMX, if the CPU has it (amx_product.py): their last bits differ.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import HAS_AMX, apart_jit, helper, jit, parallel_jit, prange, threads
from minidl.engine.team import thread_count

from .amx import parts_size
from .amx_product import amx_product, memory_of_thread, uses_amx
from .blocks import LANES, LINE, MOST_FEW, PANELS, PRODUCT_MR
from .operands import Left, Right
from .pack import pack_rows
from .reference import __all__ as __all__
from .share import share, share_scratch
from .short_sums import has_short_sums, panels_size, share_of_short_sums
from .tile import lanes, panel_width, whole_vectors

SERIAL_BELOW = 2**17  # for fewer multiplications, one thread is faster than two
LARGE = 2**21  # multiplications: all threads compute such a matrix of a batch together
# One core reads a b of 1 MB in 16 us (measured: Zen 4). For a smaller one, a second core saves no time.
FEW_SERIAL_BELOW = 2**18  # one thread computes `nn` of few rows if b has fewer numbers


@helper
def _memory_on_amx(rows: int, columns: int, depth: int) -> int:
    """Return the size of a thread's scratch on AMX; float64, whose product has the same scratch, uses vectors."""
    return max(memory_of_thread(rows, columns, depth), share_scratch(rows, columns, depth))


@apart_jit
def _empty_sums(bias: ndarray, relu: bool, out: ndarray) -> None:
    """Compute the output for depth 0: the sums have no products, so only bias and relu remain."""
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = out.dtype.type(0)
            if bias.size:
                total += bias[n]
            out[m, n] = 0 if relu and total < 0 else total


@apart_jit
def _pack_all(b: Right, depth: int, columns: int, packed: ndarray) -> None:
    """Pack all panels of b, unless `packed` contains them. It is 0 beyond the last column."""
    if packed[packed.size - 1] != 0:
        return
    packed[:] = 0
    for column in range(0, columns, b.panel):
        pack_rows(b.numbers, column, b.step, depth, min(b.panel, columns - column), packed[column * depth :], b.panel)
    packed[packed.size - 1] = 1


@helper
def _divides_rows(parts: int, out: ndarray) -> bool:
    """Return whether each thread computes some rows of all pairs, instead of strips of successive pairs.

    Then it reads its own rows of a, but all of b. So this suits an output that is higher than wide. And all threads
    have equally many narrow tiles, if the last pair is narrow.
    """
    strips, vectors = (out.shape[0] + PRODUCT_MR - 1) // PRODUCT_MR, whole_vectors(out.shape[1], out) // lanes(out)
    pair, rows, columns = 2 * PANELS, out.shape[0], out.shape[1]
    # The work of the busiest thread, in tiles of one vector
    by_pairs = (strips * ((vectors + pair - 1) // pair) + parts - 1) // parts * min(pair, vectors)
    by_rows = (strips + parts - 1) // parts * vectors
    return rows >= columns and 16 * by_rows <= 17 * by_pairs


@helper
def _on_one_thread(
    a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray
) -> None:  # fmt: skip
    if b.column == 1 and not b.packed and has_short_sums(out.shape[0], out.shape[1], depth):
        share_of_short_sums(0, 1, a, b, depth, bias, relu, scratch, out)
    else:
        share(0, 1, a, b, depth, bias, relu, scratch, out)


@parallel_jit
def _divide(a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray) -> None:
    """Divide the tiles of the output among the threads, as many as have scratch."""
    each = share_scratch(out.shape[0], out.shape[1], depth)
    parts = scratch.size // each
    if parts == 1:  # without a parallel loop, no other thread has to wake up
        _on_one_thread(a, b, depth, bias, relu, scratch, out)
        return
    short = b.column == 1 and not b.packed and has_short_sums(out.shape[0], out.shape[1], depth)
    for part in prange(parts):
        own, number = scratch[part * each : (part + 1) * each], np.int64(part)
        # np.int64: the index of a prange loop is unsigned; with signed integers, Numba would compute in float64.
        if short:
            share_of_short_sums(number, parts, a, b, depth, bias, relu, own, out)
        elif _divides_rows(parts, out):
            strips = (out.shape[0] + PRODUCT_MR - 1) // PRODUCT_MR
            top, bottom = number * strips // parts * PRODUCT_MR, (number + 1) * strips // parts * PRODUCT_MR
            if top < bottom:
                rows = Left(a.numbers[top * a.row :], a.row, a.step)
                share(0, 1, rows, b, depth, bias, relu, own, out[top:bottom])
        else:
            share(number, parts, a, b, depth, bias, relu, own, out)


@helper
def _product(
    a: Left, b: Right, depth: int, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray
) -> None:
    """Compute out[m, n] = the sum over k < depth of a[m, k] * b[k, n], plus bias[n]. packed: see reference.py."""
    if out.size == 0:
        return
    if depth == 0:
        _empty_sums(bias, relu, out)
    elif HAS_AMX and uses_amx(out.shape[0], out.shape[1], depth) and lanes(out) == LANES:
        # HAS_AMX is a constant: without AMX, Numba leaves this branch out.
        parts = min(thread_count(), scratch.size // _memory_on_amx(out.shape[0], out.shape[1], depth))
        amx_product(parts, a, b, depth, bias, relu, packed, scratch, out)
    elif packed.size > 0:
        _pack_all(b, depth, out.shape[1], packed)
        panels = Right(packed, panel_width(out) * depth, panel_width(out), 1, True)
        _divide(a, panels, depth, bias, relu, scratch, out)
    else:
        _divide(a, b, depth, bias, relu, scratch, out)


@helper
def _left(a: ndarray, transposed: bool) -> Left:
    """Return how to find the numbers of a (M, K), or of its transpose (K, M)."""
    return Left(a.reshape(a.size), 1, a.shape[1]) if transposed else Left(a.reshape(a.size), a.shape[1], 1)


@helper
def _right(b: ndarray, transposed: bool) -> Right:
    """Return how to find the numbers of b (K, N), or of its transpose (N, K)."""
    numbers, columns = b.reshape(b.size), b.shape[1]
    if transposed:
        return Right(numbers, panel_width(b) * columns, 1, columns, False)
    return Right(numbers, panel_width(b), columns, 1, False)


@jit
def nn(a: ndarray, b: ndarray, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N), plus bias (N,) unless its size is 0; then apply relu if `relu`.

    packed: of size 0, or packed_size(M, N, K) numbers, see reference.py; scratch: nn_scratch(M, N, K) numbers
    """
    _product(_left(a, False), _right(b, False), a.shape[1], bias, relu, packed, scratch, out)


@jit
def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (M, K) @ b (N, K)^T"""
    _product(_left(a, False), _right(b, True), a.shape[1], scratch[:0], False, scratch[:0], scratch, out)


@jit
def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    """out (M, N) = a (K, M)^T @ b (K, N)"""
    _product(_left(a, True), _right(b, False), a.shape[0], scratch[:0], False, scratch[:0], scratch, out)


@apart_jit
def _matrices(
    first: int, last: int, a: ndarray, a_transposed: bool, b: ndarray, b_transposed: bool, depth: int,
    scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    """Compute the matrices `first` to `last` - 1 of `out`."""
    for i in range(first, last):
        left, right = _left(a[i], a_transposed), _right(b[i], b_transposed)
        _on_one_thread(left, right, depth, scratch[:0], False, scratch, out[i])


@parallel_jit
def _divide_matrices(
    parts: int, a: ndarray, a_transposed: bool, b: ndarray, b_transposed: bool, depth: int, scratch: ndarray,
    out: ndarray,
) -> None:  # fmt: skip
    """Divide the matrices of `out` among `parts` threads."""
    each, count = scratch.size // parts, out.shape[0]
    for part in prange(parts):
        number = np.int64(part)  # an index of prange is unsigned: with signed integers, Numba would compute in float64
        _matrices(number * count // parts, (number + 1) * count // parts, a, a_transposed, b, b_transposed, depth,
                  scratch[number * each : (number + 1) * each], out)  # fmt: skip


@jit
def batched(
    a: ndarray, a_transposed: bool, b: ndarray, b_transposed: bool, scratch: ndarray, out: ndarray
) -> None:  # fmt: skip
    """Compute out[i] (M, N) = a[i] @ b[i], see reference.py; scratch: batched_scratch(B, M, N, K) numbers.

    Unless the matrices are LARGE, each is computed by one thread. The bits are those of nn, nt and tn.
    """
    (count, rows, columns), depth = out.shape, a.shape[1 if a_transposed else 2]
    work = rows * columns * depth
    if work == 0 or work >= LARGE:
        for i in range(count):
            left, right = _left(a[i], a_transposed), _right(b[i], b_transposed)
            _product(left, right, depth, scratch[:0], False, scratch[:0], scratch, out[i])
        return
    parts = scratch.size // share_scratch(rows, columns, depth)
    if parts == 1:
        _matrices(0, count, a, a_transposed, b, b_transposed, depth, scratch, out)
    else:
        _divide_matrices(parts, a, a_transposed, b, b_transposed, depth, scratch, out)


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch, for out (rows, columns) and sums of `depth` products."""
    if rows <= MOST_FEW and columns * depth < FEW_SERIAL_BELOW:
        return int(share_scratch(rows, columns, depth))
    return nt_scratch(rows, columns, depth)


def packed_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of nn's `packed`: all panels of b, and whether they are there."""
    if uses_amx(rows, columns, depth):  # more numbers than the panels of vectors: program/packed.py tells them by size
        return int(LINE + parts_size(columns, depth)) + 1
    return int(panels_size(columns, depth)) + 1


def nt_scratch(rows: int, columns: int, depth: int) -> int:
    if uses_amx(rows, columns, depth):
        return LINE + threads() * int(_memory_on_amx(rows, columns, depth))
    return (threads() if rows * columns * depth >= SERIAL_BELOW else 1) * int(share_scratch(rows, columns, depth))


tn_scratch = nt_scratch


def batched_scratch(count: int, rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch, for `count` matrices (rows, columns) and sums of `depth` products."""
    work = rows * columns * depth
    if work == 0 or work >= LARGE:
        return nt_scratch(rows, columns, depth)
    parts = min(threads(), count) if count * work >= SERIAL_BELOW else 1
    return parts * int(share_scratch(rows, columns, depth))
