"""The rates of this machine: multiply-adds, reading and copying at each level of memory, the start of a parallel loop.

    rates = measure_rates(report, threads)      rates.read[L2]: bytes per second that `threads` cores read from L2

A level is the place from which a core receives a number: 0 for L1, 1 for L2, 2 for L3, 3 for memory. Each rate is that
of a loop that does nothing else, on vectors that fill half of the level's cache (for memory: 256 MB), in the fastest of
several turns. For L3 they are at most 8 times as large as L2: a virtual machine may report the L3 of a whole server,
but use a part of it. All rates are sums over the threads. A kernel that uses a level cannot be faster than these loops.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.engine import jit as engine
from minidl.engine.jit import HAS_AMX, VECTOR_BYTES, parallel_jit, prange
from minidl.kernels.matmul import amx
from minidl.kernels.matmul.emitter import Emitter
from minidl.resources import caches

LEVELS = "L1", "L2", "L3", "memory"
L1, L2, L3, MEMORY = range(4)
USUAL = {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}  # bytes, for caches whose size is unknown
PER_TURN = 4e6  # bytes that a thread moves in a turn, at least
TILE_BLOCKS = 2  # blocks of 32 k: then the operands, 24 KB, are in L1
UNROLL = 8  # vectors that are loaded before the loop continues
AHEAD = 32  # vectors that a reading loop prefetches ahead


class Rates(NamedTuple):
    """What a number of threads does per second, and the bytes of the caches for each of them.

    fma: multiply-adds of float32; tiles: the same on AMX, from parts (kernels/matmul/amx.py), 0 without AMX.
    read, copy: bytes of each level; copied bytes count twice, read and written.
    start: seconds from one parallel loop to the next; asleep: the same if the threads had fallen asleep before.
    """

    threads: int
    capacity: tuple[int, int, int]
    fma: float
    tiles: float
    read: tuple[float, ...]
    copy: tuple[float, ...]
    start: float
    asleep: float


def capacity(threads: int) -> tuple[int, int, int]:
    """Return the bytes of L1, L2 and L3 for each of the threads. Cores share L3. A missing cache has 0 bytes."""
    found = caches() or USUAL
    return found.get(1, 0), found.get(2, 0), found.get(3, 0) // threads


def _make_read(ahead: int) -> Any:
    """Return a loop that reads all vectors and, if `ahead` > 0, prefetches the vectors that many further on.

    In a virtual machine on a Zen 4, reading from memory without prefetches reached 10 or 27 GB/s, depending on the
    process (probably on its pages of memory); with AHEAD, 27 in each of them.
    """

    @intrinsic
    def read(typing: Any, source: Any, sink: Any) -> Any:
        """Read all vectors of `source` and combine them with `or`, an instruction that never limits the loop.

        source (n,): n a multiple of UNROLL vectors. sink (LANES,): receives the result, so that LLVM keeps the loads.
        """

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            lanes, word, emitter = VECTOR_BYTES // 4, ir.IntType(64), Emitter(context, b, signature.args)
            kind = ir.VectorType(ir.IntType(32), lanes)
            arrays = [context.make_array(k)(context, b, a) for k, a in zip(signature.args, arguments, strict=True)]
            data, to = (b.bitcast(array.data, kind.as_pointer()) for array in arrays)
            turns = b.sdiv(cgutils.unpack_tuple(b, arrays[0].shape)[0], word(UNROLL * lanes))
            sums = [cgutils.alloca_once_value(b, ir.Constant(kind, [0] * lanes)) for _ in range(UNROLL)]
            with cgutils.for_range(b, turns) as loop:
                first = b.mul(loop.index, word(UNROLL))
                for i, each in enumerate(sums):
                    place = b.gep(data, [b.add(first, word(i))])
                    if ahead:
                        emitter.prefetch(place, ahead, level=1)
                    b.store(b.or_(b.load(each), b.load(place, align=4)), each)
            total = b.load(sums[0])
            for each in sums[1:]:
                total = b.or_(total, b.load(each))
            b.store(total, to, align=4)
            return context.get_dummy_value()

        return types.void(source, sink), generate

    return read


_read, _read_ahead = _make_read(0), _make_read(AHEAD)


@parallel_jit
def _read_often(source: np.ndarray, sink: np.ndarray, times: int, prefetched: bool) -> None:
    for thread in prange(sink.shape[0]):
        for _ in range(times):
            if prefetched:
                _read_ahead(source[thread], sink[thread])
            else:
                _read(source[thread], sink[thread])


@parallel_jit
def _copy_often(source: np.ndarray, target: np.ndarray, times: int) -> None:
    for thread in prange(target.shape[0]):
        for _ in range(times):
            measure.copy_part(source[thread], target[thread])


@parallel_jit
def _nothing(sink: np.ndarray) -> None:
    for thread in prange(sink.shape[0]):
        sink[thread, 0] = 0


@parallel_jit
def _multiply_tiles(operands: np.ndarray, sums: np.ndarray, times: int) -> None:
    for thread in prange(sums.shape[0]):
        amx.begin_tiles(amx.SHAPES)
        for _ in range(times):
            amx.multiply(amx.SIDE, amx.SIDE, TILE_BLOCKS, False, operands[thread], 0, operands[thread],
                         TILE_BLOCKS * amx.BLOCK, sums[thread], 0, amx.SIDE, sums[thread], 0, amx.SIDE)  # fmt: skip
        amx.end_tiles(amx.SHAPES)


def tile_loop(threads: int) -> tuple[Callable[[], object], float]:
    """Return (a function that only multiplies tiles in L1, its number of multiply-adds of float32).

    The operands are random: with zeros, the CPU needs less power, and its clock rate is up to 40% higher.
    """
    depth, times = TILE_BLOCKS * amx.SIDE, 2000
    numbers = np.random.default_rng(0).standard_normal(2 * amx.SIDE * depth, np.float32)
    operands, sums = rows(threads, 8 * TILE_BLOCKS * amx.BLOCK), rows(threads, 4 * amx.SIDE**2)
    for own in operands:
        amx.split_strip(numbers, 0, depth, amx.SIDE, depth, own, 0)
        amx.split_panels(numbers, amx.SIDE * depth, amx.SIDE, amx.SIDE, depth, own, TILE_BLOCKS * amx.BLOCK)
    return lambda: _multiply_tiles(operands, sums, times), float(threads * times * depth * amx.SIDE**2)


def rows(threads: int, nbytes: int) -> np.ndarray:
    """Return an array (threads, n) of about `nbytes` per thread; each row is a whole number of unrolled vectors."""
    n = max(1, nbytes // (UNROLL * VECTOR_BYTES)) * UNROLL * VECTOR_BYTES // 4
    return measure.aligned(threads * n, 0.0).reshape(threads, n)


def loops(threads: int, level: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return {"read ..." or "copy ...": (a function that only does this at a level, its bytes)}."""
    sink = rows(threads, 4096)
    if level == MEMORY:
        whole = rows(threads, measure.LARGE // threads)
        ways = measure.copies(measure.LARGE, threads)
        moved = {f"copy {name}": way for name, way in ways.items() if name != measure.IN_PLACE}
        return {
            "read": (lambda: _read_often(whole, sink, 1, False), float(whole.nbytes)),
            "read, prefetched": (lambda: _read_often(whole, sink, 1, True), float(whole.nbytes)),
            **moved,
        }
    sizes = capacity(threads)
    half = min(sizes[level] // 2, 8 * sizes[L2]) if level == L3 and sizes[L2] else sizes[level] // 2
    source, first, second = rows(threads, half), rows(threads, half // 2), rows(threads, half // 2)
    times = max(1, round(PER_TURN / max(1, half)))
    return {
        "read": (lambda: _read_often(source, sink, times, False), float(source.nbytes) * times),
        "read, prefetched": (lambda: _read_often(source, sink, times, True), float(source.nbytes) * times),
        "copy": (lambda: _copy_often(first, second, times), 2.0 * first.nbytes * times),
    }


def wake_up(threads: int) -> tuple[float, float]:
    """Return the seconds of an empty parallel loop: right after another one, and after the threads fell asleep."""
    sink = rows(threads, 64)
    loop = measure.replay(_nothing, sink, calls=20)
    awake = measure.alternate({"": loop}, 0.02)[""].median / 20
    single, asleep = measure.replay(_nothing, sink), []
    for _ in range(20):
        time.sleep(0.003)
        began = time.perf_counter()
        single()
        asleep.append(time.perf_counter() - began)
    return awake, median(asleep)


def measure_rates(report: measure.Report, threads: int) -> Rates:
    """Measure all rates with this number of threads."""
    before = engine.threads()
    engine.set_threads(threads)
    try:
        read, copied = [], []
        for level in range(len(LEVELS)):
            if level < MEMORY and not capacity(threads)[level]:  # no such cache: the next level is used instead
                read.append(0.0), copied.append(0.0)
                continue
            ways = loops(threads, level)
            times = report.alternate({name: function for name, (function, _) in ways.items()})
            rate = {name: moved / times[name].best for name, (_, moved) in ways.items()}
            read.append(max(value for name, value in rate.items() if name.startswith("read")))
            copied.append(max(value for name, value in rate.items() if name.startswith("copy")))
        start, asleep = wake_up(threads)
        loop, operations = measure.peak_loop(threads)
        fma = operations / 2 / report.alternate({"": loop})[""].best
        tiles = 0.0
        if HAS_AMX:
            loop, operations = tile_loop(threads)
            tiles = operations / report.alternate({"": loop})[""].best
        return Rates(threads, capacity(threads), fma, tiles, tuple(read), tuple(copied), start, asleep)
    finally:
        engine.set_threads(before)


def describe(rates: Rates) -> str:
    """Return the rates as three lines of text."""
    each = [f"{name} {read / 1e9:.0f} / {copy / 1e9:.0f}" for name, read, copy in zip(LEVELS, rates.read, rates.copy)]
    on_amx = f", on AMX {rates.tiles / 1e9:.0f}" if rates.tiles else ""
    sizes = ", ".join(f"{name} {size >> 10} KiB" for name, size in zip(LEVELS, rates.capacity))
    return (
        f"{rates.threads} threads: {rates.fma / 1e9:.0f} G multiply-adds/s{on_amx}; caches for each thread: {sizes}\n"
        f"  read / copy in GB/s: {', '.join(each)}\n"
        f"  start of a parallel loop: {rates.start * 1e6:.1f} us, if the threads sleep {rates.asleep * 1e6:.0f} us"
    )
