"""The tile for few channels a group (depthwise: one): the lanes of a vector share nothing.

    c[c_rows[i] + j]  (+)=  sum over t of   a[a_taps[t] + a_rows[i] + j]  *  b[b_taps[t] + j]

A lane is a channel and each has its own weight: no number is broadcast, both factors are vectors. Every multiply-add
therefore waits for a load of its own, where the micro-kernel of matmul/tile.py loads ten times for sixteen of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numpy import ndarray

from minidl.engine.jit import REGISTERS, apart_jit, jit
from minidl.kernels.matmul.tile import _Tile, intrinsic, lanes

ROWS = 9  # the taps of a 3 x 3 kernel, which are the rows of its gradient


def _make_tile(vectors: int) -> Any:
    @intrinsic
    def tile(
        typing: Any, rows: Any, taps: Any, accumulate: Any, a: Any, a_taps: Any, a_rows: Any, a_at: Any,
        b: Any, b_taps: Any, b_at: Any, c: Any, c_rows: Any, c_at: Any, width: Any,
    ) -> Any:  # fmt: skip
        size = types.int64
        signature = types.void(
            size, size, types.boolean, a, a_taps, a_rows, size, b, b_taps, size, c, c_rows, size, size
        )
        return signature, lambda *arguments: _ChannelTile(vectors, *arguments).emit()

    return tile


class _ChannelTile(_Tile):
    """Writes the instructions, as matmul's does: a sum for each row stays in a register, `phi` by `phi`."""

    def __init__(self, vectors: int, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.begin(context, builder, signature.args[3].dtype)
        self.vectors = vectors

        def data(i: int) -> Any:
            return context.make_array(signature.args[i])(context, builder, arguments[i]).data

        (self.rows, self.taps, self.accumulate), self.width = arguments[:3], arguments[13]
        self.a, self.b_data, self.c = (builder.gep(data(i), [arguments[at]]) for i, at in ((3, 6), (7, 9), (10, 12)))
        self.a_taps, self.a_rows, self.b_taps, self.c_rows = data(4), data(5), data(8), data(11)

    def emit(self) -> Any:
        b, nothing = self.b, self.constant(0)
        tiles = [(i, v) for i in range(ROWS) for v in range(self.vectors)]
        last = b.sub(self.rows, self.constant(1))
        numbers = [self.smaller(self.constant(i), last) for i in range(ROWS)]
        c_rows = [b.gep(self.c, [b.load(b.gep(self.c_rows, [i]))]) for i in numbers]
        a_rows = [b.gep(self.a, [b.load(b.gep(self.a_rows, [i]))]) for i in numbers]

        entry, loop = b.block, b.append_basic_block("channels.loop")
        done = b.append_basic_block("channels.done")
        b.branch(loop)
        b.position_at_end(loop)
        tap, sums = b.phi(self.size), [b.phi(self.vector) for _ in tiles]
        weights = b.gep(self.b_data, [b.load(b.gep(self.b_taps, [tap]))])
        at = b.load(b.gep(self.a_taps, [tap]))
        columns = [self.load(self.column(weights, v)) for v in range(self.vectors)]
        added = [
            self.multiply_add(self.load(self.column(b.gep(a_rows[i], [at]), v)), columns[v], total)
            for (i, v), total in zip(tiles, sums)
        ]
        following = b.add(tap, self.constant(1))
        b.cbranch(b.icmp_signed("<", following, self.taps), loop, done)
        tap.add_incoming(nothing, entry)
        tap.add_incoming(following, loop)
        for total, new in zip(sums, added):
            total.add_incoming(self.all(0.0), entry)
            total.add_incoming(new, loop)

        b.position_at_end(done)
        self.write(self.plus_c(dict(zip(tiles, added)), c_rows), c_rows)
        return ir.Constant(ir.IntType(8).as_pointer(), None)


_narrow, _wide = _make_tile(1), _make_tile(2)


@jit
def channel_width(array: ndarray) -> int:
    """Channels of a tile: two vectors, where there are registers for so many sums."""
    return 2 * lanes(array) if REGISTERS == 32 else lanes(array)


@apart_jit
def channel_panel(
    rows: int, taps: int, accumulate: bool, a: ndarray, a_taps: ndarray, a_rows: ndarray, a_at: int,
    b: ndarray, b_taps: ndarray, b_at: int, c: ndarray, c_rows: ndarray, c_at: int, width: int,
) -> None:  # fmt: skip
    """A column of tiles: any number of rows, up to channel_width channels; a and b must be readable for all of them."""
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if width <= lanes(a):
            _narrow(count, taps, accumulate, a, a_taps, a_rows[first:], a_at,
                    b, b_taps, b_at, c, c_rows[first:], c_at, width)  # fmt: skip
        else:
            _wide(count, taps, accumulate, a, a_taps, a_rows[first:], a_at,
                  b, b_taps, b_at, c, c_rows[first:], c_at, width)  # fmt: skip
