"""Matrix products on Intel's AMX: float32 numbers in three bfloat16 parts, multiplied 16 x 16 x 32 at a time.

AMX (Advanced Matrix Extensions) has 8 registers of 1 KB, called tiles. One instruction multiplies two tiles of bfloat16
and adds the sums of 32 products to a tile of 16 x 16 float32, in 16 cycles: 512 multiply-adds per cycle. With vectors
of 512 bits there are 32. A bfloat16 has only 8 significant bits. But three of them have the 24 bits of a float32:

    x = x1 + x2 + x3      x1 = x, rounded to bfloat16;  x2 = x - x1, rounded;  x3 = x - x1 - x2, which is exact

    a * b  =  a1 b1  +  a1 b2 + a2 b1  +  a1 b3 + a2 b2 + a3 b1  +  ...      what is left out is below 2^-24 a * b

A product of two bfloat16 is exact in float32. So six instructions give sums as accurate as those of float32, with 512 /
6 = 85 multiply-adds per cycle. Their errors are even smaller than those of product.py: AMX adds 16 products up before
it adds them to the sum, so the large sum is rounded less often. Source: Henry, Tang and Heinecke, "Leveraging the
bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019.

What differs from float32: a product with an infinite number is NaN, also for |x| > 3.39e38, which x1 rounds to
infinity. Parts, products and sums below 2^-126 count as 0. So numbers below 2^-103 lose their last bits.

Layout. `a` is split into strips of 32 rows, `b` into panels of 32 columns, both into blocks of 32 k. A block is 6 tiles
of 1 KB: part 1, 2, 3, each with the 16 first and the 16 last rows (columns). In a tile of `a`, row i has the 32 numbers
a[i, k] as pairs of k and k + 16, since two vectors become pairs by shifts, without a permutation. In a tile of `b`, row
j has the pairs b[j, n], b[j + 16, n] for 16 columns n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numpy import ndarray

from minidl.engine.jit import HAS_AMX, apart_jit, helper

from .emitter import Emitter, Sums, Value
from .emitter import instructions as any_instructions
from .pack import pack_columns
from .product import with_bias_and_relu

SIDE = 32  # rows of a strip, columns of a panel, and k of a block
TILE = 256  # float32 numbers in the memory of a tile
BLOCK = 6 * TILE
PIECES = 32  # pieces of other work beside the products of a block: a piece splits two vectors, or prefetches
PRODUCTS = (0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)  # parts of a and b; each pair shares one with the next pair
HALF, UPPER = 0x8000, 0xFFFF0000  # half of the last place of a bfloat16, and its bits, in those of a float32

# The shapes of the tiles, as the instruction ldtilecfg expects them: palette 1; 8 tiles with rows of 64 bytes, 16 rows.
# As float32, since an Emitter takes its type from an array of floats.
_bytes = np.zeros(64, np.uint8)
_bytes[0], _bytes[16:32].view(np.uint16)[:], _bytes[48:56] = 1, 64, 16
SHAPES = _bytes.view(np.float32)


@helper
def count_of(size: int) -> int:
    """Return the number of strips for so many rows, of panels for columns, or of blocks for k."""
    return (size + SIDE - 1) // SIDE


@helper
def parts_size(rows: int, depth: int) -> int:
    """Return the size of all strips (panels) of a matrix with so many rows (columns)."""
    return count_of(rows) * count_of(depth) * BLOCK


def instructions(write: Any) -> Any:
    """Do as emitter.py's `instructions`, but write nothing for float64 or without AMX: there the kernels never run."""

    @wraps(write)
    def write_for_amx(e: Emitter, *arguments: Value) -> None:
        if HAS_AMX and e.bytes == 4:
            write(e, *arguments)

    return any_instructions(write_for_amx)


# -- splitting --------------------------------------------------------------------------------------------------------


def _parts(e: Emitter, x: Value) -> tuple[Value, Value, Value]:
    """Return the bits of vector x, of x - x1, and of x - x1 - x2; the upper halves, rounded (not the last), are parts.

    The third is not rounded: so a NaN whose bits the rounding would carry away is still NaN there.
    """
    words = ir.VectorType(ir.IntType(32), e.lanes)
    half, upper = (ir.Constant(words, [value] * e.lanes) for value in (HALF, UPPER))
    parts = []
    for _ in range(2):
        part = e.builder.and_(e.builder.add(e.builder.bitcast(x, words), half), upper)
        x = e.builder.fsub(x, e.builder.bitcast(part, e.vector))
        parts.append(part)
    return parts[0], parts[1], e.builder.bitcast(x, words)


