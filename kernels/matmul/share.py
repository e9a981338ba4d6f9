"""What one thread does for a product (cpu.py): its tiles, and what they need in its own memory."""

from __future__ import annotations

from typing import NamedTuple

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper

from .blocks import (
    LANES,
    NR,
    PANELS,
    PRODUCT_MR,
    block_depth,
    block_strips,
    few_panels,
    few_rows,
    most_strips,
    tile_rows,
)
from .few import few_tile
from .operands import Left, Right
from .pack import pack_columns, pack_rows, pack_strips
from .product import (
    LINES,
    packing_tile,
    packing_tile_side_by_side,
    product_tile,
    product_tile_side_by_side,
)
from .short_sums import has_short_sums, panels_size
from .tile import line_of, panel_width

B_IN_PLACE_STRIPS = 1  # for up to this many strips panels of b are not copied, unless b is transposed
PACK_A_PANELS = 4  # a thread with at least this many panels copies a, too, if a is transposed


class End(NamedTuple):
    """What follows the sums: if `finish`, the bias is added unless its size is 0, then relu is applied if `relu`."""

    finish: bool
    bias: ndarray
    relu: bool


@helper
def panel_size(depth: int) -> int:
    """Return the number of elements of a packed panel of b, whose depth is rounded up to whole vectors."""
    return (block_depth(max(1, depth)) + LANES - 1) // LANES * LANES * NR


