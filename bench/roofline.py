"""Which limit holds for each kernel of a training step: arithmetic, a cache, memory, or the start of threads.

    python bench/roofline.py                                  MLP, LeNet, VGG, ResNet-20
    python bench/roofline.py resnet20 --batch 128 --calls     one model; every call in order, with its shapes
    python bench/roofline.py mlp --batch 1 --predict          the forward pass of `minidl.Prediction`

The roofline model (Williams, Waterman, Patterson 2009, "Roofline: An insightful visual performance model for multicore
architectures") takes two numbers of a kernel, its multiply-adds and its bytes, and two numbers of a machine, its
multiply-adds per second and its bytes per second. The kernel takes at least

    max(multiply-adds / rate of multiply-adds,  bytes / rate of bytes)   seconds.

Here the second term exists four times: once for L1, L2, L3 and memory, with the bytes that come from this level or from
beyond it. The terms are not added, because a core computes and loads at the same time.

An example that one can check by hand: the second layer of the MLP, out (128, 512) = a (128, 512) @ b (512, 512), on
vectors (on AMX, with MINIDL_ISA=avx512).

    multiply-adds   128 * 512 * 512                                    33.6 million
    L1              22 x 8 = 176 tiles of 6 rows and 64 columns; for each of 512 products a tile loads 64 numbers of b
                    and 6 of a: 176 * 512 * 70 * 4 bytes                             = 25.2 MB
    L2              two panels of b, 512 * 64 * 4 = 128 KiB, do not fit into an L1 of 48 KiB. So all tiles read b from
                    L2, and each pair of panels reads a: (22 * 512 * 512 + 8 * 128 * 512) * 4 = 25.2 MB, and packing
    memory          at most a, b and out: (128 * 512 + 512 * 512 + 128 * 512) * 4    = 1.6 MB

Two cores that make 60 billion multiply-adds per second need 0.56 ms for the first line. If they read 200 GB/s from L2,
the third line needs 0.13 ms: the arithmetic is the limit. With 8 rows instead of 128, the multiply-adds shrink to a
16th, but b has still 1 MB. From a memory of 20 GB/s it takes 0.05 ms, longer than the multiply-adds, 0.035 ms. So
products of few rows wait for memory. The ratio that decides is the intensity: here 33.6 / 1.6 = 21 multiply-adds per
byte, against 60 / 20 = 3 that the machine can do while a byte arrives. ReLU has 0: a kernel without products waits for
memory or, if its vectors are in a cache, for this cache.

traffic.py computes multiply-adds and bytes from shapes and block sizes. rates.py measures the rates, on one thread and
on all. A bound is the smaller of two: on one thread; on all of them, after the start of a parallel loop. The measured
time is the shortest of --repeat steps, in which each call is timed separately: their sum is usually a bit less than the
time of any step. The share is the bound divided by the measured time. A share above 100% means that the model has too
much traffic, for example because a cache keeps more than the bytes that were used last.

The last line compares with the CPU's counters, if `perf` can read them. The optimizer's update is not in the table.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from bench.rates import LEVELS, MEMORY, Rates, describe, measure_rates
from bench.traffic import Work, step
from minidl import models, nn, ops
from minidl.engine import jit
from minidl.program.call import run
from minidl.program.replay import Gradient, Prediction
from minidl.program.table import Operand, Program

SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1)}  # of images; (32, 32, 3) for the other models
BATCHES = {"mlp": 128, "lenet": 64, "vgg": 64, "resnet20": 128}
STARTS = "start of threads"
ARITHMETIC = "multiply-adds"
TILES = "multiply-adds on AMX"
EVENTS = {"instructions": "instructions", "L1-dcache-load-misses": "loads missed L1", "cache-misses": "missed L3"}


class Bound(NamedTuple):
    """The least seconds of a call, the limit that holds, and the number of threads that reach it."""

    seconds: float
    limit: str
    threads: int


def seconds_of(work: Work, rates: Rates) -> dict[str, float]:
    """Return the least seconds that each limit allows, with the threads of `rates`."""
    tiles = work.on_amx and rates.tiles > 0
    found = {TILES if tiles else ARITHMETIC: work.multiply_adds / (rates.tiles if tiles else rates.fma)}
    for level, name in enumerate(LEVELS):
        if level < MEMORY and not rates.capacity[level]:
            continue
        read, written = work.beyond(rates.capacity[level - 1] if level else -1)
        copied = min(read, written)  # a byte that is read for each one that is written, as in a copy
        rest = read + written - 2 * copied
        found[name] = 2 * copied / rates.copy[level] + rest / rates.read[level]
    return found


def bound(works: Sequence[Work], rates: Sequence[Rates]) -> Bound:
    """Return the smallest bound of a call. works, rates: for each number of threads to choose from."""
    found = []
    for work, each in zip(works, rates, strict=True):
        limits = seconds_of(work, each)
        limit = max(limits, key=limits.__getitem__)
        start = each.start if each.threads > 1 else 0.0
        found.append(Bound(limits[limit] + start, STARTS if start > limits[limit] else limit, each.threads))
    return min(found)


class Line(NamedTuple):
    """A call of the step. work: with all threads. seconds: as measured."""

    name: str
    shapes: str
    work: Work
    bound: Bound
    seconds: float


def build(model: str, batch: int, predict: bool) -> tuple[Program, Callable[[], object]]:
    """Return the program of a step or prediction that has run once, and a function that runs it."""
    nn.seed(0)
    shape = SHAPES.get(model, (32, 32, 3))
    net = models.build(model, shape, 10)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((batch, *shape)).astype(np.float32), rng.integers(10, size=batch)
    nn.fit_whitening(net, x)
    if predict:
        prediction = Prediction(net)
        whole: Callable[[], object] = lambda: prediction(x)  # noqa: E731
        programs = prediction.programs
    else:
        gradient = Gradient(net, ops.cross_entropy)
        whole, programs = lambda: gradient(x, y), gradient.programs
    whole()
    (program,) = programs.values()
    return program, whole


def time_calls(program: Program, repeat: int) -> np.ndarray:
    """Return the shortest seconds of each call of a program that has run."""
    best = np.full(len(program.calls), np.inf)
    for _ in range(repeat):
        for i in range(len(program.calls)):
            start = time.perf_counter()
            run(program.table, i, i + 1)
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def lines_of(program: Program, rates: Sequence[Rates], repeat: int) -> list[Line]:
    works = [step(program.calls, program.arguments, each.threads) for each in rates]
    found = []
    for i, (name, seconds) in enumerate(zip(program.calls, time_calls(program, repeat), strict=True)):
        arrays = [value for value in program.arguments[i].values() if isinstance(value, Operand) and value.nbytes]
        shapes = " ".join("x".join(map(str, operand.shape)) for operand in arrays)
        mine = [work[i] for work in works]
        found.append(Line(name, shapes, mine[-1], bound(mine, rates), float(seconds)))
    return found


HEAD = f"{'ms':>9} {'bound':>8} {'share':>6}  {'limit':<20}{'M mult-adds':>12}" + "".join(
    f"{name + ' MB':>10}" for name in LEVELS
)


def text(lines: Sequence[Line], rates: Rates, label: str) -> str:
    """Return a row of the table for one call or for several of the same kernel."""
    measured, least = sum(line.seconds for line in lines), sum(line.bound.seconds for line in lines)
    limits: dict[str, float] = defaultdict(float)
    for line in lines:
        limits[f"{line.bound.limit} ({line.bound.threads})"] += line.bound.seconds
    limit = max(limits, key=limits.__getitem__)
    sizes = [-1, *rates.capacity]
    moved = [sum(sum(line.work.beyond(size)) for line in lines) / 1e6 for size in sizes]
    products = sum(line.work.multiply_adds for line in lines) / 1e6
    numbers = f"{products:>12.2f}" + "".join(f"{each:>10.2f}" for each in moved)
    return f"{measured * 1e3:>9.3f} {least * 1e3:>8.3f} {least / measured:>6.0%}  {limit:<20}{numbers}  {label}"


def table(lines: Sequence[Line], rates: Rates, every: bool) -> list[str]:
    """Return the rows of the table: each call, or each kernel with the longest first. The last row is the sum."""
    kernels: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        kernels[line.name].append(line)
    if every:
        rows = [text([line], rates, f"{line.name} {line.shapes}") for line in lines]
    else:
        ordered = sorted(kernels.items(), key=lambda item: -sum(line.seconds for line in item[1]))
        rows = [text(some, rates, f"{len(some)} x {name}") for name, some in ordered]
    return [*rows, text(lines, rates, "in total")]


def counters(whole: Callable[[], object], seconds: float) -> str:
    """Run a step for some seconds under `perf stat`; return what it counted per step, or why it could not count."""
    if not shutil.which("perf"):
        return "perf is not installed: no counters"
    command = ["perf", "stat", "-x", ";", "-e", ",".join(EVENTS), "-p", str(os.getpid())]
    perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.2)  # perf needs a moment to attach
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        whole()
        steps += 1
    perf.send_signal(signal.SIGINT)
    try:
        _, printed = perf.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        perf.kill()
        return "perf did not end: no counters"
    return counted(printed, steps)


def counted(printed: str, steps: int) -> str:
    """Return the counters that `perf stat -x ';'` printed, per step."""
    found = []
    for line in printed.splitlines():
        fields = line.split(";")
        if len(fields) > 2 and fields[2] in EVENTS and fields[0].isdigit():
            found.append(f"{EVENTS[fields[2]]} {int(fields[0]) / steps:.4g}")
    return f"perf, per step: {', '.join(found)}" if found else "perf cannot read this machine's counters"


def disturbed(rates: Sequence[Rates]) -> bool:
    """Return whether all threads together compute less than 3/4 of what as many single ones would."""
    return rates[-1].fma < 0.75 * rates[-1].threads / rates[0].threads * rates[0].fma


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("models", nargs="*", default=list(BATCHES), help=f"default: {', '.join(BATCHES)}")
    parser.add_argument("--batch", type=int, help="images (default: 64 for LeNet and VGG, 128 for the others)")
    parser.add_argument("--predict", action="store_true", help="a forward pass in evaluation mode")
    parser.add_argument("--calls", action="store_true", help="every call in order, instead of one line per kernel")
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    report = measure.Report(args)
    report.seconds /= 4  # for each of 18 rates
    rates = [measure_rates(report, threads) for threads in sorted({1, report.threads})]
    jit.set_threads(report.threads)
    print("\n".join(describe(each) for each in rates))
    if disturbed(rates):
        report.machine["disturbed"] = True
        print("Other processes use these cores: all threads compute less than they should. The shares below are wrong.")
    for model in args.models:
        batch = args.batch or BATCHES.get(model, 128)
        program, whole = build(model, batch, args.predict)
        lines = lines_of(program, rates, 3 if args.quick else args.repeat)
        kind = "prediction" if args.predict else "step"
        print(f"\n{model}, batch {batch}, {kind}; workspace {program.workspace_size / 2**20:.1f} MiB\n{HEAD}")
        print("\n".join(table(lines, rates[-1], args.calls)), flush=True)
        print(counters(whole, 4 * report.seconds), flush=True)
        add_rows(report, f"roofline-{model}-b{batch}{'-predict' if args.predict else ''}", lines)
    report.finish()


def add_rows(report: measure.Report, name: str, lines: Sequence[Line]) -> None:
    """Add the share of the whole step, and of each kernel that takes at least 2% of it."""
    whole = sum(line.seconds for line in lines)
    kernels: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        kernels[line.name].append(line)
    for kernel, some in [("", list(lines)), *kernels.items()]:
        measured, least = (sum(numbers) for numbers in zip(*((line.seconds, line.bound.seconds) for line in some)))
        if measured >= 0.02 * whole:
            report.row(f"{name}-{kernel}" if kernel else name, 100 * least / measured, "% of bound")


if __name__ == "__main__":
    main()
