"""Pooling of one window, in vector instructions (matmul/emitter.py).

    largest         the largest pixel of a window, and its tap
    gradients       the sum of the gradients of the windows that have their maximum at a pixel
    scaled_sum      factor * pixel, added up over a window: average pooling, forward and backward
    spread          the gradient of a window that overlaps no other, at its maximum

A window is small: few pixels, and often few channels. LLVM vectorises a loop over the channels of a pixel, too, but
such a loop begins with a test whether the arrays overlap, ends number by number, and loads and stores its results for
each pixel. Here a vector of channels stays in registers for the whole window.

The last vector ends with the last channel. It may overlap the vector before it, and computes some channels again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..matmul.emitter import SMALLEST_VECTOR, Emitter, Offset, Sums, Value, instructions

Steps = list[tuple[Offset, Offset, Offset]]  # for each counter: where it begins, its steps to the next row and column


def _for_each_vector(e: Emitter, channels: Value, write: Callable[[Emitter, Value], None]) -> None:
    """Write write(emitter, c); it runs for the first channel c of each vector.

    The vectors are the longest ones that are not longer than a pixel: whole vectors, short ones, or single numbers.
    """

    def choose(lanes: list[int]) -> None:
        if not lanes:  # no channels
            return
        with e.builder.if_else(e.builder.icmp_signed(">=", channels, e.integer(lanes[0]))) as (fit, too_long):
            with fit:
                loop(e.with_lanes(lanes[0]))
            with too_long:
                choose(lanes[1:])

    def loop(e: Emitter) -> None:
        def vector(_: Sums, number: Value, c: Value) -> Sums:
            write(e, e.smaller(c, last))
            return {}

        last = e.builder.sub(channels, e.integer(e.lanes))
        e.loop(e.builder.sdiv(e.sum(channels, e.lanes - 1), e.integer(e.lanes)), [(0, e.lanes)], {}, vector)

    choose(sorted({e.lanes, SMALLEST_VECTOR // e.bytes, 1}, reverse=True))


def _over_window(e: Emitter, rows: Value, columns: Value, steps: Steps, first: Sums, add: Callable[..., Sums]) -> Sums:
    """Write sums = add(sums, *counters) for each pixel of a window, row by row; return the last sums."""

    def one_row(sums: Sums, _: Value, *begins: Value) -> Sums:
        counters = [(begin, column) for begin, (_, _, column) in zip(begins, steps)]
        return e.loop(columns, counters, sums, lambda sums, _, *counters: add(sums, *counters))

    return e.loop(rows, [(begin, row) for begin, row, _ in steps], first, one_row)


def _integers(e: Emitter) -> Any:
    """Return the type of a vector of integers as long as the numbers."""
    return ir.VectorType(ir.IntType(8 * e.bytes), e.lanes)


def _taps(e: Emitter, tap: Value) -> Value:
    """Return a vector with this tap in each lane."""
    return e.broadcast(e.builder.trunc(tap, _integers(e).element))


def _places(e: Emitter, place: Value, at: Value) -> Value:
    """Return a pointer to a vector of place, an array of uint8 or int32."""
    return e.builder.bitcast(e.at(place, at), ir.VectorType(place.type.pointee, e.lanes).as_pointer())


def _load_places(e: Emitter, place: Value, at: Value) -> Value:
    """Load a vector of place, as integers as long as the numbers."""
    where, kind = e.builder.load(_places(e, place, at), align=1), _integers(e)
    return e.builder.zext(where, kind) if where.type.element.width < kind.element.width else where


def _store_places(e: Emitter, where: Value, place: Value, at: Value) -> None:
    pointer = _places(e, place, at)
    shorter = pointer.type.pointee.element.width < where.type.element.width
    e.builder.store(e.builder.trunc(where, pointer.type.pointee) if shorter else where, pointer, align=1)


@instructions
def largest(
    e: Emitter, x: Value, at: Value, line: Value, rows: Value, columns: Value, tap: Value, taps: Value, channels: Value,
    y: Value, place: Value, to: Value,
) -> None:  # fmt: skip
    """Compute y[to + c] = the largest pixel of a window, and place[to + c] = its tap, for c < channels.

    x[at]: the first pixel, whose tap is `tap`. A row of x has `line` numbers, a row of the whole window `taps` taps.
    rows, columns: of the part of the window within the image, at least 1.
    """

    def write(e: Emitter, c: Value) -> None:
        def compare(best: Sums, pixel: Value, tap: Value) -> Sums:
            value = e.load(x, pixel)
            wins = b.or_(b.fcmp_ordered(">", value, best[0, 0]), b.fcmp_unordered("uno", value, value))  # NaN wins
            where = b.bitcast(_taps(e, tap), e.vector)  # a loop passes on vectors of numbers: these bits are no number
            return {(0, 0): b.select(wins, value, best[0, 0]), (0, 1): b.select(wins, where, best[0, 1])}

        b, begin = e.builder, e.sum(at, c)
        steps: Steps = [(begin, line, channels), (tap, taps, 1)]
        first = {(0, 0): e.load(x, begin), (0, 1): b.bitcast(_taps(e, tap), e.vector)}
        best = _over_window(e, rows, columns, steps, first, compare)
        e.store(best[0, 0], y, e.sum(to, c))
        _store_places(e, b.bitcast(best[0, 1], _integers(e)), place, e.sum(to, c))

    _for_each_vector(e, channels, write)


@instructions
def gradients(
    e: Emitter, dy: Value, place: Value, at: Value, line: Value, rows: Value, columns: Value, tap: Value,
    down: Value, right: Value, channels: Value, dx: Value, to: Value,
) -> None:  # fmt: skip
    """Compute dx[to + c] = the sum of dy over the windows whose maximum is this pixel, for c < channels.

    dy[at]: the gradient of the first window that contains the pixel, as its tap `tap`. In the next window below, the
    pixel has the tap `tap - down`, in the next one to the right `tap - right`. A row of dy has `line` numbers.
    rows, columns: how many windows contain the pixel, at least 1.
    """

    def write(e: Emitter, c: Value) -> None:
        def add(sums: Sums, window: Value, tap: Value) -> Sums:
            here = b.icmp_signed("==", _load_places(e, place, window), _taps(e, tap))
            return {(0, 0): b.fadd(sums[0, 0], b.select(here, e.load(dy, window), e.filled(0.0)))}

        b = e.builder
        steps: Steps = [(e.sum(at, c), line, channels), (tap, b.neg(down), b.neg(right))]
        sums = _over_window(e, rows, columns, steps, e.zeros(1, 1), add)
        e.store(sums[0, 0], dx, e.sum(to, c))

    _for_each_vector(e, channels, write)


@instructions
def scaled_sum(
    e: Emitter, x: Value, at: Value, line: Value, rows: Value, columns: Value, factor: Value, channels: Value,
    y: Value, to: Value,
) -> None:  # fmt: skip
    """Compute y[to + c] = the sum of factor * x over rows x columns pixels, for c < channels.

    x[at]: the first pixel. A row of x has `line` numbers. rows, columns: at least 1.
    """

    def write(e: Emitter, c: Value) -> None:
        def add(sums: Sums, pixel: Value) -> Sums:
            return {(0, 0): e.builder.fadd(sums[0, 0], e.builder.fmul(e.broadcast(factor), e.load(x, pixel)))}

        sums = _over_window(e, rows, columns, [(e.sum(at, c), line, channels)], e.zeros(1, 1), add)
        e.store(sums[0, 0], y, e.sum(to, c))

    _for_each_vector(e, channels, write)


@instructions
def spread(
    e: Emitter, dy: Value, place: Value, at: Value, rows: Value, columns: Value, channels: Value, dx: Value, to: Value,
    line: Value,
) -> None:  # fmt: skip
    """Write the rows x columns pixels of a window that overlaps no other: dy[at + c] where place has the tap, else 0.

    dx[to]: the first pixel. A row of dx has `line` numbers.
    """

    def write(e: Emitter, c: Value) -> None:
        def pixel(_: Sums, pixel: Value, tap: Value) -> Sums:
            here = e.builder.icmp_signed("==", where, _taps(e, tap))
            e.store(e.builder.select(here, gradient, e.filled(0.0)), dx, pixel)
            return {}

        gradient, where = e.load(dy, e.sum(at, c)), _load_places(e, place, e.sum(at, c))
        _over_window(e, rows, columns, [(e.sum(to, c), line, channels), (0, columns, 1)], {}, pixel)

    _for_each_vector(e, channels, write)
