"""The micro-kernel: one small tile of a sum of products, kept in the CPU's vector registers from beginning to end.

Every matrix product and every convolution here is made of this one loop. For a tile of `rows` x `width` numbers of c:

    c[c_rows[i] + j]  (+)=  sum over t, k of   a[a_taps[t] + a_rows[i] + k a_step]  *  b[b_taps[t] + k b_step + j]

    i    up to ROWS rows, each anywhere in a and c: rows of a matrix, or pixels of an image
    j    up to two vectors of columns, contiguous in b and c
    t,k  what is summed over: k with a fixed step; t (the taps of a convolution; a product has one) through a table

Why it is fast. A multiply-add waits about 4 cycles for its result, and a core begins two in each cycle: 8 that do not
depend on each other must be under way, or it idles. A tile of 8 x 2 vectors is 16 sums that do not depend on each
other. And for those 16 multiply-adds it loads 2 vectors of b and 8 numbers of a, each used several times: the loads
are not what one waits for. LLVM does not find this form in a loop over arrays (it cannot know that c does not overlap
a and b, so it stores and loads c each time), hence the few lines that write its instructions out.

The sum is taken in the order of t and k, whatever the tile's place and size, and then added to c: bits do not depend on
how a product was cut into tiles, and sums of sums round less than one long sum. Offsets and steps are in elements. b
must be readable for both vectors even where `width` is smaller.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numpy import ndarray

from minidl.engine.jit import HAS_FMA, REGISTERS, VECTOR_BYTES, apart_jit, jit

intrinsic: Any = extending.intrinsic  # Numba's annotation of it would have callers pass `typing`, too
Sums = dict[tuple[int, int], Any]
ROWS = 8 if REGISTERS == 32 else 6  # with 2 vectors each, and those of b and a, they fill the registers


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """How many of the array's numbers one vector holds: a constant to the compiler."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(64), VECTOR_BYTES // (array.dtype.bitwidth // 8))

    return types.int64(array), generate


@jit
def panel_width(array: ndarray) -> int:
    """Columns of a tile: two vectors."""
    return 2 * lanes(array)


def _make_tile(vectors: int) -> Any:
    """The micro-kernel for `vectors` vectors of columns, for whatever float type it is called with."""

    @intrinsic
    def tile(
        typing: Any, rows: Any, taps: Any, depth: Any, accumulate: Any,
        a: Any, a_taps: Any, a_rows: Any, a_at: Any, a_step: Any,
        b: Any, b_taps: Any, b_at: Any, b_step: Any,
        c: Any, c_rows: Any, c_at: Any, width: Any,
    ) -> Any:  # fmt: skip
        size = types.int64
        signature = types.void(
            size, size, size, types.boolean, a, a_taps, a_rows, size, size, b, b_taps, size, size, c, c_rows, size, size
        )
        return signature, lambda *arguments: _Tile(vectors, *arguments).emit()

    return tile


