"""Prints the tables of the lessons' GPU ladders: facts from machine code and emulation, and predicted limits.

    python tests/cuda/facts.py matmul

ladders.py has the steps and their arguments. Two figures are for A100 and H100 (compute capability 8.0 and 9.0).
FFMA: share of multiply-adds among the instructions of the main loop. Wavefronts: for each load from shared memory.
Bytes: sectors of global memory that the warps request, over the bytes of the matrices. The limit is a share of the
GPU's highest multiply-add rate. It is PREDICTED from the main loop, not measured. The slowest of three units sets it:

- An SM quarter starts an instruction per cycle. One whose three operands lie in one bank of registers takes two.
- Its FP32 units need 32 / lanes cycles for a multiply-add of a warp.
- The four quarters share one memory, which is shared memory and first-level cache. It delivers a wavefront of shared
  memory, or four sectors of global memory, per cycle.

Latencies, the second-level cache and DRAM are not part of it, nor SMs without work at the end.

For kernels that wait for memory, the limit is a share of the rate of the GPU's memory. It is PREDICTED, too: the time
in which memory transfers each byte once, over the longer of two times: that in which it transfers all sectors that
warps request, as if no cache kept any, and that in which an SM starts all instructions that its warps execute (of PTX).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from emulator import Emulator
from emulator.counts import SECTOR, Cost, Counts
from ladders import LADDERS, OF_MEMORY
from sass import Sass, read

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of

LANES = {(8, 0): 16, (9, 0): 32}  # FP32 units of an SM quarter: A100, H100
WARP, QUARTERS, SECTORS = 32, 4, 4  # of an SM; per cycle
CACHED = 64  # smaller arrays than this part of all bytes stay in the caches, and are not counted
RATES = {(8, 0): 1555 / 108 / 1.41, (9, 0): 3350 / 132 / 1.7}  # bytes of memory per cycle and SM: GB/s, SMs, GHz


@dataclass(frozen=True)
class Facts:
    code: list[Sass]  # for each GPU
    loads: float  # wavefronts per load from shared memory
    stores: float  # wavefronts per store or copy to shared memory
    sectors: float  # per load from global memory
    of_most: float  # the same, for those loads that load most
    bytes_ratio: float
    threads: int  # of the largest kernel
    bits: int  # of the loads from global memory that load most
    starts: float  # instructions that a warp executes, for each byte that must be transferred

    def limit(self, sass: Sass) -> float:
        """Return the predicted share of the GPU's multiply-add rate."""
        names = Counter(operation.base for operation in sass.main_loop())
        pipe = names["FFMA"] * WARP / LANES[sass.cc]
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
        """For kernels that wait for memory."""
        registers = " / ".join(dict.fromkeys(str(sass.compiled.registers) for sass in self.code))
        limits = (1 / max(1, self.bytes_ratio, self.starts / QUARTERS * rate) for rate in RATES.values())
        limit = " / ".join(dict.fromkeys(f"{100 * limit:.0f}%" for limit in limits))
        first = f"{self.threads} | {self.bits} | {self.of_most:.0f} | {self.bytes_ratio:.2f}"
        return f"{first} | {WARP * self.starts:.1f} | {registers} | {limit}"


def facts(step: Callable[..., None], arguments: tuple[Any, ...], moved: int = 0) -> Facts:
    """Run a step of a ladder on the emulator, and read its machine code.

    moved: bytes that must be transferred, if they are not those of all arrays
    """
    code: list[Sass] = []
    counts: list[Counts] = []  # of each launch
    threads, units = [], 0
    reads: dict[int, Cost] = defaultdict(Cost)  # bytes per thread: loads from large arrays
    moved = moved or sum(a.nbytes for a in arguments if isinstance(a, np.ndarray))

    def launcher(kernel: Kernel, grid: Grid, values: tuple[Any, ...]) -> None:
        nonlocal units
        if not code:  # the other kernels only add parts of sums
            code.extend(read(kernel, types_of(values), cc) for cc in LANES)
        threads.append(grid[0] * grid[1] * grid[2] * kernel.threads)
        emulator = Emulator(fuse=False, counting=True)
        emulator(kernel, grid, values)
        assert emulator.counts is not None
        counts.append(emulator.counts)
        arrays = [a for a in values if isinstance(a, np.ndarray) and a.ndim]
        large = {f"argument {i}" for i, array in enumerate(arrays) if CACHED * array.nbytes >= moved}
        for (_, array, does, nbytes), cost in emulator.counts.costs.items():
            if array in large:
                units += cost.units
                if does == "read":
                    reads[nbytes].requests += cost.requests
                    reads[nbytes].units += cost.units

    with launch_with(launcher):
        step(*arguments)
    loads, stores = ([cost for c in counts for cost in c.shared(does).values()] for does in ("read", "written"))
    most = max(reads, key=lambda nbytes: nbytes * reads[nbytes].requests)
    starts = sum(c.instructions for c in counts) / moved
    every, of_most, ratio = _mean(reads.values()), _mean([reads[most]]), SECTOR * units / moved
    return Facts(code, _mean(loads), _mean(stores), every, of_most, ratio, max(threads), 8 * most, starts)


def _mean(costs: Iterable[Cost]) -> float:
    """Return the wavefronts or sectors per access of a warp."""
    costs = list(costs)
    return sum(cost.units for cost in costs) / max(1, sum(cost.requests for cost in costs))


COLUMNS = "FFMA", "loads of shared memory, bits", "registers", "spills", "wavefronts", "bytes", "predicted limit"
COLUMNS_OF_MEMORY = (
    "threads", "bits per load", "sectors per load", "bytes", "instructions per byte", "registers", "predicted limit",
)  # fmt: skip


def waits_for_memory(family: str) -> bool:
    return family in OF_MEMORY or family == "winograd"


def row(family: str, name: str, step: Callable[..., None], arguments: tuple[Any, ...], moved: int) -> str:
    """Return the line of a table."""
    found = facts(step, arguments, moved)
    return f"| {name} | {found.row_of_memory() if waits_for_memory(family) else found.row()} |"


def main() -> None:
    family = sys.argv[1]
    columns = COLUMNS_OF_MEMORY if waits_for_memory(family) else COLUMNS
    print("| step | " + " | ".join(columns) + " |\n|" + " --- |" * (1 + len(columns)))
    for case in LADDERS[family]():
        print(row(family, *case), flush=True)


if __name__ == "__main__":
    main()