def _write_row(e: Emitter, numbers: Iterable[Value], target: Value, to: int) -> None:
    """Split two vectors, and store the pairs of their numbers in rows at target[to], target[to + 2 * TILE], ..."""
    words = ir.VectorType(ir.IntType(32), e.lanes)
    sixteen, upper = (ir.Constant(words, [value] * e.lanes) for value in (16, UPPER))
    for part, (first, second) in enumerate(zip(*(_parts(e, x) for x in numbers))):
        row = e.builder.or_(e.builder.lshr(first, sixteen), e.builder.and_(second, upper))
        e.store(e.builder.bitcast(row, e.vector), target, part * 2 * TILE + to)


def _make_split_row(whole: bool) -> Any:
    @instructions
    def split_row(e: Emitter, x: Value, at: Value, depth: Value, target: Value, to: Value) -> None:
        """Split x[at + k] for k < 32 into rows at target[to], target[to + 2 * TILE], ... From `depth` on, x is 0."""
        x, target = e.at(x, at), e.at(target, to)
        numbers = (e.load(x, v * e.lanes) if whole else e.load_masked(x, v * e.lanes, e.mask(v, depth)) for v in (0, 1))
        _write_row(e, numbers, target, 0)

    return split_row


def _make_split_pair(whole: bool) -> Any:
    @instructions
    def split_pair(
        e: Emitter, x: Value, at: Value, step: Value, rows: Value, width: Value, target: Value, to: Value
    ) -> None:
        """Split x[at + j] and x[at + 16 * step + j] for j < 16 into rows at target[to], target[to + 2 * TILE], ...

        From `width` on, and for a row beyond the first `rows`, x is 0.
        """
        x, target = e.at(x, at), e.at(target, to)
        numbers = []
        for i in (0, 16):
            some = e.builder.select(e.builder.icmp_signed(">", rows, e.integer(i)), width, e.integer(0))
            offset = e.times(step, i)
            numbers.append(e.load(x, offset) if whole else e.load_masked(x, offset, e.mask(0, some)))
        _write_row(e, numbers, target, 0)

    return split_pair


_split_row, _split_some_row = _make_split_row(True), _make_split_row(False)
_split_pair, _split_some_pair = _make_split_pair(True), _make_split_pair(False)


@apart_jit
def split_strip(x: ndarray, at: int, row: int, rows: int, depth: int, target: ndarray, to: int) -> None:
    """Split a strip: x[at + i * row + k] for i < rows <= 32, k < depth. Missing rows keep any values."""
    for half in range(0, rows, 16):
        for k in range(0, depth, SIDE):
            tile, corner = to + k // SIDE * BLOCK + half // 16 * TILE, at + half * row + k
            for i in range(min(16, rows - half)):
                if depth - k >= SIDE:
                    _split_row(x, corner + i * row, 0, target, tile + i * 16)
                else:
                    _split_some_row(x, corner + i * row, depth - k, target, tile + i * 16)


