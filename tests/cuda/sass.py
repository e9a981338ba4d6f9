"""Reads machine code (SASS): registers, spills, and how many instructions of which kind a kernel or its main loop has.

    read(kernel, types, cc) -> Sass

nvdisasm, from the package nvidia-cuda-nvdisasm, disassembles the cubin that minidl/engine/cuda.py makes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from nvdisasm import find_nvdisasm

from minidl.engine.cuda import Compiled, Kernel, compiled

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
REGISTERS_PER_SM, THREADS_PER_SM, BLOCKS_PER_SM = 65536, 2048, 32  # compute capabilities 8.0 and 9.0
SHARED_PER_SM = {(8, 0): 164 * 1024, (9, 0): 228 * 1024}  # bytes
SHARED_OF_SYSTEM = 1024  # bytes of shared memory that each block needs in addition


@dataclass(frozen=True)
class Operation:
    name: str  # LDG.E.128
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Sass:
    kernel: Kernel
    compiled: Compiled
    cc: tuple[int, int]
    operations: list[Operation]
    loops: list[tuple[int, int]]  # (first, last) operation of each loop

    def count(self, base: str, *modifiers: str) -> int:
        """Return the number of instructions with this name and these modifiers, such as count("LDG", "128")."""
        return _count(self.operations, base, *modifiers)

    def main_loop(self, base: str = "FFMA") -> list[Operation]:
        """Return the shortest loop that has at least half as many of these instructions as any other loop."""
        bodies = [self.operations[first : last + 1] for first, last in self.loops]
        most = max((_count(body, base) for body in bodies), default=0)
        return min((body for body in bodies if 2 * _count(body, base) >= max(2, most)), key=len, default=[])

    def share(self, base: str = "FFMA") -> float:
        """Return which share of the main loop's instructions are of this kind."""
        body = self.main_loop(base)
        return _count(body, base) / len(body) if body else 0.0

    def widths(self, base: str) -> Counter[int]:
        """Return how many loads or stores of which width (bits) the main loop has, as in widths("LDS")."""
        return Counter(width(operation) for operation in self.main_loop() if operation.base == base)

    def blocks_per_sm(self) -> int:
        """Return how many blocks an SM can hold, as far as registers and shared memory limit it."""
        warps = -(-self.kernel.threads // 32)
        registers = -(-self.compiled.registers * 32 // 256) * 256 * warps
        shared = self.compiled.shared + SHARED_OF_SYSTEM
        limits = (REGISTERS_PER_SM // registers, SHARED_PER_SM[self.cc] // shared, BLOCKS_PER_SM)
        return min(*limits, THREADS_PER_SM // self.kernel.threads)


def _count(operations: list[Operation], base: str, *modifiers: str) -> int:
    return sum(o.base == base and all(m in o.name.split(".") for m in modifiers) for o in operations)


def width(operation: Operation) -> int:
    """Return the bits that one thread loads or stores."""
    return next((int(part) for part in operation.name.split(".") if part in ("8", "16", "64", "128")), 32)


@cache
def read(kernel: Kernel, signature: tuple[Any, ...], cc: tuple[int, int]) -> Sass:
    """Compile and disassemble a kernel."""
    code = compiled(kernel, signature, cc)
    operations, loops = parse(disassemble(code.cubin))
    return Sass(kernel, code, cc, operations, loops)


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout


@cache
def _nvdisasm() -> str:
    found = find_nvdisasm()
    assert found is not None, "pip install nvidia-cuda-nvdisasm"
    return found


def parse(text: str) -> tuple[list[Operation], list[tuple[int, int]]]:
    """Return the operations, and the loops: a loop lies between the target of a backward jump and the jump."""
    operations: list[Operation] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(operations)
        elif match := LINE.match(line):
            operations.append(Operation(match[2], match[3]))
    loops = []
    for i, operation in enumerate(operations):
        target = TARGET.search(operation.operands) if operation.base == "BRA" else None
        if target and labels.get(target[1], i) < i:  # an endless jump to itself follows the last instruction
            loops.append((labels[target[1]], i))
    return operations, loops