@helper
def share_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of a thread's scratch: panels of b and, for many panels, a block of a."""
    kc = block_depth(max(1, depth))
    if has_short_sums(rows, columns, depth):
        return max(PANELS * panel_size(depth), panels_size(columns, depth)) + (PRODUCT_MR + 1) * (depth + LANES)
    # LANES, not NR: a panel of float64 is half as wide, so PACK_A_PANELS panels have half as many columns. The last
    # pair may have few columns.
    strips = min((rows + PRODUCT_MR - 1) // PRODUCT_MR, most_strips(kc))
    if columns <= (PACK_A_PANELS - PANELS) * LANES:
        strips = 1
    packed_a = strips * PRODUCT_MR * kc + LANES * (PRODUCT_MR + 1)
    return PANELS * panel_size(depth) + (packed_a + LANES - 1) // LANES * LANES


@apart_jit
def _panel(
    rows: int, wide: int, deep: int, accumulate: bool, a: Left, a_at: int, packed_a: bool, b: ndarray, b_at: int,
    b_step: int, b_panel: int, unpacked: Right, unpacked_at: int, packs: bool, c: ndarray, c_at: int, c_row: int,
    end: End, column: int, soon_step: int, spare: ndarray,
) -> None:  # fmt: skip
    """Compute a column of tiles: c[c_at + i * c_row + j] for i < rows, j < wide, sums of `deep` products.

    packed_a: whether a consists of packed strips (pack_strips). If `packs`, the first tile copies its panels from
    unpacked[unpacked_at] to b; otherwise they are there. It must have FULL_HEIGHT rows: more than one strip. If
    `finish` in `end`, add its bias from `column` on, and apply relu. The first LINES tiles prefetch the next panels of
    `unpacked`, a line for each product; if soon_step is 0, nothing. spare: memory for a strip.
    """
    soon, soon_at = unpacked.numbers, unpacked_at + PANELS * unpacked.panel
    strips, biased = (rows + PRODUCT_MR - 1) // PRODUCT_MR, wide if end.bias.size > 0 else 0
    panels, tiles = 1 if wide <= panel_width(c) else 2, 0
    for strip in range(strips):
        top = strip * PRODUCT_MR
        high = min(PRODUCT_MR, rows - top)
        numbers, at, step = a.numbers, a_at + top, a.step
        if packed_a:
            at = a_at + top * deep
        elif a.row == 1 and at + (deep - 1) * step + PRODUCT_MR > numbers.size:  # the tile would read beyond a
            pack_strips(a, at, deep, high, spare)
            numbers, at, step = spare, 0, PRODUCT_MR
        i = 0
        while i < high:
            height, to = tile_rows(high - i, panels), c_at + (top + i) * c_row
            if packs and tiles == 0:
                if a.row > 1:
                    packing_tile(height, wide, deep, accumulate, a.numbers, a_at, a.row, unpacked.numbers, unpacked_at,
                                 unpacked.step, unpacked.panel, c, to, c_row, end.finish, end.bias, column, biased,
                                 end.relu, b, b_at, b_step, 0, 0)  # fmt: skip
                else:
                    packing_tile_side_by_side(height, wide, deep, accumulate, numbers, at, step, unpacked.numbers,
                                              unpacked_at, unpacked.step, unpacked.panel, c, to, c_row, end.finish,
                                              end.bias, column, biased, end.relu, b, b_at, b_step, 0, 0)  # fmt: skip
            elif a.row > 1:
                product_tile(height, wide, deep, accumulate, a.numbers, a_at + (top + i) * a.row, a.row,
                             b, b_at, b_step, b_panel, c, to, c_row, end.finish, end.bias, column, biased, end.relu,
                             soon, soon_at, soon_step, 0, 0)  # fmt: skip
            else:
                product_tile_side_by_side(height, wide, deep, accumulate, numbers, at + i, step,
                                          b, b_at, b_step, b_panel, c, to, c_row, end.finish, end.bias, column, biased,
                                          end.relu, soon, soon_at, soon_step, 0, 0)  # fmt: skip
            i, tiles, soon_at = i + height, tiles + 1, soon_at + deep * soon_step
            if tiles == LINES:
                soon_step = 0


@apart_jit
def share(
    part: int, parts: int, a: Left, b: Right, depth: int, bias: ndarray, relu: bool, scratch: ndarray, out: ndarray
) -> None:
    """Compute the tiles of one thread."""
    rows, columns = out.shape
    nr, kc, vector = panel_width(out), block_depth(depth), out.reshape(out.size)
    pair, line = PANELS * nr, line_of(out)
    strips, pairs = (rows + PRODUCT_MR - 1) // PRODUCT_MR, (columns + pair - 1) // pair
    first, last = part * strips * pairs // parts, (part + 1) * strips * pairs // parts
    block = block_strips(strips, kc)
    packed_b, strips_of_a = scratch, scratch[PANELS * panel_size(depth) :]
    few_mr = few_rows(rows, not b.packed) if b.column == 1 else 0
    few = few_panels(few_mr)  # panels that few.py computes together
    pack_a = a.row == 1 and not few and (last - first) * PANELS >= PACK_A_PANELS * strips
    pack_a = pack_a and not has_short_sums(rows, columns, depth)
    packed = Left(strips_of_a, 1, PRODUCT_MR)
    for top in range(0, strips, block):  # blocks of MC rows ...
        here = min(block * PRODUCT_MR, rows - top * PRODUCT_MR)
        for k in range(0, depth, kc):  # ... and KC products
            deep = min(kc, depth - k)
            if pack_a:
                pack_strips(a, top * PRODUCT_MR * a.row + k * a.step, deep, here, strips_of_a)
            end = End(k + deep == depth and (relu or bias.size > 0), bias, relu)
            done = 0
            for number in range(first // strips * PANELS, (last + strips - 1) // strips * PANELS, PANELS):
                column, b_at = number * nr, k * b.step + number * b.panel  # a pair: the panels `number`, `number` + 1
                if number < done:
                    continue
                if few and number + few <= last * PANELS and (number + few) * nr <= columns:
                    done = number + few
                    for row in range(0, rows, few_mr):
                        few_tile(min(few_mr, rows - row), deep, k > 0, a.numbers, row * a.row + k * a.step, a.row,
                                 a.step, b.numbers, b_at, b.step, b.panel, vector, row * columns + column, columns,
                                 end.finish, bias, column, few * nr if bias.size > 0 else 0, relu)  # fmt: skip
                    continue
                # The pair's strips lo, ..., hi - 1 are in the block, and this thread computes them.
                before = number // PANELS * strips
                lo, hi = max(top, first - before), min(top + block, strips, last - before)
                if lo >= hi:
                    continue
                wide = min(pair, columns - column)
                panel, panel_at, panel_step, b_panel = packed_b, 0, pair if wide > nr else nr, nr
                in_place = b.packed or (b.column == 1 and hi - lo <= B_IN_PLACE_STRIPS)
                packs = b.column == 1 and not in_place and wide == pair
                if in_place and b_at + (wide - 1) // nr * b.panel + (deep - 1) * b.step + nr <= b.numbers.size:
                    panel, panel_at, panel_step, b_panel = b.numbers, b_at, b.step, b.panel
                elif b.column > 1:
                    pack_columns(b.numbers, b_at, b.column, deep, wide, packed_b, panel_step)
                elif not packs:
                    pack_rows(b.numbers, b_at, b.step, deep, wide, packed_b, panel_step)
                # If the sums have one piece, packed panels are contiguous, and so are transposed ones: whole rows of b.
                # To prefetch other panels, whose rows are far apart, made no product faster.
                contiguous = (b.packed or b.column > 1) and deep == depth and column + pair < columns
                soon_step = line if contiguous else 0
                i = lo * PRODUCT_MR
                c_at, high = i * columns + column, min(hi * PRODUCT_MR, rows) - i
                if pack_a:
                    _panel(high, wide, deep, k > 0, packed, (lo - top) * PRODUCT_MR * deep, True, panel, panel_at,
                           panel_step, b_panel, b, b_at, packs, vector, c_at, columns, end, column, soon_step,
                           strips_of_a)  # fmt: skip
                else:
                    _panel(high, wide, deep, k > 0, a, i * a.row + k * a.step, False, panel, panel_at,
                           panel_step, b_panel, b, b_at, packs, vector, c_at, columns, end, column, soon_step,
                           strips_of_a)  # fmt: skip
