"""Tools for the benchmarks: alternating measurements, the limits of the machine, and a common form of output.

    report = measure.Report(measure.arguments(__doc__).parse_args())    # --quick, --json, --threads; prints the machine
    share = report.ladder("GEMM 512", {"naive loops": f, "tiles": g}, flops=2 * 512**3)      # prints a table
    report.row("gemm-512", share["tiles"], "% of peak", ">= 92")                             # adds a row to the result
    report.finish()                                                          # prints the rows, with --json also as JSON

Machines are shared and their clock rates vary. Therefore the functions under comparison take turns, and the result is
the median of at least ten turns. The limits are measured in the same run: the rate of multiply-adds on registers, and
the fastest of several ways to copy memory. A ladder is the list of versions of a kernel in kernels/<op>/ladder.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

# Imported before numba, because minidl.engine.jit selects the instruction set.
from minidl.engine.jit import HAS_FMA, REGISTERS, VECTOR_BYTES, jit, parallel_jit, prange  # isort: skip
from minidl.engine.jit import set_threads, threads  # isort: skip

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.engine.environment import isa
from minidl.resources import processor

SMALL, LARGE = 2_700_000, 256_000_000  # bytes of a vector. SMALL: the MLP's weights; LARGE: more than any cache
TURNS = 10
IN_PLACE = "add in place"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fraction of the measuring time, to check that it runs")
    parser.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, as the last line')
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: all cores)")
    return parser


# -- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds per call, one number for each turn."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def best(self) -> float:
        return min(self.turns)

    @property
    def spread(self) -> float:
        """The interquartile range of the turns, relative to the median."""
        low, _, high = statistics.quantiles(self.turns, n=4)
        return (high - low) / self.median


def alternate(
    functions: Mapping[str, Callable[[], object]], seconds: float = 1.0, turns: int = TURNS
) -> dict[str, Times]:
    """Measure the time per call of each function, in at least `turns` turns and for at least `seconds` in total.

    In its turn a function is called as often as fits into half a millisecond, at least once, so the cost of the clock
    is negligible. Two calls before the first turn (compilation, first use of memory) are not timed. The first call in
    each turn of a short function is not timed either: the caches still contain the data of the previous function.
    """
    calls = {}
    for name, function in functions.items():
        function()
        began = time.perf_counter()
        function()
        calls[name] = max(1, round(5e-4 / max(time.perf_counter() - began, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while len(times[next(iter(times))]) < turns or time.perf_counter() < end:
        for name, function in functions.items():
            if calls[name] > 1:
                function()
            began = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - began) / calls[name])
    return {name: Times(tuple(each)) for name, each in times.items()}


def rungs(ladder: Mapping[str, Callable[..., object]], *arguments: Any) -> dict[str, Callable[[], object]]:
    """Return the versions of a ladder as functions without parameters, bound to these arguments."""
    return {name: partial(rung, *arguments) for name, rung in ladder.items()}


def replay(kernel: Any, *arguments: Any, calls: int = 1) -> Callable[[], object]:
    """Return a function that calls a kernel `calls` times, without Python in between, as a recorded step does."""
    from minidl.program import call

    kernel = kernel.choose(*arguments) if hasattr(kernel, "choose") else kernel  # one of several (jit.choice)
    signature = tuple(call.numba_type(value) for value in arguments)
    words = [call.kernel_address(kernel, signature)]
    for value in arguments:
        at = len(words)
        if isinstance(value, np.ndarray):
            words += call.array_slots(value.shape, value.itemsize)
            words[at + call.DATA] = value.ctypes.data
        else:
            words += call.slots(value)
    block = np.array(words, np.int64)
    table = np.full((calls, 2), (call.entry_addresses([signature])[0], block.ctypes.data), np.int64)

    def run(keep_alive: Any = (block, arguments)) -> None:
        call.run(table, 0, calls)

    return run


# -- the machine's limits ------------------------------------------------------------------------------------------

LANES = VECTOR_BYTES // 4  # float32 in a vector register
SUMS = 16 if REGISTERS == 32 else 14  # independent sums; the remaining registers hold x and y
PEAK_STEPS = 50_000
_vector = ir.VectorType(ir.FloatType(), LANES)


def _array_data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


@intrinsic
def _multiply_adds(typing: Any, numbers: Any, steps: Any) -> Any:
    """Compute s <- x * y + s for SUMS vectors s, `steps` times, on registers only. Without FMA instructions: x * s + y.

    numbers (2 * LANES,): x and y. The sum of all s overwrites x.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        data = _array_data(context, b, signature.args[0], arguments[0])
        place = b.bitcast(data, _vector.as_pointer())
        x = b.load(place, align=4)
        y = b.load(b.gep(place, [ir.Constant(ir.IntType(64), 1)]), align=4)
        kind = ir.FunctionType(_vector, [_vector] * 3)
        entry, loop, done = b.block, b.append_basic_block("peak.loop"), b.append_basic_block("peak.done")
        b.branch(loop)
        b.position_at_end(loop)
        i, sums = b.phi(ir.IntType(64)), [b.phi(_vector) for _ in range(SUMS)]
        added = []
        for s in sums:
            if HAS_FMA:
                fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")
                added.append(b.call(fma, [x, y, s]))
            else:
                added.append(b.fadd(b.fmul(x, s), y))
        following = b.add(i, ir.Constant(ir.IntType(64), 1))
        b.cbranch(b.icmp_signed("<", following, arguments[1]), loop, done)
        i.add_incoming(ir.Constant(ir.IntType(64), 0), entry)
        i.add_incoming(following, loop)
        for number, (s, more) in enumerate(zip(sums, added)):
            s.add_incoming(ir.Constant(_vector, [float(number)] * LANES), entry)
            s.add_incoming(more, loop)
        b.position_at_end(done)
        total = added[0]
        for s in added[1:]:
            total = b.fadd(total, s)
        b.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


