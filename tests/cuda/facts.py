"""Prints the tables of the lessons' GPU ladders: facts from machine code and emulation, and predicted limits.

    python tests/cuda/facts.py matmul

Two figures are for A100 and H100 (compute capability 8.0 and 9.0). FFMA: share of multiply-adds among the instructions
of the main loop. Wavefronts: for each load from shared memory. Bytes: sectors of global memory that the warps request,
over the bytes of the matrices. The limit is a share of the GPU's highest multiply-add rate. It is PREDICTED from the
main loop, not measured. The slowest of three units sets it:

- An SM quarter starts an instruction per cycle. One whose three operands lie in one bank of registers takes two.
- Its FP32 units need 32 / lanes cycles for a multiply-add of a warp.
- The four quarters share one memory, which is shared memory and first-level cache. It delivers a wavefront of shared
  memory, or four sectors of global memory, per cycle.

Latencies, the second-level cache and DRAM are not part of it, nor SMs without work at the end.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from emulator import Emulator
from emulator.counts import Cost
from sass import Sass, read

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.engine.device import aligned

LANES = {(8, 0): 16, (9, 0): 32}  # FP32 units of an SM quarter: A100, H100
QUARTERS, SECTORS = 4, 4  # of an SM; per cycle


@dataclass(frozen=True)
class Facts:
    code: list[Sass]  # for each GPU
    loads: float  # wavefronts per load from shared memory
    stores: float  # wavefronts per store or copy to shared memory
    sectors: float  # per access to global memory
    bytes_ratio: float
    threads: int  # of the largest kernel
    bits: int  # of the widest load from global memory

    def limit(self, sass: Sass) -> float:
        """Return the predicted share of the GPU's multiply-add rate."""
        names = Counter(operation.base for operation in sass.main_loop())
        pipe = names["FFMA"] * 32 / LANES[sass.cc]
        starts = names.total() + sass.register_conflicts()
        loads, stores = sass.widths("LDS").total(), names["STS"] + names["LDGSTS"]
        sectors = (names["LDG"] + names["LDGSTS"]) * self.sectors
        memory = QUARTERS * (loads * self.loads + stores * self.stores + sectors / SECTORS)
        return pipe / max(pipe, starts, memory) if pipe else 0.0

    def row(self) -> str:
        def each(describe: Callable[[Sass], str]) -> str:
            return " / ".join(dict.fromkeys(describe(sass) for sass in self.code))  # once if they are the same

        cells = (
            each(lambda sass: f"{100 * sass.share():.1f}%"),
            each(lambda sass: ", ".join(f"{n} x {bits}" for bits, n in sorted(sass.widths("LDS").items())) or "none"),
            each(lambda sass: str(sass.compiled.registers)),
            each(lambda sass: str(sass.compiled.spills)),
            f"{self.loads:.1f}",
            f"{self.bytes_ratio:.1f}",
            each(lambda sass: f"{100 * self.limit(sass):.0f}%"),
        )
        return " | ".join(cells)

    def row_of_memory(self) -> str:
        """For kernels that wait for memory. Registers are those of both GPUs."""
        registers = " / ".join(dict.fromkeys(str(sass.compiled.registers) for sass in self.code))
        return f"{self.threads} | {self.bits} | {self.sectors:.0f} | {self.bytes_ratio:.2f} | {registers}"


def facts(step: Callable[..., None], arguments: tuple[Any, ...]) -> Facts:
    """Run a step of a ladder on the emulator, and read its machine code."""
    code: list[Sass] = []
    threads: list[int] = []
    emulator = Emulator(fuse=False, counting=True)

    def launcher(kernel: Kernel, grid: Grid, values: tuple[Any, ...]) -> None:
        if not code:  # a second kernel only adds parts of sums
            code.extend(read(kernel, types_of(values), cc) for cc in LANES)
        threads.append(grid[0] * grid[1] * grid[2] * kernel.threads)
        emulator(kernel, grid, values)

    with launch_with(launcher):
        step(*arguments)
    assert emulator.counts is not None
    counts = emulator.counts
    loads, stores = counts.shared("read").values(), counts.shared("written").values()
    of_global = {key: cost for key, cost in counts.costs.items() if key[1] != "shared" and key[2] == "read"}
    reads, bits = list(of_global.values()), 8 * max(nbytes for *_, nbytes in of_global)
    ratio = counts.global_bytes() / sum(a.nbytes for a in arguments if isinstance(a, np.ndarray))
    return Facts(code, _mean(loads), _mean(stores), _mean(reads), ratio, max(threads), bits)


