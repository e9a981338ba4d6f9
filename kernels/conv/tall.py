"""A tile of one vector of columns and sixteen rows, for Winograd's products with up to 16 outputs.

The tile of matmul/tile.py has eight rows, each anywhere: with one vector of columns that is 8 sums, as few as keep the
multiply-adds busy, and any delay shows. Sixteen rows anywhere would be sixteen addresses, more than the CPU has
registers for. Here rows are a fixed distance apart, a constant to the compiler, so that one address is enough.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from minidl.kernels.matmul.tile import ROWS, _Tile, intrinsic

TALL = 2 * ROWS  # rows


def _make_tall_tile(side_by_side: bool) -> Any:
    """The tile for rows of a that are one number apart (side_by_side), or one vector."""

    @intrinsic
    def tall_tile(
        typing: Any, depth: Any, accumulate: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any,
        c: Any, c_at: Any, c_row: Any,
    ) -> Any:  # fmt: skip
        """c[c_at + i c_row + j] (+)= sum over k < depth of a[a_at + i distance + k a_step] b[b_at + k b_step + j]"""
        n = types.int64
        signature = types.void(n, types.boolean, a, n, n, b, n, n, c, n, n)
        return signature, lambda *arguments: _TallTile(1 if side_by_side else None, *arguments).emit()

    return tall_tile


class _TallTile(_Tile):
    def __init__(self, distance: int | None, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.begin(context, builder, signature.args[2].dtype)

        def place(i: int) -> Any:
            array = context.make_array(signature.args[i])(context, builder, arguments[i])
            return builder.gep(array.data, [arguments[i + 1]])

        self.depth, self.accumulate = arguments[:2]
        self.distance: int = distance or self.lanes
        self.a, self.a_step = place(2), arguments[4]
        self.b_data, self.b_step = place(5), arguments[7]
        self.c, self.c_row = place(8), arguments[10]

    def emit(self) -> Any:
        b = self.b
        rows = [self.column(b.gep(self.c, [b.mul(self.c_row, self.constant(i))]), 0) for i in range(TALL)]
        entry, loop, done = b.block, b.append_basic_block("tall.loop"), b.append_basic_block("tall.done")
        b.branch(loop)
        b.position_at_end(loop)
        counters = [b.phi(self.size) for _ in range(3)]
        sums = [b.phi(self.vector) for _ in rows]
        a, column = b.gep(self.a, [counters[1]]), self.load(self.column(b.gep(self.b_data, [counters[2]]), 0))
        added = []
        for i, total in enumerate(sums):
            number = b.load(b.gep(a, [self.constant(i * self.distance)]))
            added.append(self.multiply_add(self.broadcast(number), column, total))
        following = [
            b.add(counter, step)
            for counter, step in zip(counters, (self.constant(1), self.a_step, self.b_step), strict=True)
        ]
        b.cbranch(b.icmp_signed("<", following[0], self.depth), loop, done)
        for counter, more in zip(counters, following, strict=True):
            counter.add_incoming(self.constant(0), entry)
            counter.add_incoming(more, loop)
        for total, more in zip(sums, added, strict=True):
            total.add_incoming(self.all(0.0), entry)
            total.add_incoming(more, loop)
        b.position_at_end(done)
        with b.if_then(self.accumulate):
            totals = [b.fadd(self.load(row), value) for row, value in zip(rows, added, strict=True)]
            adding = b.block
        results = [self.either(total, adding, value, done) for total, value in zip(totals, added, strict=True)]
        for row, value in zip(rows, results, strict=True):
            b.store(value, row, align=self.bytes)
        return ir.Constant(ir.IntType(8).as_pointer(), None)


tall_tile, tall_tile_side_by_side = _make_tall_tile(False), _make_tall_tile(True)
