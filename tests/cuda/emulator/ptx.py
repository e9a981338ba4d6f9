"""Parses PTX, the assembly language that Numba generates, into basic blocks of instructions.

The language is described in NVIDIA's "Parallel Thread Execution ISA". This parser knows what Numba and the instructions
of minidl/engine/cuda_memory.py generate: one kernel, whose calls calls.py replaces, no local memory, no constants in
memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from .calls import inline

TYPES = {
    "pred": np.bool_, "f32": np.float32, "f64": np.float64,
    **{f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}").type
       for letter, kind in (("u", "u"), ("b", "u"), ("s", "i")) for bits in (8, 16, 32, 64)},
}  # fmt: skip
REGISTERS = {  # the prefix of a register's name -> the type in which the emulator keeps it
    "%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64, "%f": np.float32, "%fd": np.float64,
    "%temp": np.uint32,  # a result that nothing uses
}  # fmt: skip
ENDS_BLOCK = {"bra", "bar", "ret", "exit"}

LABEL = re.compile(r"(\$?\w+):")
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z]\w*(?:[.:]+\w+)*)\s*([^;]*);")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")
PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(\w+)")
SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\]")


class Unsupported(Exception):
    """PTX that the emulator does not know. The message names it."""


@dataclass(frozen=True)
class Instruction:
    line: int  # of the PTX
    guard: str  # the predicate register that decides whether the instruction is executed, or ""
    negated: bool  # executed if the guard is false
    name: str  # ld.global.v4.f32
    operands: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def base(self) -> str:
        return self.parts[0]


@dataclass
class Program:
    """blocks: basic blocks; a jump leads to the beginning of a block. labels: {label: number of the block}."""

    parameters: dict[str, tuple[int, type]]  # name -> (position, type)
    shared: dict[str, int]  # name of a shared array -> its address
    shared_bytes: int
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str, dynamic_shared: int = 0) -> Program:
    """Parse one kernel. dynamic_shared: bytes of the shared array whose size the launch determines."""
    ptx = inline(ptx)
    _, _, body = ptx.partition(".visible .entry")
    head, _, _ = body.partition("{")
    if ".local" in body:
        raise Unsupported("local memory: an array of the kernel does not fit into registers")
    found = PARAMETER.findall(head)
    parameters = {name: (i, TYPES[kind]) for i, (kind, name) in enumerate(found)}
    shared, end = {}, 0
    for align, name, size in SHARED.findall(ptx):
        end += -end % int(align)
        shared[name] = end
        end += int(size) if size else dynamic_shared
    program = Program(parameters, shared, end)
    inside = False
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        inside = inside or text == "{"
        if inside:
            _parse_line(program, number, text)
    if not program.blocks[-1]:
        program.blocks.pop()
    return program


def _parse_line(program: Program, number: int, text: str) -> None:
    if label := LABEL.fullmatch(text):
        if program.blocks[-1]:
            program.blocks.append([])
        program.labels[label[1]] = len(program.blocks) - 1
    elif text.startswith(".") or text in ("{", "}", ""):
        return
    elif match := INSTRUCTION.fullmatch(text):
        negated, guard, name, operands = match.groups()
        split = tuple(stripped for part in OPERAND.findall(operands) if (stripped := part.strip()))
        instruction = Instruction(number, guard or "", bool(negated), name.replace("::", "."), split)
        program.blocks[-1].append(instruction)
        if instruction.base in ENDS_BLOCK:
            program.blocks.append([])
    else:
        raise Unsupported(f"PTX line {number}: {text}")


def registers_in(operand: str) -> list[str]:
    """Return the operands within {braces} or [brackets], or the operand itself."""
    return [part.strip() for part in operand.strip("{}[]").split(",")]


def register_type(name: str) -> type:
    """Return the type in which the emulator keeps this register."""
    match = re.fullmatch(r"(%[a-z]+)\d*", name)
    if match is None or match[1] not in REGISTERS:
        raise Unsupported(f"register {name}")
    return REGISTERS[match[1]]
