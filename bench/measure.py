"""How the benches measure: alternating runs, the machine's own limits, and one form of output.

    report = measure.Report(measure.arguments(__doc__).parse_args())    # --quick, --json, --threads; says which machine
    share = report.ladder("GEMM 512", {"naive loops": f, "tiles": g}, flops=2 * 512**3)      # prints a table
    report.row("gemm-512", share["tiles"], "% of peak", ">= 92")                             # what --json prints
    report.finish()

(`sys.path.insert(0, str(Path(__file__).parent.parent))`, then `from bench import measure`, as the other benches do.)

Machines are shared and their clocks move, so the functions that are compared take turns, and what is reported is the
median of at least ten turns. A limit is what this machine does in the same run: multiply-adds on registers, and the
fastest of several ways to copy memory.
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

from minidl.engine import jit as compiler  # before numba: it chooses the instruction set  # isort: skip

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.engine.environment import isa
from minidl.engine.jit import HAS_FMA, REGISTERS, VECTOR_BYTES, jit, parallel_jit, prange

SMALL, LARGE = 2_700_000, 256_000_000  # bytes of a vector: the MLP's weights; and more than any cache holds
TURNS = 10
IN_PLACE = "add in place"


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fraction of the time: does it run?")
    parser.add_argument("--json", action="store_true", help='the last line is one JSON object, {"rows": [...]}')
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: all cores)")
    return parser


# -- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one call, one number for each turn."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)

    @property
    def best(self) -> float:
        return min(self.turns)

    @property
    def spread(self) -> float:
        """The middle half of the turns, relative to the median."""
        low, _, high = statistics.quantiles(self.turns, n=4)
        return (high - low) / self.median


def alternate(
    functions: Mapping[str, Callable[[], object]], seconds: float = 1.0, turns: int = TURNS
) -> dict[str, Times]:
    """Time of one call of each function, taken in turns: `turns` of them, more if that takes less than `seconds`.

    A turn is as many calls as take half a millisecond, so that the clock's own cost does not show. The first calls
    (compiling, first use of memory) are not counted, nor is a short function's first call of a turn: it finds in the
    caches what the function before it left there.
    """
    calls = {}
    for name, function in functions.items():
        function()
        began = time.perf_counter()
        function()
        calls[name] = max(1, round(5e-4 / max(time.perf_counter() - began, 1e-7)))
    taken: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while len(taken[next(iter(taken))]) < turns or time.perf_counter() < end:
        for name, function in functions.items():
            if calls[name] > 1:
                function()
            began = time.perf_counter()
            for _ in range(calls[name]):
                function()
            taken[name].append((time.perf_counter() - began) / calls[name])
    return {name: Times(tuple(each)) for name, each in taken.items()}


def rungs(ladder: Mapping[str, Callable[..., object]], *arguments: Any) -> dict[str, Callable[[], object]]:
    """The steps of a kernels/<op>/ladder.py, called with these arguments."""
    return {name: partial(rung, *arguments) for name, rung in ladder.items()}


def replay(kernel: Any, *arguments: Any, calls: int = 1) -> Callable[[], object]:
    """A function that makes so many calls of a kernel as a recorded step makes them: without Python in between."""
    from minidl.program import call as machine

    signature = tuple(machine.numba_type(value) for value in arguments)
    words = [machine.kernel_address(kernel, signature)]
    for value in arguments:
        at = len(words)
        words += machine.slots(value)
        if isinstance(value, np.ndarray):
            words[at + machine.DATA] = value.ctypes.data
    block = np.array(words, np.int64)
    table = np.full((calls, 2), (machine.entry_address(signature), block.ctypes.data), np.int64)

    def run(kept: Any = (block, arguments)) -> None:
        machine.run(table, 0, calls)

    return run


# -- the machine's limits ------------------------------------------------------------------------------------------

LANES = VECTOR_BYTES // 4  # float32 in a vector register
SUMS = 16 if REGISTERS == 32 else 14  # that do not depend on each other, and leave registers for x and y
PEAK_STEPS = 50_000
_vector = ir.VectorType(ir.FloatType(), LANES)


def _array_data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


@intrinsic
def _multiply_adds(typing: Any, numbers: Any, steps: Any) -> Any:
    """SUMS vectors, each s <- x y + s, `steps` times, on registers alone. numbers: (2 LANES,) x and y; gets a sum."""

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
    """Copy `vectors` vectors from element `first` on with stores that pass the caches by; target + first is aligned."""

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
def _copy_part(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(target.size):
        target[i] = source[i]


@parallel_jit
def _copy(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    size = target.size // parts
    for part in prange(parts):
        begin = np.int64(part) * size
        _copy_part(source[begin : begin + size], target[begin : begin + size])


@parallel_jit
def _copy_past_caches(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    vectors = target.size // LANES // parts
    for part in prange(parts):
        _stream(source, target, np.int64(part) * vectors * LANES, vectors)


@parallel_jit
def _in_place(source: np.ndarray, target: np.ndarray, parts: int) -> None:
    """Reads two and writes one: no line is fetched only to be overwritten."""
    size = target.size // parts
    for part in prange(parts):
        begin = np.int64(part) * size
        _add_part(source[begin : begin + size], target[begin : begin + size])


@jit
def _add_part(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(target.size):
        target[i] += source[i]


def peak_loop(threads: int) -> tuple[Callable[[], object], float]:
    """(a function that does nothing but multiply-adds on all these threads, how many operations it does)"""
    numbers = np.full((threads, 2 * LANES), 1e-3, np.float32)
    return lambda: _peak(numbers, PEAK_STEPS), 2.0 * threads * PEAK_STEPS * SUMS * LANES


def aligned(size: int, value: float = 1.0) -> np.ndarray:
    """A float32 vector that begins on a cache line, its memory already touched."""
    raw = np.empty(size + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    vector = raw[start : start + size]
    vector[:] = value
    return vector


def copies(bytes_: int, threads: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Ways to move a vector of that many bytes: name -> (function, bytes read and written).

    Adding in place is no copy, and no limit: it is here because it shows that reading twice and writing once moves
    more bytes than reading once and writing once.
    """
    size = bytes_ // 4 // (16 * threads) * 16 * threads
    source, target = aligned(size), aligned(size, 0.0)
    traffic = 4.0 * size
    return {
        "copy": (lambda: _copy(source, target, threads), 2 * traffic),
        "copy, stores past the caches": (lambda: _copy_past_caches(source, target, threads), 2 * traffic),
        "NumPy's copyto, one thread": (lambda: np.copyto(target, source), 2 * traffic),
        IN_PLACE: (lambda: _in_place(source, target, threads), 3 * traffic),
    }


