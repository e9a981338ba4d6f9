"""The strided copy, compiled. Axes that are contiguous in memory are merged, the last two of the merged axes form
planes, and the rows of all planes are divided among the threads.

Memory limits a copy, and memory moves whole cache lines of 16 numbers. If source and target are contiguous along the
last axis, whole lines are used. In a transpose, the target is contiguous within a row of the plane, and the source
within a column. So squares of as many rows and columns as a vector has numbers are transposed in registers
(matmul/pack.py). In planes that are smaller than a square, four rows are written simultaneously, and four neighbours in
the source are read together. This loop processes COLUMNS columns at a time, so that the source's lines are still in the
first-level cache for the next four rows.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, jit, parallel_jit, prange
from minidl.kernels.matmul.emitter import Emitter, Sums, Value, instructions
from minidl.kernels.matmul.pack import transpose_square
from minidl.kernels.matmul.tile import lanes

from .reference import __all__ as __all__

SERIAL = 32768  # one thread copies arrays with fewer numbers
TASKS = 32  # the rows of a larger copy are divided into this many tasks for the threads
COLUMNS = 128
SHORT_ROW = 4  # vectors: shorter rows are copied without the overhead of a vector loop for each row


@apart_jit
def _merged(shape: ndarray, source_strides: ndarray, target_strides: ndarray) -> ndarray:
    """Merge the axes of a copy to as few as possible, but at least two. Return an array (3, rank) whose rows are the
    shape, the source strides and the target strides.

    Axes of length 1 are removed. Two neighbouring axes are merged if, in source and target, the stride of the first
    equals the stride of the second times its length. If the target is contiguous along some axis, this axis becomes
    the last one.
    """
    axes = np.empty((3, shape.size + 2), np.int64)
    rank = 0
    for axis in range(shape.size):
        n, s, t = shape[axis], source_strides[axis], target_strides[axis]
        if n == 1:
            continue
        if rank and axes[1, rank - 1] == n * s and axes[2, rank - 1] == n * t:
            axes[0, rank - 1] *= n
            axes[1, rank - 1], axes[2, rank - 1] = s, t
        else:
            axes[0, rank], axes[1, rank], axes[2, rank] = n, s, t
            rank += 1
    if rank < 2:  # a plane of one row or of one number
        padded = np.ones((3, 2), np.int64)
        if rank:
            for k in range(3):
                padded[k, 1] = axes[k, 0]
        return padded
    axes = axes[:, :rank].copy()
    if axes[2, rank - 1] != 1:
        for axis in range(rank - 1):
            if axes[2, axis] == 1:
                for k in range(3):
                    axes[k, axis], axes[k, rank - 1] = axes[k, rank - 1], axes[k, axis]
    if axes[1, rank - 1] != 1:  # a transpose: the axis along which the source is contiguous becomes the second last
        for axis in range(rank - 2):
            if axes[1, axis] == 1:
                for k in range(3):
                    axes[k, axis], axes[k, rank - 2] = axes[k, rank - 2], axes[k, axis]
    return axes


@helper
def _transpose_plane(source: ndarray, step: int, target: ndarray, t_row: int, rows: int, columns: int) -> None:
    """target[r * t_row + c] = source[c * step + r]"""
    side = lanes(source)
    if rows >= side and columns >= side:  # the last squares overlap the ones before them
        for c in range(0, columns, side):
            left = min(c, columns - side)
            for r in range(0, rows, side):
                top = min(r, rows - side)
                transpose_square(source, left * step + top, step, side, target, top * t_row + left, t_row)
        return
    for c0 in range(0, columns, COLUMNS):
        count = min(COLUMNS, columns - c0)
        r = 0
        while r + 4 <= rows:
            four, at = source[c0 * step + r :], r * t_row + c0
            p, q = target[at:][:count], target[at + t_row :][:count]
            u, v = target[at + 2 * t_row :][:count], target[at + 3 * t_row :][:count]
            for c in range(count):
                k = c * step
                p[c], q[c], u[c], v[c] = four[k], four[k + 1], four[k + 2], four[k + 3]
            r += 4
        while r < rows:
            one, row = source[c0 * step + r :], target[r * t_row + c0 :][:count]
            for c in range(count):
                row[c] = one[c * step]
            r += 1


@instructions
def _copy_short_rows(
    e: Emitter, source: Value, s: Value, s_row: Value, target: Value, t: Value, t_row: Value, rows: Value,
    columns: Value,
) -> None:  # fmt: skip
    """Copy rows of at most SHORT_ROW vectors: target[t + r * t_row + c] = source[s + r * s_row + c]."""

    def copy(vectors: int, whole: bool) -> None:
        last, mask = vectors - 1, e.mask(vectors - 1, columns)

        def copy_row(sums: Sums, _: Value, s: Value, t: Value) -> Sums:
            from_, to = e.at(source, s), e.at(target, t)
            for v in range(vectors if whole else last):
                e.store(e.load(from_, v * e.lanes), to, v * e.lanes)
            if not whole:
                e.store_masked(e.load_masked(from_, last * e.lanes, mask), to, last * e.lanes, mask)
            return sums

        e.loop(rows, [(s, s_row), (t, t_row)], {}, copy_row)

    def choose(vectors: int) -> None:
        with e.builder.if_else(e.builder.icmp_signed("==", columns, e.integer(vectors * e.lanes))) as (whole, part):
            with whole:
                copy(vectors, True)
            with part:
                copy(vectors, False)

    e.fewest_vectors(columns, SHORT_ROW, choose)


@helper
def _copy_plane(source: ndarray, s: int, target: ndarray, t: int, rows: int, axes: ndarray) -> None:
    """Copy `rows` rows of a plane, the last two axes, which begin at element s of source and element t of target."""
    columns = axes[0, 1]
    s_row, s_column = axes[1]
    t_row, t_column = axes[2]
    if s_column == 1 and t_column == 1:
        if columns <= SHORT_ROW * lanes(source):
            _copy_short_rows(source, s, s_row, target, t, t_row, rows, columns)
            return
        for r in range(rows):
            row, into = source[s + r * s_row :][:columns], target[t + r * t_row :][:columns]
            for c in range(columns):
                into[c] = row[c]
        return
    if s_row == 1 and t_column == 1 and s_column > 0:
        _transpose_plane(source[s:], s_column, target[t:], t_row, rows, columns)
        return
    if s_column == 0 and t_column == 1:  # a broadcast: each row of the target has equal numbers
        for r in range(rows):
            number, into = source[s + r * s_row], target[t + r * t_row :][:columns]
            for c in range(columns):
                into[c] = number
        return
    for r in range(rows):
        from_, to = s + r * s_row, t + r * t_row
        for c in range(columns):
            target[to + c * t_column] = source[from_ + c * s_column]


@apart_jit
def _copy_rows(source: ndarray, s: int, target: ndarray, t: int, axes: ndarray, first: int, last: int) -> None:
    """Copy the rows `first` to `last` - 1 of all planes, numbered in row-major order over all axes but the last."""
    outer = axes.shape[1] - 2
    rows, done = axes[0, outer], first
    while done < last:
        r = done % rows
        count, rest = min(rows - r, last - done), done // rows
        from_, to = s + r * axes[1, outer], t + r * axes[2, outer]
        for k in range(outer):
            axis = outer - 1 - k
            index = rest % axes[0, axis]
            rest //= axes[0, axis]
            from_ += index * axes[1, axis]
            to += index * axes[2, axis]
        _copy_plane(source, from_, target, to, count, axes[:, outer:])
        done += count


@parallel_jit
def _copy_in_tasks(source: ndarray, s: int, target: ndarray, t: int, axes: ndarray, rows: int) -> None:
    for number in prange(TASKS):
        task = np.int64(number)  # an index of prange is unsigned: with signed integers, Numba would compute in float64
        _copy_rows(source, s, target, t, axes, task * rows // TASKS, (task + 1) * rows // TASKS)


@jit
def copy(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    size = 1
    for axis in range(shape.size):
        size *= shape[axis]
    if size == 0:
        return
    axes = _merged(shape, source_strides, target_strides)
    rows = size // axes[0, -1]
    if size < SERIAL:
        _copy_rows(source, source_offset, target, target_offset, axes, 0, rows)
        return
    if rows == 1:  # a vector: TASKS rows, and what remains
        rows, count, s_step, t_step = TASKS, axes[0, 1] // TASKS, axes[1, 1], axes[2, 1]
        done = count * TASKS
        axes[0, 1] -= done
        _copy_rows(source, source_offset + done * s_step, target, target_offset + done * t_step, axes, 0, 1)
        axes[0, 0], axes[1, 0], axes[2, 0], axes[0, 1] = TASKS, count * s_step, count * t_step, count
    _copy_in_tasks(source, source_offset, target, target_offset, axes, rows)


@jit
def take(x: ndarray, rows: ndarray, out: ndarray) -> None:
    for i in range(rows.size):
        out[i] = x[rows[i]]


@jit
def take_backward(dy: ndarray, rows: ndarray, dx: ndarray) -> None:
    dx[:] = 0
    for i in range(rows.size):
        target, gradient = dx[rows[i]], dy[i]
        for c in range(target.size):
            target[c] += gradient[c]