@apart_jit
def split_transposed(
    x: ndarray, at: int, step: int, rows: int, depth: int, square: ndarray, target: ndarray, to: int
) -> None:
    """Split a strip of a transposed matrix: x[at + i + k * step] for i < rows <= 32, k < depth.

    square: memory for 32 x 32 numbers, transposed
    """
    for k in range(0, depth, SIDE):
        deep = min(SIDE, depth - k)
        pack_columns(x, at + k * step, step, rows, deep, square, SIDE)
        split_strip(square, 0, SIDE, rows, deep, target, to + k // SIDE * BLOCK)


@apart_jit
def split_panels(x: ndarray, at: int, step: int, columns: int, depth: int, target: ndarray, to: int) -> None:
    """Split panels, one after the other: x[at + k * step + j] for j < columns, k < depth."""
    size = parts_size(1, depth)
    for i in range(count_of(depth) * 16):
        k = i // 16 * SIDE + i % 16
        row, place = at + k * step, to + k // SIDE * BLOCK + i % 16 * 16
        for j in range(0, columns, 16):
            here = place + j // SIDE * size + j // 16 % 2 * TILE
            if columns - j >= 16 and depth - k > 16:
                _split_pair(x, row + j, step, 0, 0, target, here)
            else:
                _split_some_pair(x, row + j, step, depth - k, min(16, columns - j), target, here)


# -- multiplying ------------------------------------------------------------------------------------------------------


def _tile_instruction(e: Emitter, name: str, *arguments: Any) -> None:
    """Write an instruction on tiles. An int is the number of a tile."""
    values = [ir.Constant(ir.IntType(8), x) if isinstance(x, int) else x for x in arguments]
    e.call(f"llvm.x86.{name}", ir.VoidType(), *values)


def _address(e: Emitter, start: Value, offset: Any) -> Value:
    return e.builder.bitcast(e.at(start, offset), ir.IntType(8).as_pointer())


@instructions
def begin_tiles(e: Emitter, shapes: Value) -> None:
    """Prepare the tiles; a thread must do this before it multiplies. shapes: SHAPES"""
    _tile_instruction(e, "ldtilecfg", _address(e, shapes, 0))


@instructions
def end_tiles(e: Emitter, shapes: Value) -> None:
    """Give the tiles back: then the system need not save them when it switches threads."""
    _tile_instruction(e, "tilerelease")


def _write_tile(
    e: Emitter, height: int, width: int, blocks: Value, accumulate: Value, a: Value, b: Value, c: Value, c_row: Value,
    beside: Callable[[Value, Value], Iterator[None]],
) -> None:  # fmt: skip
    """Write the product of 16 * height rows of a strip and 16 * width columns of a panel, and store it in c.

    beside: is called for each block, with its number and its place in a panel. It writes PIECES pieces of other work,
    and yields after each. They are spread over the block, because the vector units are free while AMX multiplies.
    """
    line, pitch = e.integer(64), e.times(c_row, e.bytes)
    sums = [(2 * s + t, _address(e, e.at(c, e.times(c_row, 16 * s)), 16 * t))
            for s in range(height) for t in range(width)]  # fmt: skip
    with e.builder.if_else(accumulate) as (continues, begins):
        with continues:
            for number, pointer in sums:
                _tile_instruction(e, "tileloadd64", number, pointer, pitch)
        with begins:
            for number, _ in sums:
                _tile_instruction(e, "tilezero", number)

    def add_block(none: Sums, block: Value, at: Value) -> Sums:
        def load(first: int, count: int, matrix: Value, part: int) -> None:
            for t in range(count):
                pointer = _address(e, e.at(matrix, at), (2 * part + t) * TILE)
                _tile_instruction(e, "tileloadd64", first + t, pointer, line)

        pieces, done, products = beside(block, at), 0, len(PRODUCTS) * height * width
        a_part = b_part = -1
        for i, j in PRODUCTS:
            if i != a_part:
                load(4, height, a, i)
            if j != b_part:
                load(6, width, b, j)
            a_part, b_part = i, j
            for s in range(height):
                for t in range(width):
                    _tile_instruction(e, "tdpbf16ps", 2 * s + t, 4 + s, 6 + t)
                    for _ in range(done * PIECES // products, (done + 1) * PIECES // products):
                        next(pieces, None)
                    done += 1
        return none

    e.loop(blocks, [(0, e.integer(BLOCK))], {}, add_block)
    for number, pointer in sums:
        _tile_instruction(e, "tilestored64", number, pointer, pitch)


def _write_tiles(e: Emitter, rows: Value, columns: Value, *arguments: Any) -> None:
    """Write tiles of 32 or 16 rows and columns (_write_tile); the least that holds `rows` and `columns` runs."""

    def wide(height: int) -> None:
        with e.builder.if_else(e.builder.icmp_signed(">", columns, e.integer(16))) as (two, one):
            with two:
                _write_tile(e, height, 2, *arguments)
            with one:
                _write_tile(e, height, 1, *arguments)

    e.lowest(rows, (32, 16), lambda height: wide(height // 16))


def _fetch_block(e: Emitter, block: Value) -> Iterator[None]:
    """Prefetch a block into L1, in PIECES pieces: a core waits for few tiles at a time, fewer beside a busy thread."""
    lines = BLOCK // 16
    for piece in range(PIECES):
        for line in range(piece * lines // PIECES, (piece + 1) * lines // PIECES):
            e.prefetch(block, 16 * line, level=1)
        yield


@instructions
def multiply(
    e: Emitter, rows: Value, columns: Value, blocks: Value, accumulate: Value, a: Value, a_at: Value, b: Value,
    b_at: Value, c: Value, c_at: Value, c_row: Value, soon: Value, soon_at: Value, soon_row: Value,
) -> None:  # fmt: skip
    """Compute c[c_at + i * c_row + j] for 32 x 32 numbers; 16 rows (columns) if `rows` (`columns`) is at most 16.

    a, b: a strip and a panel of `blocks` blocks. If `accumulate`, the sums continue from those in c. What is written
    next, soon[soon_at + i * soon_row + j], is prefetched, 8 rows in each block: a store waits for its line, and few
    stores can wait at a time. So is the next block of the strip.
    """
    a, soon = e.at(a, a_at), e.at(soon, soon_at)

    def prefetches(block: Value, at: Value) -> Iterator[None]:
        row, strip = e.at(soon, e.times(e.times(block, 8), soon_row)), _fetch_block(e, e.at(a, e.sum(at, BLOCK)))
        for i in range(8):
            for line in range(2):
                e.prefetch(e.at(row, e.times(soon_row, i)), 16 * line, write=True)
                for _ in range(2):
                    next(strip)
                    yield

    _write_tiles(e, rows, columns, blocks, accumulate, a, e.at(b, b_at), e.at(c, c_at), c_row, prefetches)


@instructions
def multiply_streaming(
    e: Emitter, rows: Value, columns: Value, blocks: Value, accumulate: Value, a: Value, a_at: Value, b: Value,
    b_at: Value, c: Value, c_at: Value, c_row: Value,
) -> None:  # fmt: skip
    """Do as `multiply`, but prefetch what follows the panel into L1: the next panel."""
    b = e.at(b, b_at)
    after = e.at(b, e.times(blocks, BLOCK))

    def prefetches(_: Value, at: Value) -> Iterator[None]:
        return _fetch_block(e, e.at(after, at))

    _write_tiles(e, rows, columns, blocks, accumulate, e.at(a, a_at), b, e.at(c, c_at), c_row, prefetches)


@instructions
def multiply_and_split(
    e: Emitter, blocks: Value, accumulate: Value, a: Value, a_at: Value, b: Value, b_at: Value, c: Value, c_at: Value,
    c_row: Value, x: Value, x_at: Value, x_step: Value, target: Value, to: Value,
) -> None:  # fmt: skip
    """Do as `multiply`, for 32 x 32 numbers, and beside this as split_panels: for 32 columns, 32 * blocks deep."""
    a, b, c, x, target = e.at(a, a_at), e.at(b, b_at), e.at(c, c_at), e.at(x, x_at), e.at(target, to)

    def split(block: Value, at: Value) -> Iterator[None]:
        row, tiles = e.at(x, e.times(x_step, e.times(block, SIDE))), e.at(target, at)
        other = e.at(row, e.times(x_step, 16))
        strip = _fetch_block(e, e.at(a, e.sum(at, BLOCK)))
        ahead = e.times(x_step, SIDE)  # rows of the next block: they are far apart, so the CPU does not prefetch them
        for j in range(16):
            for half in range(2):
                _write_row(e, (e.load(start, 16 * half) for start in (row, other)), tiles, half * TILE + 16 * j)
                for start in (row, other):
                    e.prefetch(e.at(start, ahead), 16 * half, level=1)
                next(strip)
                yield
            row, other = (e.in_register(e.at(start, x_step)) for start in (row, other))

    _write_tile(e, 2, 2, blocks, accumulate, a, b, c, c_row, split)


@instructions
def finish_row(
    e: Emitter, sums: Value, sums_at: Value, c: Value, at: Value, width: Value, bias: Value, bias_at: Value,
    biased: Value, relu: Value,
) -> None:  # fmt: skip
    """Compute c[at + j] = sums[sums_at + j] + bias for j < width <= 32 (bias for j < biased), with relu if `relu`.

    32 numbers of sums are read.
    """
    totals = {(0, v): x for v, x in enumerate(e.columns(e.at(sums, sums_at), 2))}
    e.write(with_bias_and_relu(e, totals, e.at(bias, bias_at), biased, relu), [e.at(c, at)], width)
