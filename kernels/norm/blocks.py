"""Batch norm of one block of rows. cpu.py divides all rows into blocks, and adds up their sums.

    moments_of_block      sum of x, and of (x - m)^2, where m is the mean of the block
    gradients_of_block    sum of dy, and of dy * (x - mean)
    normalize_rows        y = (x - mean) * scale + bias [+ shortcut] [relu]

The sums are in registers. They need vector instructions (matmul/emitter.py), because LLVM would keep them in memory.

A block is short, so float32 is accurate enough within it; the sums of blocks are float64. A block has about 8 KB in a
layer with 16 channels, so the second pass over x finds it in the first-level cache.

A convolution calls these functions, too, for rows that it has just written (conv/norms.py): no other kernel has to
read them from a slow cache. cpu.py calls them with the same rows, so the bits are the same.

A vector holds 16 numbers. With 16 channels, or a multiple, vector j always holds the same channels. Otherwise several
rows are a wide row: the least common multiple of `channels` and 16 numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper

from ..elementwise.stream import fetch, get, put
from ..matmul.emitter import Emitter, Sums, Value, instructions, prefetch
from ..matmul.tile import lanes
from ..reduce.rows import narrow, repeat, wide

BLOCK_ROWS = 128
LINE_BYTES = 64  # of a cache line
AHEAD = 2  # wide rows: at the beginning of a row, the cache lines of the row that follows the next one are requested
CHAINS = 8  # independent sums: an addition takes 4 cycles, and 2 begin in each cycle


def _for_vectors(e: Emitter, vectors: Value, write: Callable[[int], None]) -> None:
    """Write write(count) for 4, 2 and 1 adjacent vectors; the one for `vectors` runs."""
    b = e.builder
    with b.if_else(b.icmp_signed("==", vectors, e.integer(4))) as (four, fewer):
        with four:
            write(4)
        with fewer, b.if_else(b.icmp_signed("==", vectors, e.integer(2))) as (two, one):
            with two:
                write(2)
            with one:
                write(1)


def _zeros(e: Emitter, kinds: int, chains: int, vectors: int) -> Sums:
    return {(kind, i): e.filled(0.0) for kind in range(kinds) for i in range(chains * vectors)}


def _store(e: Emitter, sums: Sums, kind: int, vectors: int, total: Value, to: Value) -> None:
    """Add the chains of each vector in pairs, (a + b) + (c + d), and store the vectors."""
    for v in range(vectors):
        terms = [value for (k, i), value in sums.items() if k == kind and i % vectors == v]
        while len(terms) > 1:
            terms = [e.builder.fadd(*terms[i : i + 2]) for i in range(0, len(terms), 2)]
        e.store(terms[0], total, e.builder.add(to, e.integer(v * e.lanes)))


@instructions
def _sum(
    e: Emitter, vectors: Value, rounds: Value, x: Value, at: Value, step: Value, total: Value, to: Value
) -> None:  # fmt: skip
    """Compute some adjacent vectors of `total`: sums over CHAINS / vectors * rounds rows of x, `step` numbers apart."""

    def write(vectors: int) -> None:
        def add(sums: Sums, _: Value, at: Value) -> Sums:
            rows = [e.at(x, b.add(at, e.times(step, i))) for i in range(chains)]
            return {(0, i): b.fadd(sums[0, i], e.load(rows[i // vectors], i % vectors * e.lanes)) for _, i in sums}

        b, chains = e.builder, CHAINS // vectors
        sums = e.loop(rounds, [(at, e.times(step, chains))], _zeros(e, 1, chains, vectors), add)
        _store(e, sums, 0, vectors, total, to)

    _for_vectors(e, vectors, write)


@instructions
def _sum_squares(
    e: Emitter, vectors: Value, rounds: Value, x: Value, at: Value, step: Value, mean: Value, total: Value, to: Value
) -> None:  # fmt: skip
    """Do the same for (x - mean)^2. The vectors of the mean are mean[to], ..."""

    def write(vectors: int) -> None:
        def add(sums: Sums, _: Value, at: Value) -> Sums:
            found = {}
            for _, i in sums:
                row = e.at(x, b.add(at, e.times(step, i // vectors)))
                distance = b.fsub(e.load(row, i % vectors * e.lanes), centers[i % vectors])
                found[0, i] = e.multiply_add(distance, distance, sums[0, i])
            return found

        b, chains = e.builder, CHAINS // vectors
        centers = e.columns(e.at(mean, to), vectors)
        sums = e.loop(rounds, [(at, e.times(step, chains))], _zeros(e, 1, chains, vectors), add)
        _store(e, sums, 0, vectors, total, to)

    _for_vectors(e, vectors, write)


@instructions
def _sum_gradients(
    e: Emitter, vectors: Value, rounds: Value, dy: Value, x: Value, relu_y: Value, at: Value, step: Value,
    constants: Value, relu: Value, relu_after: Value, width: Value, total: Value, to: Value,
) -> None:  # fmt: skip
    """Compute vectors of `total`: sums of dy at total[to], sums of dy * (x - mean) at total[width + to].

    They are sums over CHAINS / 2 / vectors * rounds rows. mean, scale and bias are rows of `constants`. With `relu`, dy
    counts as 0 where (x - mean) * scale + bias <= 0. With `relu_after`, dy becomes 0 where relu_y <= 0.
    """

    def write(vectors: int, relu: bool, after: bool) -> None:
        def add(sums: Sums, _: Value, at: Value) -> Sums:
            found = dict(sums)
            for i in range(chains * vectors):
                row, v = b.add(at, e.times(step, i // vectors)), i % vectors
                gradient = e.load(e.at(dy, row), v * e.lanes)
                distance = b.fsub(e.load(e.at(x, row), v * e.lanes), mean[v])
                if relu or after:
                    output = e.load(e.at(relu_y, row), v * e.lanes) if after else b.fadd(
                        b.fmul(distance, scale[v]), bias[v]
                    )
                    gradient = b.select(b.fcmp_ordered("<=", output, zero), zero, gradient)
                if after:
                    e.store(gradient, e.at(dy, row), v * e.lanes)
                found[0, i] = b.fadd(sums[0, i], gradient)
                found[1, i] = e.multiply_add(gradient, distance, sums[1, i])
            return found

        b, chains, zero = e.builder, CHAINS // 2 // vectors, e.filled(0.0)
        mean, scale, bias = (e.columns(e.at(constants, b.add(to, e.times(width, i))), vectors) for i in range(3))
        sums = e.loop(rounds, [(at, e.times(step, chains))], _zeros(e, 2, chains, vectors), add)
        _store(e, sums, 0, vectors, total, to)
        _store(e, sums, 1, vectors, total, e.builder.add(to, width))

    with e.builder.if_else(relu_after) as (yes, no):
        with yes:
            _for_vectors(e, vectors, lambda vectors: write(vectors, False, True))
        with no, e.builder.if_else(relu) as (its, none):
            with its:
                _for_vectors(e, vectors, lambda vectors: write(vectors, True, False))
            with none:
                _for_vectors(e, vectors, lambda vectors: write(vectors, False, False))


@helper
def fetch_rows(x: ndarray, begin: int, count: int) -> None:
    """Prefetch x[begin : begin + count] of x (n,) into the second-level cache. The range may reach beyond x."""
    for at in range(begin, min(begin + count, x.size), LINE_BYTES // x.itemsize):
        prefetch(x, at)


@helper
def rows_of_block(rows: int, blocks: int) -> int:
    """Return the number of rows of each block but the last ones, which may have fewer or none."""
    return (rows + blocks - 1) // blocks


@helper
def wide_row(array: ndarray, channels: int) -> int:
    """Return the length of a wide row: the least common multiple of `channels` and the lanes of a vector."""
    row = channels
    while row % lanes(array):
        row += channels
    return row


@helper
def constants_of(mean: ndarray, scale: ndarray, bias: ndarray) -> ndarray:
    """Return mean, scale and bias, each repeated to a wide row: the constants of gradients_of_block."""
    width = wide_row(mean, mean.size)
    mean, scale, bias = repeat(mean, width), repeat(scale, width), repeat(bias, width)
    constants = np.empty(3 * width, mean.dtype)
    for i in range(width):
        constants[i], constants[width + i], constants[2 * width + i] = mean[i], scale[i], bias[i]
    return constants


@helper
def _vectors(array: ndarray, numbers: int) -> int:
    """Return how many vectors to sum together if a wide row has `numbers` more numbers: 4, 2 or 1."""
    return 4 if numbers >= 4 * lanes(array) else 2 if numbers >= 2 * lanes(array) else 1


@helper
def moments_of_block(
    x: ndarray, begin: int, rows: int, channels: int, width: int, memory: ndarray, partial: ndarray, k: int
) -> None:
    """Compute partial[k] (2, C) from rows of x (n,), beginning with x[begin]. memory: 2 wide rows."""
    rounds = rows * channels // (CHAINS * width)
    rest, stop, end = begin + rounds * CHAINS * width, begin + rows * channels, width if rounds else 0
    sums, means, total, squares = memory[:end], memory[width : 2 * width], partial[k, 0], partial[k, 1]
    j = 0
    while j < end:
        vectors = _vectors(x, end - j)
        _sum(vectors, rounds * vectors, x, begin + j, width, memory, j)
        j += vectors * lanes(x)
    narrow(sums, total)
    for at in range(rest, stop, channels):
        for c in range(channels):
            total[c] += x[at + c]
    for i in range(0, width, channels):
        for c in range(channels):
            means[i + c] = total[c] / rows
    j = 0
    while j < end:
        vectors = _vectors(x, end - j)
        _sum_squares(vectors, rounds * vectors, x, begin + j, width, means, memory, j)
        j += vectors * lanes(x)
    narrow(sums, squares)
    for at in range(rest, stop, channels):
        for c in range(channels):
            distance = x[at + c] - means[c]
            squares[c] += distance * distance


@helper
def gradients_of_block(
    dy: ndarray, x: ndarray, relu_y: ndarray, begin: int, rows: int, channels: int, width: int, constants: ndarray,
    relu: bool, memory: ndarray, partial: ndarray, k: int,
) -> None:  # fmt: skip
    """Compute partial[k] (2, C) from rows of dy (n,) and x (n,), beginning with dy[begin] and x[begin].

    constants: mean, scale and bias, each repeated to a wide row. memory: 2 wide rows.
    relu: whether a relu follows the batch norm; its gradient is applied to what is added, and dy stays as it is.
    relu_y: the output of a relu after the batch norm and another summand, or of size 0. Its gradient is applied to dy.
    """
    after, rounds = relu_y.size > 0, rows * channels // (CHAINS // 2 * width)
    rest, stop, end = begin + rounds * (CHAINS // 2) * width, begin + rows * channels, width if rounds else 0
    first, second = partial[k, 0], partial[k, 1]
    j = 0
    while j < end:
        vectors = _vectors(x, end - j)
        _sum_gradients(vectors, rounds * vectors, dy, x, relu_y, begin + j, width, constants, relu, after, width,
                       memory, j)  # fmt: skip
        j += vectors * lanes(x)
    narrow(memory[:end], first)
    narrow(memory[width : width + end], second)
    for at in range(rest, stop, channels):
        for c in range(channels):
            distance = x[at + c] - constants[c]
            if after and relu_y[at + c] <= 0:
                dy[at + c] = 0
            elif not (relu and distance * constants[width + c] + constants[2 * width + c] <= 0):
                first[c] += dy[at + c]
                second[c] += dy[at + c] * distance


@helper
def normalize_rows(
    x: ndarray, mean: ndarray, scale: ndarray, bias: ndarray, shortcut: ndarray, relu: bool, y: ndarray
) -> None:
    """Compute y = (x - mean) * scale + bias; add the shortcut unless it is empty, then apply relu if `relu`."""
    width = wide(x.shape[1])
    mean, scale, bias = repeat(mean, width), repeat(scale, width), repeat(bias, width)
    zero, adds = x.dtype.type(0), shortcut.size > 0
    numbers, results, others = x.reshape(x.size), y.reshape(y.size), shortcut.reshape(shortcut.size)
    for begin in range(0, numbers.size, width):
        following = begin + AHEAD * width
        fetch(numbers, following, width)
        fetch(results, following, width)
        fetch(others, following, width)
        for i in range(min(width, numbers.size - begin)):
            at = begin + i
            value = (get(numbers, at) - get(mean, i)) * get(scale, i) + get(bias, i)
            if adds:
                value += get(others, at)
            put(results, at, zero if relu and value < zero else value, False)
