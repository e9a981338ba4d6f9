"""Moving elements on a GPU. A strided copy is merged to few axes on the host, and then has one of three kernels:

- if both arrays are contiguous along the same axis, each thread copies four neighbours, 16 bytes in float32;
- if they are contiguous along different axes (a transpose), a block copies a tile of 32 x 32 through shared memory, so
  that neighbouring threads read neighbours and write neighbours;
- else each thread copies one element.

The threads follow the order of the target, so neighbours write neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from numba import int32, uint32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel, launch
from minidl.engine.cuda_memory import get, load4, put, store4

from ..elementwise.quads import QUAD
from ..reduce.block_sum import ALL, THREADS, WARP, WARPS
from ..reduce.cuda_matrix import load_part, store_part, wide
from .reference import __all__ as __all__

AXES = 4  # of a kernel; copies with more axes have several launches
TILE = 32
TILE_ROWS = THREADS // TILE  # rows of a tile that the threads copy at once
STEP = TILE + 1  # of a row of the tile in shared memory: the elements of a column are then in different banks
TILE_SIZE = TILE * STEP


@dataclass(frozen=True)
class Axis:
    """An axis of a copy: its length, and the strides in source and target."""

    n: int
    s: int
    t: int


def merged(shape: ndarray, source_strides: ndarray, target_strides: ndarray) -> list[Axis]:
    """Return the axes of a copy in the order of the target, with those merged that continue each other."""
    axes = [Axis(int(n), int(s), int(t)) for n, s, t in zip(shape, source_strides, target_strides, strict=True)]
    found: list[Axis] = []
    for axis in sorted((axis for axis in axes if axis.n != 1), key=lambda axis: -abs(axis.t)):
        before = found[-1] if found else None
        if before and (before.s, before.t) == (axis.s * axis.n, axis.t * axis.n):
            found[-1] = Axis(before.n * axis.n, axis.s, axis.t)
        else:
            found.append(axis)
    return found


def _pieces(axes: list[Axis], most: int, s: int, t: int) -> Iterator[tuple[list[Axis], int, int]]:
    """Yield copies with at most `most` axes: (axes, source offset, target offset)."""
    if len(axes) <= most:
        yield [Axis(1, 0, 0)] * (most - len(axes)) + axes, s, t
        return
    for i in range(axes[0].n):
        yield from _pieces(axes[1:], most, s + i * axes[0].s, t + i * axes[0].t)


def _strided(width: int) -> Kernel:
    def strided(
        source: ndarray, s: int, n0: int, s0: int, t0: int, n1: int, s1: int, t1: int, n2: int, s2: int, t2: int,
        n3: int, s3: int, t3: int, t: int, target: ndarray,
    ) -> None:  # fmt: skip
        """Copy `width` neighbours per thread; the strides of the last axis count from one such group to the next."""
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        i3, rest = i % n3, i // n3
        i2, rest = rest % n2, rest // n2
        i1, i0 = rest % n1, rest // n1
        if i0 < n0:
            from_ = int32(s + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3)
            to = int32(t + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3)
            if width == 1:
                put(target, to, get(source, from_))
            else:
                store4(target, to, load4(source, from_))

    return kernel(threads=THREADS)(strided)


_copy_one, _copy_four = _strided(1), _strided(QUAD)


@kernel(threads=THREADS)
def _transpose(
    source: ndarray, s: int, n0: int, s0: int, t0: int, n1: int, s1: int, t1: int, rows: int, columns: int,
    s_column: int, t_row: int, t: int, target: ndarray,
) -> None:  # fmt: skip
    """target[r * t_row + c] = source[c * s_column + r] for a tile of a plane; n0 x n1 planes"""
    tile = cuda.shared.array(TILE_SIZE, source.dtype)
    tiles_r, tiles_c = int32((rows + TILE - 1) // TILE), int32((columns + TILE - 1) // TILE)
    block = int32(cuda.blockIdx.x)
    c0, rest = int32(block % tiles_c * TILE), block // tiles_c
    r0, plane = int32(rest % tiles_r * TILE), rest // tiles_r
    from_ = int32(s + plane // n1 * s0 + plane % n1 * s1)
    to = int32(t + plane // n1 * t0 + plane % n1 * t1)
    x, y = int32(cuda.threadIdx.x % TILE), int32(cuda.threadIdx.x // TILE)
    for k in range(y, TILE, TILE_ROWS):
        r, c = int32(r0 + x), int32(c0 + k)
        if r < rows and c < columns:
            tile[k * STEP + x] = get(source, int32(from_ + c * s_column + r))
    cuda.syncthreads()
    for k in range(y, TILE, TILE_ROWS):
        r, c = int32(r0 + k), int32(c0 + x)
        if r < rows and c < columns:
            put(target, int32(to + r * t_row + c), tile[x * STEP + k])


def copy(
    source: ndarray, source_offset: int, source_strides: ndarray, shape: ndarray,
    target_offset: int, target_strides: ndarray, target: ndarray,
) -> None:  # fmt: skip
    axes = merged(shape, source_strides, target_strides)
    if any(axis.n == 0 for axis in axes):
        return
    last = axes[-1] if axes else Axis(1, 0, 0)
    contiguous = next((axis for axis in axes if axis.s == 1), last)
    if last.t == 1 and contiguous is not last and min(last.n, contiguous.n) > 1:
        others = [axis for axis in axes if axis not in (last, contiguous)]
        tiles = -(-last.n // TILE) * -(-contiguous.n // TILE)
        for (first, second), s, t in _pieces(others, 2, source_offset, target_offset):
            launch(
                _transpose, first.n * second.n * tiles, source, s, first.n, first.s, first.t, second.n, second.s,
                second.t, contiguous.n, last.n, last.s, contiguous.t, t, target,
            )  # fmt: skip
        return
    strides = [stride for axis in axes[:-1] for stride in (axis.s, axis.t)]
    quads = last.s == last.t == 1 and wide(last.n, source, target)
    if quads and all(number % QUAD == 0 for number in (source_offset, target_offset, *strides)):
        compute, axes = _copy_four, [*axes[:-1], Axis(last.n // QUAD, QUAD, QUAD)]
    else:
        compute = _copy_one
    for four, s, t in _pieces(axes, AXES, source_offset, target_offset):
        threads = four[0].n * four[1].n * four[2].n * four[3].n
        numbers = [number for axis in four for number in (axis.n, axis.s, axis.t)]
        launch(compute, -(-threads // THREADS), source, s, *numbers, t, target)


@kernel(threads=THREADS)
def _take(x: ndarray, rows: ndarray, channels: int, wide: bool, out: ndarray) -> None:
    """A thread for each quad of out."""
    item, across = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32((channels + QUAD - 1) // QUAD)
    i, c = item // across, int32(item % across * QUAD)
    if i < rows.size:
        v = cuda.local.array(QUAD, x.dtype)
        load_part(x, get(rows, i) * channels + c, channels - c, wide, v)
        store_part(out, int32(i * channels + c), channels - c, wide, v)


def take(x: ndarray, rows: ndarray, out: ndarray) -> None:
    channels = x.shape[1]
    launch(
        _take, -(-rows.size * -(-channels // QUAD) // THREADS), x, rows, channels, wide(channels, x, out), out
    )  # fmt: skip


@kernel(threads=THREADS)
def _take_backward(dy: ndarray, rows: ndarray, count: int, channels: int, strips: int, wide: bool, dx: ndarray) -> None:
    """A warp for a strip of 128 channels of a row of dx. It looks at 32 elements of `rows` at once, finds those that
    are its row, and adds their gradients in order."""
    number = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
    lane = int32(cuda.threadIdx.x % WARP)
    r, c = number // strips, int32(number % strips * WARP * QUAD + lane * QUAD)
    if r * channels >= dx.size:
        return
    d, total = cuda.local.array(QUAD, dx.dtype), cuda.local.array(QUAD, dx.dtype)
    for j in range(QUAD):
        d[j], total[j] = 0, 0
    for begin in range(0, count, WARP):
        k = int32(begin + lane)
        found = uint32(cuda.ballot_sync(ALL, k < count and get(rows, k) == r))  # a bit for each thread
        while found != 0:
            others = uint32(found & (found - uint32(1)))  # without the lowest bit
            i = int32(begin + cuda.popc(uint32((found ^ others) - uint32(1))))  # as many bits lie below the lowest
            found = others
            load_part(dy, int32(i * channels + c), channels - c, wide, d)
            for j in range(QUAD):
                total[j] += d[j]
    store_part(dx, int32(r * channels + c), channels - c, wide, total)


def take_backward(dy: ndarray, rows: ndarray, dx: ndarray) -> None:
    channels = dx.shape[1]
    strips = -(-channels // (WARP * QUAD))
    launch(
        _take_backward, -(-dx.shape[0] * strips // WARPS), dy, rows, rows.size, channels, strips,
        wide(channels, dy, dx), dx,
    )  # fmt: skip
