"""Prints the tables of the lessons' GPU ladders: facts from machine code and emulation, and predicted limits.

    python tests/cuda/facts.py matmul [8.0|9.0]

FFMA: share of multiply-adds among the instructions of the main loop. Wavefronts: for each load from shared memory.
Bytes: sectors of global memory that the warps request, over the bytes of the matrices. The limit is a share of the
GPU's highest multiply-add rate. It is PREDICTED from the main loop, not measured: an SM quarter starts one instruction
per cycle, and its FP32 units need 32 / lanes cycles for a multiply-add of a warp; the four quarters share one unit that
delivers a wavefront per cycle. Latencies, caches and DRAM are not part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from emulator import Emulator
from sass import Sass, read

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of

LANES = {(8, 0): 16, (9, 0): 32}  # FP32 units of an SM quarter: A100, H100
GPU = {(8, 0): "A100", (9, 0): "H100"}
QUARTERS = 4


@dataclass(frozen=True)
class Facts:
    sass: Sass
    wavefronts: float  # per load from shared memory
    bytes_ratio: float

    def limit(self) -> float:
        """Return the predicted share of the GPU's multiply-add rate."""
        loop = self.sass.main_loop()
        products = sum(operation.base == "FFMA" for operation in loop)
        loads = sum(operation.base == "LDS" for operation in loop)
        pipe = products * 32 / LANES[self.sass.cc]
        return pipe / max(pipe, len(loop), QUARTERS * loads * self.wavefronts) if products else 0.0

    def row(self) -> str:
        sass, widths = self.sass, self.sass.widths("LDS")
        return (
            f"{100 * sass.share():.1f}% | {' '.join(f'{n} x {bits}' for bits, n in sorted(widths.items())) or '-'} | "
            f"{sass.compiled.registers} | {sass.compiled.spills} | {self.wavefronts:.1f} | {self.bytes_ratio:.1f} | "
            f"{100 * self.limit():.0f}%"
        )


def facts(step: Callable[..., None], arrays: tuple[np.ndarray, ...], cc: tuple[int, int]) -> Facts:
    """Run a step of a ladder on the emulator, and read its machine code."""
    codes: list[Sass] = []
    emulator = Emulator(cc, fuse=False, counting=True)

    def launcher(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        codes.append(read(kernel, types_of(arguments), cc))
        emulator(kernel, grid, arguments)

    with launch_with(launcher):
        step(*arrays)
    assert emulator.counts is not None
    reads = emulator.counts.shared("read").values()
    wavefronts = sum(cost.units for cost in reads) / max(1, sum(cost.requests for cost in reads))
    return Facts(codes[0], wavefronts, emulator.counts.global_bytes() / sum(array.nbytes for array in arrays))


def matmul() -> tuple[dict[str, Any], tuple[np.ndarray, ...]]:
    from minidl.kernels.matmul.cuda_ladder import RUNGS

    random = np.random.default_rng(0)
    shapes = (256, 128), (128, 256), (256, 256)
    return RUNGS, tuple(random.standard_normal(shape, np.float32) for shape in shapes)


LADDERS = {"matmul": matmul}


def main() -> None:
    rungs, arrays = LADDERS[sys.argv[1]]()
    chosen = [tuple(int(part) for part in text.split(".")) for text in sys.argv[2:]] or list(LANES)
    for cc in chosen:
        print(f"| step ({GPU[cc]}, {cc[0]}.{cc[1]}) | FFMA | loads of shared memory, bits | registers | spills | "
              "wavefronts | bytes | predicted limit |")  # fmt: skip
        print("|" + " --- |" * 8)
        for name, step in rungs.items():
            print(f"| {name} | {facts(step, arrays, cc).row()} |", flush=True)


if __name__ == "__main__":
    main()