@intrinsic
def _stream(typing: Any, source: Any, target: Any, first: Any, vectors: Any) -> Any:
    """Copy vectors of LANES elements, with stores that bypass the caches.

    first: index of the first element; its address in target must be aligned. vectors: number of vectors.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        places = []
        for kind, value in zip(signature.args[:2], arguments[:2]):
            data = b.gep(_array_data(context, b, kind, value), [arguments[2]])
            places.append(b.bitcast(data, _vector.as_pointer()))
        with cgutils.for_range(b, arguments[3]) as loop:
            value = b.load(b.gep(places[0], [loop.index]), align=4)
            store = b.store(value, b.gep(places[1], [loop.index]), align=VECTOR_BYTES)
            store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(source, target, types.int64, types.int64), generate


@parallel_jit
def _peak(numbers: np.ndarray, steps: int) -> None:
    for thread in prange(numbers.shape[0]):
        _multiply_adds(numbers[thread], steps)


@jit
def copy_part(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(target.size):
        target[i] = source[i]


@parallel_jit
def _copy(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    size = target.size // parts
    for part in prange(parts):
        begin = np.int64(part) * size
        copy_part(source[begin : begin + size], target[begin : begin + size])


@parallel_jit
def _copy_past_caches(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    vectors = target.size // LANES // parts
    for part in prange(parts):
        _stream(source, target, np.int64(part) * vectors * LANES, vectors)


@parallel_jit
def _in_place(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    """Add in place. This reads two vectors and writes one."""
    size = target.size // parts
    for part in prange(parts):
        begin = np.int64(part) * size
        _add_part(source[begin : begin + size], target[begin : begin + size])


@jit
def _add_part(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(target.size):
        target[i] += source[i]


def peak_loop(threads: int) -> tuple[Callable[[], object], float]:
    """Return (a function that only makes multiply-adds on this number of threads, its number of operations)."""
    numbers = np.full((threads, 2 * LANES), 1e-3, np.float32)
    return lambda: _peak(numbers, PEAK_STEPS), 2.0 * threads * PEAK_STEPS * SUMS * LANES


def aligned(size: int, value: float = 1.0) -> np.ndarray:
    """Return a float32 vector aligned to a cache line. Filling it with `value` maps its pages."""
    raw = np.empty(size + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    vector = raw[start : start + size]
    vector[:] = value
    return vector


def copies(bytes_: int, threads: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Return ways to move a vector of this many bytes: name -> (function, bytes read and written).

    Adding in place is not a limit. It shows that two reads and one write are faster per byte than one read and one
    write.
    """
    size = bytes_ // 4 // (16 * threads) * 16 * threads
    source, target = aligned(size), aligned(size, 0.0)
    traffic = 4.0 * size
    return {
        "copy": (lambda: _copy(source, target, threads), 2 * traffic),
        "copy, stores bypass the caches": (lambda: _copy_past_caches(source, target, threads), 2 * traffic),
        "NumPy's copyto, one thread": (lambda: np.copyto(target, source), 2 * traffic),
        IN_PLACE: (lambda: _in_place(source, target, threads), 3 * traffic),
    }


