"""Vector instructions, and the loop that all micro-kernels of matrix products and convolutions share.

LLVM does not find the fast form of these loops by itself, so their instructions are written out with llvmlite. The
micro-kernel, for a tile of MR x NR numbers of c (blocks.py explains the sizes):

    request the lines of c[0:MR, 0:NR]         `prefetch_rows`
    sums[0:MR, 0:NR] = 0                       `zeros`: in vector registers
    for k in range(KC):                        `loop`
        row_of_b = b[k, 0:NR]                  `columns`: load 2 vectors
        for i in range(MR):                    `rank_one`: this loop is unrolled
            number = a[i, k]                   load 1 number, broadcast it to all lanes of a vector
            sums[i, 0:NR] += number * row_of_b     2 multiply-adds
    if accumulate: sums += c[0:MR, 0:NR]       `plus`
    c[0:MR, 0:NR] = sums                       `write`: whole vectors, or only some lanes

The micro-kernels differ in the rest. tile.py finds its numbers of a through tables. product.py prefetches b, and
applies bias and relu. conv/channels.py reads vectors of a instead of single numbers. conv/line.py multiplies a number
by several rows of b. conv/tall.py has more rows and fewer columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from minidl.engine.jit import HAS_FMA, VECTOR_BYTES

Value = Any  # a value in the generated code: a number, a vector or a pointer
Offset = Any  # an int or a Value, which counts numbers, not bytes
SMALLEST_VECTOR = 16  # bytes
Sums = dict[tuple[int, int], Value]  # (row, vector of columns) -> vector


def instructions(write: Callable[..., None]) -> Any:
    """Turn write(emitter, *arguments), which writes instructions, into a function that kernels call with `arguments`.

    The instructions become part of the kernel. `write` receives an array as a pointer to its first number, an integer
    (also a literal) as int64, and a tuple of integers as a tuple of int64.
    """

    @wraps(write)  # Numba reads the names of the arguments from the signature
    def intrinsic(typing: Any, *arguments: Any) -> Any:
        kinds = [_received(kind) for kind in arguments]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointers = (
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(kinds, values)
            )
            write(Emitter(context, builder, kinds), *pointers)
            return context.get_dummy_value()

        return types.void(*kinds), generate

    return extending.intrinsic(intrinsic)


def _received(kind: Any) -> Any:
    """Return the type to which an argument of type `kind` is converted."""
    if isinstance(kind, types.BaseTuple):
        return types.UniTuple(types.int64, len(kind))
    if isinstance(kind, types.Boolean):
        return types.boolean
    return types.int64 if isinstance(kind, types.Integer) else kind


class Emitter:
    """Writes instructions for vectors of one float type: the type of the first array of floats among the arguments.

    builder: llvmlite's IRBuilder, for instructions that have no method here. lanes: how many numbers a vector holds.
    bytes: the size of a number.
    """

    def __init__(self, context: Any, builder: Any, kinds: list[Any]) -> None:
        kind = next(kind.dtype for kind in kinds if isinstance(getattr(kind, "dtype", None), types.Float))
        self.builder, self.bytes = builder, kind.bitwidth // 8
        self.int64, self.number_type = ir.IntType(64), context.get_data_type(kind)
        self._set_lanes(VECTOR_BYTES // self.bytes)

    def _set_lanes(self, lanes: int) -> None:
        self.lanes = lanes
        self.vector = ir.VectorType(self.number_type, lanes)
        self.suffix = f"v{lanes}f{8 * self.bytes}"

    def with_lanes(self, lanes: int) -> Emitter:
        """Return an emitter for vectors with this number of lanes."""
        other = copy.copy(self)
        other._set_lanes(lanes)
        return other

    def in_float64(self) -> Emitter:
        """Return an emitter for vectors of as many float64 numbers."""
        other = copy.copy(self)
        other.bytes, other.number_type = 8, ir.DoubleType()
        other._set_lanes(self.lanes)
        return other

    # -- numbers and addresses ---------------------------------------------------------------------------

    def integer(self, value: Offset) -> Value:
        """Return an int as a constant, and a Value unchanged."""
        return ir.Constant(self.int64, value) if isinstance(value, int) else value

    def filled(self, value: float) -> Value:
        """Return a constant vector with this number in each lane."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def times(self, x: Offset, factor: Offset) -> Value:
        """Return the product of two integers."""
        return self.builder.mul(self.integer(x), self.integer(factor))

    def sum(self, x: Offset, y: Offset) -> Value:
        """Return the sum of two integers."""
        return self.builder.add(self.integer(x), self.integer(y))

    def smaller(self, x: Offset, y: Value) -> Value:
        """Return the smaller of two integers."""
        return self.builder.select(self.builder.icmp_signed("<", self.integer(x), y), self.integer(x), y)

    def at(self, start: Value, offset: Offset) -> Value:
        """Return a pointer to the number start[offset]."""
        return self.builder.gep(start, [self.integer(offset)])

    def number(self, start: Value, offset: Offset) -> Value:
        """Load the number start[offset], of any type."""
        return self.builder.load(self.at(start, offset))

    def in_register(self, pointer: Value) -> Value:
        """Return the pointer, which LLVM then keeps: it would derive it from other pointers in each round of a loop."""
        kind = ir.FunctionType(pointer.type, [pointer.type])
        return self.builder.call(ir.InlineAsm(kind, "", "=r,0"), [pointer])

    def opaque(self, integer: Value) -> Value:
        """Return the integer, about which LLVM then knows nothing: it computes nothing from it before this place."""
        kind = ir.FunctionType(self.int64, [self.int64])
        return self.builder.call(ir.InlineAsm(kind, "", "=r,0", side_effect=True), [integer])

    # -- vectors -----------------------------------------------------------------------------------------

    def pointer(self, start: Value, offset: Offset) -> Value:
        """Return a pointer to the vector that begins at start[offset], which need not be aligned to vectors."""
        return self.builder.bitcast(self.at(start, offset), self.vector.as_pointer())

    def load(self, start: Value, offset: Offset) -> Value:
        """Load the vector that begins at start[offset]."""
        return self.builder.load(self.pointer(start, offset), align=self.bytes)

    def store(self, vector: Value, start: Value, offset: Offset) -> None:
        """Store a vector, beginning at start[offset]."""
        self.builder.store(vector, self.pointer(start, offset), align=self.bytes)

    def load_masked(self, start: Value, offset: Offset, mask: Value) -> Value:
        """Load the lanes that the mask selects; the others are 0, and their memory is not read."""
        align, otherwise = ir.IntType(32)(self.bytes), self.filled(0.0)
        arguments = self.pointer(start, offset), align, mask, otherwise
        return self.call(f"llvm.masked.load.{self.suffix}.p0", self.vector, *arguments)

    def store_masked(self, vector: Value, start: Value, offset: Offset, mask: Value) -> None:
        """Store the lanes that the mask selects; the memory of the others is not written."""
        arguments = vector, self.pointer(start, offset), ir.IntType(32)(self.bytes), mask
        self.call(f"llvm.masked.store.{self.suffix}.p0", ir.VoidType(), *arguments)

    def mask(self, v: int, width: Value) -> Value:
        """Return a mask that selects the lanes of vector v that are within the first `width` columns."""
        columns = ir.Constant(ir.VectorType(self.int64, self.lanes), list(range(v * self.lanes, (v + 1) * self.lanes)))
        return self.builder.icmp_signed("<", columns, self.broadcast(width))

    def broadcast(self, number: Value) -> Value:
        """Return a vector with this number in each lane."""
        undefined = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def extended(self, vector: Value) -> Value:
        """Return the numbers of a vector, which may be of a shorter type, in this emitter's type."""
        return vector if vector.type == self.vector else self.builder.fpext(vector, self.vector)

    def multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        """Return x * y + z, rounded only once if the CPU has an instruction for it."""
        if not HAS_FMA:
            return self.builder.fadd(self.builder.fmul(x, y), z)
        return self.call(f"llvm.fma.{self.suffix}", self.vector, x, y, z)

    def scale_shift(self, x: Value, bias: Value, scale: Value, shift: Value) -> Value:
        """Return (x + bias) * scale + shift, each step rounded."""
        return self.builder.fadd(self.builder.fmul(self.builder.fadd(x, bias), scale), shift)

    def at_least(self, x: Value, least: Value) -> Value:
        """Return max(x, least); NaN stays NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", x, least), least, x)

    def prefetch(self, start: Value, offset: Offset, write: bool = False, level: int = 2) -> None:
        """Begin to load the cache line of start[offset], to read or write it, into the cache of this level (1 or 2)."""
        flag, pointer = ir.IntType(32), self.builder.bitcast(self.at(start, offset), ir.IntType(8).as_pointer())
        locality, data = 4 - level, 1  # LLVM's codes: 3 for the first level, 2 for the second; data, not instructions
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, flag(int(write)), flag(locality), flag(data))

    def call(self, name: str, result: Any, *arguments: Value) -> Value:
        """Call a function of LLVM, such as llvm.fma.v16f32; result: the type of what it returns."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    # -- control: loops and branches ---------------------------------------------------------------------

    def loop(
        self, rounds: Value, counters: list[tuple[Offset, Offset]], first: Sums, body: Callable[..., Sums]
    ) -> Sums:
        """Write a loop that begins with sums = first and repeats sums = body(sums, number of the round, *counters).

        Returns the last sums. rounds: at least 1, since the loop compares at its end. counters: (begin, step) for each
        counter. Each counter and each sum is a `phi` instruction, so LLVM keeps it in a register.
        """
        b, entry = self.builder, self.builder.block
        start = b.append_basic_block("loop")
        b.branch(start)
        b.position_at_end(start)
        counters = [(0, 1), *counters]
        numbers, sums = [b.phi(self.int64) for _ in counters], {at: b.phi(self.vector) for at in first}
        result = body(sums, *numbers)
        following = [b.add(number, self.integer(step)) for number, (_, step) in zip(numbers, counters)]
        following[0] = self._not_unrolled(following[0])
        last, done = b.block, b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", following[0], rounds), start, done)
        b.position_at_end(done)
        befores = [*(self.integer(begin) for begin, _ in counters), *first.values()]
        for phi, before, after in zip([*numbers, *sums.values()], befores, [*following, *(result[at] for at in first)]):
            phi.add_incoming(before, entry)
            phi.add_incoming(after, last)
        return result

    def _not_unrolled(self, counter: Value) -> Value:
        """Return the counter of a loop, so that LLVM does not unroll the loop.

        LLVM would keep the address of each row for each copy of the body, which is more than there are registers. It
        does not copy `convergent` code, such as this assembly of no instruction.
        """
        kind = ir.FunctionType(self.int64, [self.int64])
        return self.builder.call(ir.InlineAsm(kind, "", "=r,0"), [counter], attrs=("convergent",))

    def when(self, condition: Value, compute: Callable[[], dict], otherwise: dict) -> dict:
        """Return the vectors of compute() if the condition holds, else `otherwise`; both have the same keys."""
        b, before = self.builder, self.builder.block
        with b.if_then(condition):
            computed = compute()
            after = b.block
        merged = {at: b.phi(self.vector) for at in otherwise}
        for at, phi in merged.items():
            phi.add_incoming(computed[at], after)
            phi.add_incoming(otherwise[at], before)
        return merged

    # -- tiles -------------------------------------------------------------------------------------------

    def fewest_vectors(self, width: Value, most: int, tile: Callable[[int], None]) -> None:
        """Write tile(vectors) for 1 to `most` vectors; the least number of vectors that hold `width` columns runs."""
        if most == 1:
            tile(1)
            return
        less = self.integer((most - 1) * self.lanes)
        with self.builder.if_else(self.builder.icmp_signed(">", width, less)) as (all_of_them, fewer):
            with all_of_them:
                tile(most)
            with fewer:
                self.fewest_vectors(width, most - 1, tile)

    def lowest(self, rows: Value, heights: Sequence[int], tile: Callable[[int], None]) -> None:
        """Write tile(height) for each of the heights, which fall; the least height of at least `rows` rows runs."""
        if len(heights) == 1:
            tile(heights[0])
            return
        with self.builder.if_else(self.builder.icmp_signed(">", rows, self.integer(heights[1]))) as (high, low):
            with high:
                tile(heights[0])
            with low:
                self.lowest(rows, heights[1:], tile)

    def narrowest(self, width: Value, most: int, tile: Callable[[Emitter, int], None]) -> None:
        """Write tile(emitter, vectors) for half a vector and 1 to `most` vectors; the least that holds `width` runs.

        The emitter of half a vector has half as many lanes. Some CPUs (AMD Zen 4) begin two multiply-adds of 256 bits
        in the time of one of 512 bits, so half a vector takes half the time.
        """
        if self.lanes * self.bytes <= SMALLEST_VECTOR:
            self.fewest_vectors(width, most, lambda vectors: tile(self, vectors))
            return
        half = self.with_lanes(self.lanes // 2)
        with self.builder.if_else(self.builder.icmp_signed(">", width, self.integer(half.lanes))) as (more, few):
            with more:
                self.fewest_vectors(width, most, lambda vectors: tile(self, vectors))
            with few:
                tile(half, 1)

    def row_numbers(self, rows: Value, most: int) -> list[Value]:
        """Return min(i, rows - 1) for i < most: missing rows repeat the last one, with the same results."""
        last = self.builder.sub(rows, self.integer(1))
        return [self.smaller(i, last) for i in range(most)]

    def zeros(self, rows: int, vectors: int) -> Sums:
        """Return the sums of a tile before the first product."""
        return {(i, v): self.filled(0.0) for i in range(rows) for v in range(vectors)}

    def columns(self, start: Value, vectors: int) -> list[Value]:
        """Load adjacent vectors, beginning at start[0]."""
        return [self.load(start, v * self.lanes) for v in range(vectors)]

    def rank_one(self, sums: Sums, numbers: Iterable[Value], columns: list[Value]) -> Sums:
        """Return sums + the outer product of single numbers, given as pointers, and the vectors `columns`."""
        added = {}
        for i, pointer in enumerate(numbers):
            number = self.broadcast(self.builder.load(pointer))
            for v, column in enumerate(columns):
                added[i, v] = self.multiply_add(number, column, sums[i, v])
        return added

    def prefetch_rows(self, rows: list[Value], vectors: int) -> None:
        """Begin to load the lines of a tile of c into the first level, to write them when the sums are complete.

        A store to a line that is not there waits for it, and few stores can wait at a time. If a row does not begin on
        a line, its last line is left out.
        """
        for row in rows:
            for number in range(0, vectors * self.lanes, 64 // self.bytes):
                self.prefetch(row, number, write=True, level=1)

    def plus(self, sums: Sums, accumulate: Value, rows: list[Value], width: Value) -> Sums:
        """Return the sums, plus c if `accumulate`; row i of c begins at the pointer rows[i]."""

        return self.when(accumulate, lambda: self.plus_rows(sums, rows, width), sums)

    def plus_rows(self, sums: Sums, rows: list[Value], width: Value) -> Sums:
        """Return the sums plus the numbers of rows; row i begins at the pointer rows[i]."""
        masks = self._masks(sums, width)
        loaded = {(i, v): self.load_masked(rows[i], v * self.lanes, masks[v]) for i, v in sums}
        return {at: self.builder.fadd(loaded[at], value) for at, value in sums.items()}

    def write(self, sums: Sums, rows: list[Value], width: Value) -> None:
        """Store the sums in c: whole vectors if the tile is full, else the lanes within `width`.

        The first row is stored last. So missing rows, whose address is that of the last row, may have any sums.
        """
        vectors, backwards = 1 + max(v for _, v in sums), sorted(sums, reverse=True)
        full = self.builder.icmp_signed(">=", width, self.integer(vectors * self.lanes))
        with self.builder.if_else(full) as (whole, part):
            with whole:
                for i, v in backwards:
                    self.store(sums[i, v], rows[i], v * self.lanes)
            with part:
                masks = self._masks(sums, width)
                for i, v in backwards:
                    self.store_masked(sums[i, v], rows[i], v * self.lanes, masks[v])

    def _masks(self, sums: Sums, width: Value) -> dict[int, Value]:
        """Return the mask for each vector of columns."""
        return {v: self.mask(v, width) for v in dict.fromkeys(v for _, v in sums)}


@instructions
def prefetch(e: Emitter, source: Value, at: Value) -> None:
    """Begin to load the cache line of source[at], to read it, into the second-level cache."""
    e.prefetch(source, at)