# -- the report ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What figures depend on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            facts = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
        facts = {key.strip(): value.strip() for key, value in facts.items()}
        name = f"{facts['model name']}, family {facts['cpu family']} model {facts['model']}"
    except (OSError, KeyError, ValueError):
        pass  # not Linux, or not x86
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": compiler.threads(),
        "isa": isa() or "the CPU's own",
        "vector": f"{8 * VECTOR_BYTES} bits",
        **{name: version(name) for name in ("numpy", "numba")},
    }


class Report:
    """Prints tables as they come, and rows at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.threads:
            compiler.set_threads(args.threads)
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.1 if args.quick else 1.0
        self.threads = compiler.threads()
        self.machine = machine()
        print(", ".join(f"{key} {value}" for key, value in self.machine.items()), flush=True)

    def alternate(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
        return alternate(functions, self.seconds * len(functions))

    def peak_of(self, threads: int) -> float:
        """GFLOP/s of multiply-adds on registers."""
        loop, flops = peak_loop(threads)
        return flops / self.alternate({"peak": loop})["peak"].median / 1e9

    def streaming(self, bytes_: int) -> float:
        """GB/s, read and written, of the fastest copy of a vector of so many bytes."""
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
        """Times the functions in turns with the limit of the machine, prints a line for each; per cent of that limit.

        flops: floating-point operations of one call; the limit is the loop on registers. Or traffic: bytes that one
        call reads and writes; the limit is the fastest copy of a vector of `bytes_` bytes.
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
        self.rows.append({"name": name, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal})

    def finish(self) -> None:
        """Print the rows, and for --json the one line that holds them."""
        print()
        for row in self.rows:
            goal = row["goal"] and f"goal {row['goal']}"
            print(f"{row['name']:<44}{row['value']:>10.4g} {row['unit']:<14}{goal}")
        if self.args.json:
            print(json.dumps({"rows": self.rows, "machine": self.machine}))


def main() -> None:
    """The limits of this machine."""
    report = Report(arguments("The machine's limits, as the other benches measure them.").parse_args())
    for threads in sorted({1, report.threads}):
        report.row(f"peak-{threads}-threads", report.peak_of(threads), "GFLOP/s")
    report.row("copy-2.7MB", report.streaming(SMALL), "GB/s")
    report.row("copy-256MB", report.streaming(LARGE), "GB/s")
    report.finish()


if __name__ == "__main__":
    main()
