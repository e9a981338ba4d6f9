"""Speed of the norms of a vector's movement, relative to one read of both vectors.

    python bench/bench_drift.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from minidl.engine.jit import VECTOR_BYTES, apart_jit, parallel_jit, prange
from minidl.kernels.drift import cpu, ladder
from minidl.kernels.matmul.emitter import Emitter, Sums, instructions

VECTORS = 4  # of each of x and y: independent sums, so that no addition waits for another
ROW = VECTORS * VECTOR_BYTES // 4  # elements
LAYERS = 64
READ = "(read both vectors)"


@instructions
def _read_rows(e: Emitter, x: Any, y: Any, first: Any, rows: Any, found: Any) -> None:
    """found (2 * ROW,) = the sums of the columns of x and y, added in registers: one addition for each load."""

    def add_row(sums: Sums, _: Any, row: Any) -> Sums:
        places = {v: e.builder.add(row, e.integer(v * e.lanes)) for v in range(VECTORS)}
        return {(k, v): e.builder.fadd(sums[k, v], e.load((x, y)[k], places[v])) for k, v in sums}

    for (k, v), total in e.loop(rows, [(first, ROW)], e.zeros(2, VECTORS), add_row).items():
        e.store(total, found, k * ROW + v * e.lanes)


@apart_jit
def _read_chunk(chunk: int, x: np.ndarray, y: np.ndarray, found: np.ndarray) -> None:
    rows = x.size // ROW
    first, last = rows * chunk // cpu.CHUNKS, rows * (chunk + 1) // cpu.CHUNKS
    _read_rows(x, y, first * ROW, last - first, found)


@parallel_jit
def read_both(x: np.ndarray, y: np.ndarray, found: np.ndarray) -> None:
    """found (CHUNKS, 2 * ROW) = sums of x and y: the least that a kernel can do with each number that it reads."""
    for chunk in prange(cpu.CHUNKS):
        _read_chunk(chunk, x, y, found[chunk])


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    for bytes_ in (measure.SMALL, measure.LARGE):
        where, size = f"drift, {bytes_ / 1e6:.3g} MB", bytes_ // 4 // 64 * 64
        x, before = measure.aligned(size), measure.aligned(size)
        random = np.random.default_rng(0)
        random.standard_normal(dtype=np.float32, out=before)
        x[:] = before + np.float32(0.01) * random.standard_normal(size, np.float32)
        starts, stops = np.zeros(1, np.int64), np.full(1, size)
        arguments = x, before, starts, stops, np.zeros(cpu.drift_partial(1)), np.zeros((1, 3))
        functions = measure.rungs(ladder.RUNGS, *arguments)
        functions["minidl"] = measure.replay(cpu.drift, *arguments)
        cuts = np.arange(LAYERS + 1) * size // LAYERS
        of_layers = np.zeros(cpu.drift_partial(LAYERS)), np.zeros((LAYERS, 3))
        functions[f"minidl, {LAYERS} layers"] = measure.replay(
            cpu.drift, x, before, cuts[:-1].copy(), cuts[1:].copy(), *of_layers
        )  # fmt: skip
        functions[READ] = measure.replay(read_both, x, before, np.zeros((cpu.CHUNKS, 2 * ROW), np.float32))
        shares = report.ladder(where, functions, traffic=8.0 * size, bytes_=bytes_)
        for name in functions:
            print(f"{name:<40}{shares[READ] / shares[name]:>10.2f} times one read of both vectors")
        report.row(f"{where}, times one read", shares[READ] / shares["minidl"], "x", "<= 1.3")
    report.finish()


if __name__ == "__main__":
    main()
