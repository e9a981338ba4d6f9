"""The micro-kernel for matrix products: the tile of tile.py, where rows lie at equal distances and k is the only sum.

    c[c_at + i c_row + j]  (+)=  sum over k < depth of  a[a_at + i a_row + k a_step]  *  b[b_at + k b_step + j]

What surrounds the sums counts here: a sum of 32 products takes as long as what came before and after it. So nothing is
looked up in tables, addresses of c are found when the sums are done, and masks only where a tile is not whole. The end
of a linear layer (bias, relu) is applied while the sums are in registers.

One thing is new: `soon`. In each k the CPU is asked for two cache lines at soon[soon_at + k soon_step], which a later
tile will read. It does not wait for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy import ndarray

from minidl.engine.jit import apart_jit

from .tile import ROWS, Sums, _Tile, intrinsic, lanes


def _make_product_tile(vectors: int) -> Any:
    @intrinsic
    def product_tile(
        typing: Any, rows: Any, width: Any, depth: Any, accumulate: Any,
        a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, c: Any, c_at: Any, c_row: Any,
        finish: Any, bias: Any, bias_at: Any, biased: Any, relu: Any, soon: Any, soon_at: Any, soon_step: Any,
    ) -> Any:  # fmt: skip
        """biased: how many columns of bias are added, all or 0; both it and relu only if `finish`."""
        n, yes = types.int64, types.boolean
        signature = types.void(n, n, n, yes, a, n, n, n, b, n, n, c, n, n, yes, bias, n, n, yes, soon, n, n)
        return signature, lambda *arguments: _ProductTile(vectors, *arguments).emit()

    return product_tile


class _ProductTile(_Tile):
    """Its instructions. What single instructions are called is the tile's."""

    def __init__(self, vectors: int, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.begin(context, builder, signature.args[4].dtype)
        self.vectors = vectors

        def place(i: int) -> Any:
            array = context.make_array(signature.args[i])(context, builder, arguments[i])
            return builder.gep(array.data, [arguments[i + 1]])

        self.rows, self.width, self.depth, self.accumulate = arguments[:4]
        self.a, self.a_row, self.a_step = place(4), arguments[6], arguments[7]
        self.b_data, self.b_step = place(8), arguments[10]
        self.c, self.c_row = place(11), arguments[13]
        self.finish, self.bias, self.biased, self.relu = arguments[14], place(15), arguments[17], arguments[18]
        self.soon, self.soon_step = place(19), arguments[21]

    def emit(self) -> Any:
        b = self.b
        tiles = [(i, v) for i in range(ROWS) for v in range(self.vectors)]
        # Rows beyond the last one repeat it: they compute, and store, the same numbers once more.
        last = b.sub(self.rows, self.constant(1))
        numbers = [self.smaller(self.constant(i), last) for i in range(ROWS)]
        a_rows = [b.gep(self.a, [b.mul(i, self.a_row)]) for i in numbers]

        # For each k: load b's vectors; for each row, one number of a times each of them.
        entry, loop, done = b.block, b.append_basic_block("product.loop"), b.append_basic_block("product.done")
        b.branch(loop)
        b.position_at_end(loop)
        counters = [b.phi(self.size) for _ in range(4)]
        a_index, b_index, soon_index = counters[1:]
        sums = {at: b.phi(self.vector) for at in tiles}
        b_row = b.gep(self.b_data, [b_index])
        columns = [self.load(self.column(b_row, v)) for v in range(self.vectors)]
        self.prefetch(b.gep(self.soon, [soon_index]))
        added = {}
        for i in range(ROWS):
            number = self.broadcast(b.load(b.gep(a_rows[i], [a_index])))
            for v in range(self.vectors):
                added[i, v] = self.multiply_add(number, columns[v], sums[i, v])
        steps = self.constant(1), self.a_step, self.b_step, self.soon_step
        following = [b.add(counter, step) for counter, step in zip(counters, steps)]
        b.cbranch(b.icmp_signed("<", following[0], self.depth), loop, done)
        for counter, more in zip(counters, following):
            counter.add_incoming(self.constant(0), entry)
            counter.add_incoming(more, loop)
        for at in tiles:
            sums[at].add_incoming(self.all(0.0), entry)
            sums[at].add_incoming(added[at], loop)

        # Bias and relu; the sums go to c.
        b.position_at_end(done)
        c_rows = [b.gep(self.c, [b.mul(i, self.c_row)]) for i in numbers]
        totals = self.plus_c(added, c_rows)
        before = b.block
        with b.if_then(self.finish):
            finished = self.finished(totals)
            finishing = b.block
        self.write({at: self.either(finished[at], finishing, totals[at], before) for at in tiles}, c_rows)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def finished(self, sums: Sums) -> Sums:
        """The sums [+ bias] [max(., 0)]. What is added where there is no bias is -0, which changes no bit."""
        b = self.b
        bias = [self.load_or(self.all(-0.0), self.column(self.bias, v), self.mask(v, self.biased))
                for v in range(self.vectors)]  # fmt: skip
        lowest = b.select(self.relu, self.all(0.0), self.all(-np.inf))
        found = {}
        for (i, v), value in sums.items():
            value = b.fadd(value, bias[v])
            found[i, v] = b.select(b.fcmp_ordered("<", value, lowest), lowest, value)  # NaN stays
        return found

    def prefetch(self, pointer: Any) -> None:
        """The two cache lines from there on begin to come, as far as the second-level cache."""
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        for line in range(2):
            place = self.b.bitcast(self.b.gep(pointer, [self.constant(line * 64 // self.bytes)]), byte)
            self.b.call(fetch, [place, number(0), number(2), number(1)])

    def load_or(self, default: Any, pointer: Any, mask: Any) -> Any:
        return self.b.select(mask, self.load_masked(pointer, mask), default)


narrow_tile, wide_tile = _make_product_tile(1), _make_product_tile(2)


@apart_jit
def product_panel(
    rows: int, width: int, depth: int, accumulate: bool, a: ndarray, a_at: int, a_row: int, a_step: int,
    b: ndarray, b_at: int, b_step: int, c: ndarray, c_at: int, c_row: int,
) -> None:  # fmt: skip
    """A column of tiles: any number of rows, up to panel_width(a) columns; a, b, c are vectors (one axis)."""
    none: Any = np.int64(0)  # not a literal: for each one, Numba would compile a function once more
    for i in range(0, rows, ROWS):
        some, a_i, c_i = min(ROWS, rows - i), a_at + i * a_row, c_at + i * c_row
        if width > lanes(a):
            wide_tile(some, width, depth, accumulate, a, a_i, a_row, a_step, b, b_at, b_step, c, c_i, c_row,
                      rows < 0, b, none, none, rows < 0, b, b_at, none)  # fmt: skip
        else:
            narrow_tile(some, width, depth, accumulate, a, a_i, a_row, a_step, b, b_at, b_step, c, c_i, c_row,
                        rows < 0, b, none, none, rows < 0, b, b_at, none)  # fmt: skip
