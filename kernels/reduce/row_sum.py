"""Sums over a row, the contiguous numbers of one sum, in vector registers.

An addition waits four cycles for the one before it, so a row is added as VECTORS independent vectors. This needs vector
instructions (matmul/emitter.py): LLVM does not change the order of the additions in a plain loop. The end of a row,
which does not fill these vectors, is loaded with masks. Then vectors and lanes are added in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ..matmul.emitter import Emitter, Sums, Value, instructions

VECTORS = 4
Load = Callable[[Value], Value]  # a pointer to the first number of a row -> a vector of the row


def _sum_of_lanes(e: Emitter, vector: Value) -> Value:
    """Return the sum of a vector's numbers. The second half is added to the first, then a quarter to a quarter, ..."""
    lanes = e.lanes
    while lanes > 1:
        lanes //= 2
        halves = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(i, i + lanes))) for i in (0, lanes)]
        vector = e.builder.fadd(*(e.builder.shuffle_vector(vector, vector, half) for half in halves))
    return e.builder.extract_element(vector, ir.IntType(32)(0))


def sum_row(
    e: Emitter, sums_of: Emitter, count: Value, kinds: int, terms: Callable[[Load], Sequence[Value]], to: Value
) -> None:
    """Write instructions that store `kinds` sums over the `count` numbers of a row in to[0], to[1], ...

    terms(load) returns a vector for each sum. load(pointer) loads a vector of the row that begins there. sums_of: the
    emitter for the sums, `e` or e.in_float64().
    """
    b, width, zero = e.builder, VECTORS * e.lanes, sums_of.filled(0.0)

    def add(sums: Sums, begin: Value, masks: Sequence[Value] = ()) -> Sums:
        added = {}
        for v in range(VECTORS):

            def load(row: Value, v: int = v) -> Value:
                start = e.at(row, begin)
                if masks:
                    return e.load_masked(start, v * e.lanes, masks[v])
                return e.load(start, v * e.lanes)

            for k, term in enumerate(terms(load)):
                added[k, v] = b.fadd(sums[k, v], b.select(masks[v], term, zero) if masks else term)
        return added

    def whole_vectors() -> Sums:
        return sums_of.loop(rounds, [(0, width)], zeros, lambda sums, _, begin: add(sums, begin))

    rounds = b.sdiv(count, e.integer(width))
    begin = e.times(rounds, width)
    rest = b.sub(count, begin)
    zeros = {(k, v): zero for k in range(kinds) for v in range(VECTORS)}
    sums = sums_of.when(b.icmp_signed(">", rounds, e.integer(0)), whole_vectors, zeros)
    masks = [e.mask(v, rest) for v in range(VECTORS)]
    sums = sums_of.when(b.icmp_signed(">", rest, e.integer(0)), lambda: add(sums, begin, masks), sums)
    for k in range(kinds):
        vectors = [sums[k, v] for v in range(VECTORS)]
        while len(vectors) > 1:
            vectors = [b.fadd(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        b.store(_sum_of_lanes(sums_of, vectors[0]), e.at(to, k))


@instructions
def sum_in_float64(e: Emitter, x: Value, at: Value, count: Value, total: Value, to: Value) -> None:
    """Compute total[to] float64 = the sum of `count` numbers from x[at] on."""
    row, wide = e.at(x, at), e.in_float64()
    sum_row(e, wide, count, 1, lambda load: [wide.extended(load(row))], e.at(total, to))
