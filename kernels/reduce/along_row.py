"""Sums and maxima along a row, whose numbers are contiguous, in vector registers.

An addition waits four cycles for the one before it, so a row is added as VECTORS independent vectors. This needs vector
instructions (matmul/emitter.py): LLVM does not change the order of the additions in a plain loop. The end of a row,
which does not fill a vector, is loaded with a mask. Then vectors and lanes are added in pairs. A maximum is found
in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numpy import ndarray

from minidl.engine.jit import helper

from ..matmul.emitter import Emitter, Sums, Value, instructions

VECTORS = 4
Load = Callable[[Value], Value]  # a pointer to the first number of a row -> a vector of the row


class Operation(NamedTuple):
    """What combines two vectors, and the number that changes nothing."""

    neutral: float
    combine: Callable[[Any, Value, Value], Value]  # (llvmlite's IRBuilder, a vector, a vector) -> a vector


ADD = Operation(0.0, lambda b, x, y: b.fadd(x, y))
LARGER = Operation(-math.inf, lambda b, x, y: b.select(b.fcmp_ordered(">", y, x), y, x))  # a NaN in y is left out


def _across_lanes(e: Emitter, operation: Operation, vector: Value) -> Value:
    """Combine the second half of a vector's numbers with the first, then a quarter with a quarter, ...; return one."""
    lanes = e.lanes
    while lanes > 1:
        lanes //= 2
        halves = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(i, i + lanes))) for i in (0, lanes)]
        vector = operation.combine(e.builder, *(e.builder.shuffle_vector(vector, vector, half) for half in halves))
    return e.builder.extract_element(vector, ir.IntType(32)(0))


def along_row(
    e: Emitter, results: Emitter, count: Value, kinds: int, terms: Callable[[Load], Sequence[Value]], to: Value,
    operation: Operation = ADD,
) -> None:  # fmt: skip
    """Write instructions that store `kinds` sums over the `count` numbers of a row in to[0], to[1], ...

    terms(load) returns a vector for each sum. load(pointer) loads a vector of the row that begins there. results: the
    emitter for the sums, `e` or e.in_float64(). operation: LARGER for maxima instead of sums.
    """
    b, width, neutral = e.builder, VECTORS * e.lanes, results.filled(operation.neutral)

    def add(sums: Sums, v: int, begin: Value, mask: Value | None = None) -> Sums:
        """Add vector v of the numbers from `begin` on, or only the lanes that the mask selects."""

        def load(row: Value) -> Value:
            start = e.at(row, begin)
            return e.load(start, v * e.lanes) if mask is None else e.load_masked(start, v * e.lanes, mask)

        added = dict(sums)
        for k, term in enumerate(terms(load)):
            within = term if mask is None else b.select(mask, term, neutral)
            added[k, v] = operation.combine(b, sums[k, v], within)
        return added

    def add_all(sums: Sums, _: Value, begin: Value) -> Sums:
        for v in range(VECTORS):
            sums = add(sums, v, begin)
        return sums

    rounds = b.sdiv(count, e.integer(width))
    end = e.times(rounds, width)
    rest = b.sub(count, end)
    first = {(k, v): neutral for k in range(kinds) for v in range(VECTORS)}
    some = b.icmp_signed(">", rounds, e.integer(0))
    sums = results.when(some, lambda: results.loop(rounds, [(0, width)], first, add_all), first)
    for v in range(VECTORS):
        more = b.icmp_signed(">", rest, e.integer(v * e.lanes))
        sums = results.when(more, partial(add, sums, v, end, e.mask(v, rest)), sums)
    for k in range(kinds):
        vectors = [sums[k, v] for v in range(VECTORS)]
        while len(vectors) > 1:
            vectors = [operation.combine(b, *vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        b.store(_across_lanes(results, operation, vectors[0]), e.at(to, k))


@instructions
def sum_in_float64(e: Emitter, x: Value, at: Value, count: Value, total: Value, to: Value) -> None:
    """Compute total[to] float64 = the sum of `count` numbers from x[at] on."""
    row, wide = e.at(x, at), e.in_float64()
    along_row(e, wide, count, 1, lambda load: [wide.extended(load(row))], e.at(total, to))


@instructions
def largest(e: Emitter, x: Value, at: Value, count: Value, maximum: Value) -> None:
    """Compute maximum[0] = the largest of `count` numbers from x[at] on, without NaNs; -inf if there is none."""
    row = e.at(x, at)
    along_row(e, e, count, 1, lambda load: [load(row)], maximum, LARGER)


@helper
def first_largest(x: ndarray) -> int:
    """Return the index of the first of the largest numbers of x (n,), one number at a time; a NaN is the largest."""
    most, at = x[0], 0
    for k in range(1, x.size):
        if most == most and not x[k] <= most:
            most, at = x[k], k
    return at