class _Tile:
    """Writes the instructions of one tile, in LLVM's language.

    One `phi` for each sum makes LLVM keep it in a register; loops end with a comparison at the bottom, since at least
    one product is always wanted.
    """

    def __init__(self, vectors: int, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.begin(context, builder, signature.args[4].dtype)
        self.vectors = vectors
        (self.rows, self.taps, self.depth, self.accumulate, a, a_taps, a_rows, a_at, self.a_step,
         b, b_taps, b_at, self.b_step, c, c_rows, c_at, self.width) = arguments  # fmt: skip

        def data(i: int, value: Any) -> Any:
            return context.make_array(signature.args[i])(context, builder, value).data

        self.a, self.b_data, self.c = (
            builder.gep(data(i, value), [at]) for i, value, at in ((4, a, a_at), (9, b, b_at), (13, c, c_at))
        )
        self.a_taps, self.a_rows = data(5, a_taps), data(6, a_rows)
        self.b_taps, self.c_rows = data(10, b_taps), data(14, c_rows)

    def begin(self, context: Any, builder: Any, kind: Any) -> None:
        """What instructions are about: numbers of this kind, and vectors of them."""
        self.b, self.size = builder, ir.IntType(64)
        self.number, self.bytes = context.get_data_type(kind), kind.bitwidth // 8
        self.lanes = VECTOR_BYTES // self.bytes
        self.vector, self.suffix = ir.VectorType(self.number, self.lanes), f"v{self.lanes}f{kind.bitwidth}"

    def emit(self) -> Any:
        b = self.b
        tiles = [(i, v) for i in range(ROWS) for v in range(self.vectors)]
        # Rows beyond the last one repeat it: they compute, and store, the same numbers once more.
        last = b.sub(self.rows, self.constant(1))
        numbers = [self.smaller(self.constant(i), last) for i in range(ROWS)]
        c_rows = [b.gep(self.c, [b.load(b.gep(self.c_rows, [i]))]) for i in numbers]
        a_rows = [b.gep(self.a, [b.load(b.gep(self.a_rows, [i]))]) for i in numbers]

        # For each tap ...
        entry, start = b.block, b.append_basic_block("tile.start")
        b.branch(start)
        b.position_at_end(start)
        tap, outer = b.phi(self.size), {at: b.phi(self.vector) for at in tiles}
        a_tap, b_tap = b.load(b.gep(self.a_taps, [tap])), b.load(b.gep(self.b_taps, [tap]))
        a_taps = [b.gep(row, [a_tap]) for row in a_rows]
        # ... for each k: load b's vectors; for each row, one number of a times each of them.
        inner = b.append_basic_block("tile.inner")
        b.branch(inner)
        b.position_at_end(inner)
        k, a_index, b_index = b.phi(self.size), b.phi(self.size), b.phi(self.size)
        sums = {at: b.phi(self.vector) for at in tiles}
        b_row = b.gep(self.b_data, [b_index])
        columns = [self.load(self.column(b_row, v)) for v in range(self.vectors)]
        added = {}
        for i in range(ROWS):
            number = self.broadcast(b.load(b.gep(a_taps[i], [a_index])))
            for v in range(self.vectors):
                added[i, v] = self.multiply_add(number, columns[v], sums[i, v])
        next_k = b.add(k, self.constant(1))
        next_a, next_b = b.add(a_index, self.a_step), b.add(b_index, self.b_step)
        after = b.append_basic_block("tile.after")
        b.cbranch(b.icmp_signed("<", next_k, self.depth), inner, after)
        b.position_at_end(after)
        next_tap = b.add(tap, self.constant(1))
        done = b.append_basic_block("tile.done")
        b.cbranch(b.icmp_signed("<", next_tap, self.taps), start, done)

        nothing = self.constant(0)
        for phi, first, following in ((k, nothing, next_k), (a_index, nothing, next_a), (b_index, b_tap, next_b)):
            phi.add_incoming(first, start)
            phi.add_incoming(following, inner)
        tap.add_incoming(nothing, entry)
        tap.add_incoming(next_tap, after)
        for at in tiles:
            outer[at].add_incoming(self.all(0.0), entry)
            outer[at].add_incoming(added[at], after)
            sums[at].add_incoming(outer[at], start)
            sums[at].add_incoming(added[at], inner)

        b.position_at_end(done)
        self.write(self.plus_c(added, c_rows), c_rows)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    # -- what becomes of the sums: (row, vector) -> sum ----------------------------------------------------

    def plus_c(self, sums: Sums, c_rows: list[Any]) -> Sums:
        """c + the sums if `accumulate`, else the sums."""
        before = self.b.block
        with self.b.if_then(self.accumulate):
            masks = [self.mask(v, self.width) for v in range(self.vectors)]
            loaded = {(i, v): self.load_masked(self.column(c_rows[i], v), masks[v]) for i, v in sums}
            totals = {at: self.b.fadd(loaded[at], value) for at, value in sums.items()}
            adding = self.b.block
        return {at: self.either(totals[at], adding, value, before) for at, value in sums.items()}

    def write(self, sums: Sums, c_rows: list[Any]) -> None:
        """c = the sums: whole vectors, or what is within `width`."""
        full = self.b.icmp_signed(">=", self.width, self.constant(self.vectors * self.lanes))
        with self.b.if_else(full) as (whole, part):
            with whole:
                for (i, v), value in sums.items():
                    self.b.store(value, self.column(c_rows[i], v), align=self.bytes)
            with part:
                masks = [self.mask(v, self.width) for v in range(self.vectors)]
                for (i, v), value in sums.items():
                    self.store_masked(value, self.column(c_rows[i], v), masks[v])

    def either(self, x: Any, from_x: Any, y: Any, from_y: Any) -> Any:
        """The vector x where control came from the block `from_x`, y where it came from `from_y`."""
        phi = self.b.phi(self.vector)
        phi.add_incoming(x, from_x)
        phi.add_incoming(y, from_y)
        return phi

    # -- single instructions -----------------------------------------------------------------------------

    def constant(self, value: int) -> Any:
        return ir.Constant(self.size, value)

    def all(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * self.lanes)

    def smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def column(self, row: Any, v: int) -> Any:
        return self.b.bitcast(self.b.gep(row, [self.constant(v * self.lanes)]), self.vector.as_pointer())

    def load(self, pointer: Any) -> Any:
        return self.b.load(pointer, align=self.bytes)

    def broadcast(self, number: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.b.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(first, undefined, zeros)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x y + z, rounded once where the CPU can."""
        if not HAS_FMA:
            return self.b.fadd(self.b.fmul(x, y), z)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, f"llvm.fma.{self.suffix}"), [x, y, z])

    def mask(self, v: int, width: Any) -> Any:
        """Which lanes of the v-th vector are within `width`."""
        wide = ir.VectorType(self.size, self.lanes)
        first = self.b.insert_element(ir.Constant(wide, ir.Undefined), width, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        widths = self.b.shuffle_vector(first, ir.Constant(wide, ir.Undefined), zeros)
        numbers = ir.Constant(wide, [v * self.lanes + lane for lane in range(self.lanes)])
        return self.b.icmp_signed("<", numbers, widths)

    def load_masked(self, pointer: Any, mask: Any) -> Any:
        kind = ir.FunctionType(self.vector, [pointer.type, ir.IntType(32), mask.type, self.vector])
        load = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.masked.load.{self.suffix}.p0")
        return self.b.call(load, [pointer, ir.Constant(ir.IntType(32), self.bytes), mask, self.all(0.0)])

    def store_masked(self, value: Any, pointer: Any, mask: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, ir.IntType(32), mask.type])
        store = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.masked.store.{self.suffix}.p0")
        self.b.call(store, [value, pointer, ir.Constant(ir.IntType(32), self.bytes), mask])


_narrow, _wide = _make_tile(1), _make_tile(2)


@apart_jit
def panel(
    rows: int, taps: int, depth: int, accumulate: bool,
    a: ndarray, a_taps: ndarray, a_rows: ndarray, a_at: int, a_step: int,
    b: ndarray, b_taps: ndarray, b_at: int, b_step: int,
    c: ndarray, c_rows: ndarray, c_at: int, width: int,
) -> None:  # fmt: skip
    """A column of tiles: `rows` rows, any number of them, and up to panel_width(a) columns.

    a, b, c: vectors (one axis) of one float type; a_at, b_at, c_at: where the panel begins in them.
    a_taps, b_taps (taps,), a_rows, c_rows (rows,): int64 offsets from there. The other arguments as above.
    """
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if width <= lanes(a):
            _narrow(count, taps, depth, accumulate, a, a_taps, a_rows[first:], a_at, a_step,
                    b, b_taps, b_at, b_step, c, c_rows[first:], c_at, width)  # fmt: skip
        else:
            _wide(count, taps, depth, accumulate, a, a_taps, a_rows[first:], a_at, a_step,
                  b, b_taps, b_at, b_step, c, c_rows[first:], c_at, width)  # fmt: skip