# -- the report ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the properties of this machine on which the results depend."""
    name = platform.processor() or platform.machine()
    try:
        fields = processor()
        name = f"{fields['model name']}, family {fields['cpu family']} model {fields['model']}"
    except (OSError, KeyError, ValueError):
        pass  # not Linux, or not x86
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads(),
        "isa": isa() or "the CPU's own",
        "vector": f"{8 * VECTOR_BYTES} bits",
        **{name: version(name) for name in ("numpy", "numba")},
    }


class Report:
    """Prints each table when it is measured, and all rows at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.threads:
            set_threads(args.threads)
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.1 if args.quick else 1.0
        self.threads = threads()
        self.machine = machine()
        print(", ".join(f"{key} {value}" for key, value in self.machine.items()), flush=True)

    def alternate(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
        """Call `alternate` for 1 s per function (--quick: 0.1 s)."""
        return alternate(functions, self.seconds * len(functions))

    def peak_of(self, threads: int) -> float:
        """Measure the GFLOP/s of multiply-adds on registers with this number of threads."""
        loop, flops = peak_loop(threads)
        return flops / self.alternate({"peak": loop})["peak"].median / 1e9

    def streaming(self, bytes_: int) -> float:
        """Measure GB/s (read and written) of the fastest copy of a vector of this size; print the rate of each way."""
        ways = copies(bytes_, self.threads)
        times = self.alternate({name: function for name, (function, _) in ways.items()})
        rates = {name: traffic / times[name].median / 1e9 for name, (_, traffic) in ways.items()}
        print(f"GB/s at {bytes_ / 1e6:.1f} MB: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
        return max(rate for name, rate in rates.items() if name != IN_PLACE)

    def ladder(
        self,
        title: str,
        functions: Mapping[str, Callable[[], object]],
        flops: float = 0.0,
        traffic: float = 0.0,
        bytes_: int = SMALL,
    ) -> dict[str, float]:
        """Measure the functions, alternating with the machine's limit. Return each function's percentage of the limit.

        Prints a table. Give either flops or traffic. flops: floating-point operations per call; the limit is the loop
        on registers. traffic: bytes read and written per call; the limit is the fastest copy of `bytes_` bytes.
        """
        limits = copies(bytes_, self.threads) if traffic else {"registers only": peak_loop(self.threads)}
        limits = {f"({name})": limit for name, limit in limits.items() if name != IN_PLACE}
        times = self.alternate({**functions, **{name: loop for name, (loop, _) in limits.items()}})
        unit = "GFLOP/s" if flops else "GB/s"
        rates = {name: (flops or traffic) / times[name].median / 1e9 for name in functions}
        rates |= {name: work / times[name].median / 1e9 for name, (_, work) in limits.items()}
        limit = max(rates[name] for name in limits)
        print(f"\n{title}\n{'':<40}{'ms':>10}{'best':>10}{'spread':>8}{unit:>10}{'of limit':>10}")
        for name, each in times.items():
            if name in limits and rates[name] < limit:
                continue
            timing = f"{1e3 * each.median:>10.4g}{1e3 * each.best:>10.4g}{each.spread:>8.0%}"
            print(f"{name:<40}{timing}{rates[name]:>10.1f}{rates[name] / limit:>10.1%}", flush=True)
        return {name: 100 * rates[name] / limit for name in functions}

    def row(self, name: str, value: float, unit: str, goal: str = "") -> None:
        """Add a row to the result, with 4 significant digits."""
        self.rows.append({"name": name, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal})

    def finish(self) -> None:
        """Print the rows; with --json, also print them as one line of JSON."""
        print()
        for row in self.rows:
            goal = row["goal"] and f"goal {row['goal']}"
            print(f"{row['name']:<44}{row['value']:>10.4g} {row['unit']:<14} {goal}")
        if self.args.json:
            print(json.dumps({"rows": self.rows, "machine": self.machine}))


def main() -> None:
    """Measure the limits of this machine."""
    report = Report(arguments("The limits of this machine, as the other benchmarks measure them.").parse_args())
    for count in sorted({1, report.threads}):
        report.row(f"peak-{count}-threads", report.peak_of(count), "GFLOP/s")
    report.row("copy-2.7MB", report.streaming(SMALL), "GB/s")
    report.row("copy-256MB", report.streaming(LARGE), "GB/s")
    report.finish()


if __name__ == "__main__":
    main()