def _mean(costs: Iterable[Cost]) -> float:
    """Return the wavefronts or sectors per access of a warp."""
    costs = list(costs)
    return sum(cost.units for cost in costs) / max(1, sum(cost.requests for cost in costs))


Case = tuple[str, Callable[..., None], tuple[Any, ...]]  # a name, a function, its arguments


def matmul() -> Iterator[Case]:
    """Yield the steps of the ladder, then the products of cuda.py: all forms, an odd width, and narrow tiles."""
    from minidl.kernels.matmul import cuda as products
    from minidl.kernels.matmul.cuda_ladder import RUNGS

    random = np.random.default_rng(0)
    rows, depth = 256, 128

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    for name, step in RUNGS.items():
        yield name, step, (matrix(rows, depth), matrix(depth, 256), matrix(rows, 256))
    none = matrix(0)
    for columns in (256, 255, 64, 32, 16, 8):
        across, along, out = matrix(depth, columns), matrix(columns, depth), matrix(rows, columns)
        yield f"nn, {columns} columns", products.nn, (matrix(rows, depth), across, none, False, none, out)
        if columns >= 64:
            yield f"nt, {columns} columns", products.nt, (matrix(rows, depth), along, none, out)
        yield f"tn, {columns} columns", products.tn, (matrix(depth, rows), across, none, out)


def reduce() -> Iterator[Case]:
    """Yield the steps of the ladder: sums over 8192 rows of 64 columns, in parts of 256 rows."""
    from minidl.kernels.reduce.cuda_ladder import PART, RUNGS

    x, partial = aligned(32 * PART * 64, np.float32).reshape(-1, 64), aligned(32 * 64, np.float64).reshape(32, 64)
    for name, step in RUNGS.items():
        yield name, step, (x, partial)


def conv() -> Iterator[Case]:
    """Yield the steps of the ladder, then the functions of cuda.py for channels of real networks, on a small image."""
    from minidl.kernels.conv import cuda as convolutions
    from minidl.kernels.conv.cuda_ladder import RUNGS

    def array(*shape: int) -> np.ndarray:
        return aligned(math.prod(shape), np.float32).reshape(shape)

    for name, step in RUNGS.items():
        yield name, step, (array(1, 16, 8, 32), array(3, 3, 32, 128), array(1, 16, 8, 128))
    none = array(0)
    for height, channels, outputs in ((16, 128, 128), (16, 128, 127), (16, 64, 64), (32, 16, 16), (32, 3, 16)):
        x, y = array(1, height, 8, channels), array(1, height, 8, outputs)
        weight, options = array(3, 3, channels, outputs), (1, (1, 1), (1, 1), (1, 1), False)
        scratch = array(convolutions.backward_weight_scratch(x.shape, weight.shape, *options))
        name = f"{channels} -> {outputs}"
        yield f"y, {name}", convolutions.forward, (x, weight, none, none, none, none, False, *options, none, y)
        if channels > 3:
            yield f"dx, {name}", convolutions.backward_input, (y, weight, none, *options, none, x)
        yield f"dweight, {name}", convolutions.backward_weight, (x, y, *options, scratch, weight)


LADDERS = {"matmul": matmul, "conv": conv, "reduce": reduce}
COLUMNS = "FFMA", "loads of shared memory, bits", "registers", "spills", "wavefronts", "bytes", "predicted limit"
COLUMNS_OF_MEMORY = "threads", "bits per load", "sectors per load", "bytes", "registers"


def main() -> None:
    name = sys.argv[1]
    columns = COLUMNS_OF_MEMORY if name == "reduce" else COLUMNS
    print("| step | " + " | ".join(columns) + " |\n|" + " --- |" * (1 + len(columns)))
    for step_name, step, arguments in LADDERS[name]():
        found = facts(step, arguments)
        print(f"| {step_name} | {found.row() if columns is COLUMNS else found.row_of_memory()} |", flush=True)


if __name__ == "__main__":
    main()
