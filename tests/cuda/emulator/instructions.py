"""What each PTX instruction does: `translate` makes a Python function of an instruction.

The function gets the state of the threads that run together (machine.py). It reads operands with `state.read`, one
element for each thread, and writes results with `state.write`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arithmetic, tensor
from .checks import KernelError
from .ptx import TYPES, Instruction, Program, Unsupported, register_type, registers_in
from .warps import ballot, check_whole, shuffle

if TYPE_CHECKING:
    from .machine import State

Action = Callable[["State"], None]
Operand = Callable[["State"], Any]

SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.([xyz])")
ADDRESS = re.compile(r"\[([\w$%.]+)(?:\s*\+\s*(-?\d+))?\]")
MMA = ("row", "col", "f32")  # a is stored by rows, b by columns; the result is float32
ALL = 0xFFFFFFFF  # threads of a warp
INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)")
FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")


def translate(program: Program, instruction: Instruction) -> Action:
    """Return a function that executes the instruction. Raises Unsupported for one that the emulator does not know."""
    if instruction.guard:
        raise Unsupported(f"PTX line {instruction.line}: a guarded {instruction.name}")
    name = instruction.name
    for prefix, translator in TRANSLATORS.items():
        if name == prefix or name.startswith(prefix + "."):
            return translator(_Translation(program, instruction))
    raise Unsupported(f"PTX line {instruction.line}: {name}")


class _Translation:
    """An instruction, with functions that find its operands."""

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program, self.instruction = program, instruction
        self.parts, self.operands = instruction.parts, instruction.operands
        self.type = TYPES.get(self.parts[-1], np.uint32)

    def unsupported(self) -> Unsupported:
        return Unsupported(f"PTX line {self.instruction.line}: {self.instruction.name}")

    def operand(self, text: str, kind: type | None = None) -> Operand:
        """Return a function that reads an operand as numbers of this type, by default that of the instruction."""
        kind = kind or self.type
        if match := SPECIAL.fullmatch(text):
            return partial(_special, match[1], "xyz".index(match[2]), kind)
        if text == "%laneid":
            return lambda state: state.select(state.thread % 32).astype(kind)
        if text.startswith("%"):
            return _register(text, kind)
        constant = self._constant(text, kind)
        return lambda state: constant

    def _constant(self, text: str, kind: type) -> Any:
        if match := FLOAT.fullmatch(text):
            if match[1]:
                return np.uint32(int(match[1], 16)).view(np.float32)
            return np.uint64(int(match[2], 16)).view(np.float64)
        if INTEGER.fullmatch(text):
            value = int(text, 0)
            if kind is np.bool_:
                return np.bool_(value & 1)
            if np.dtype(kind).kind == "f":
                return kind(value)
            bits = 8 * np.dtype(kind).itemsize
            return np.array(value % 2**bits, f"u{bits // 8}")[()].view(kind)
        if text in self.program.shared:
            return kind(self.program.shared[text])
        raise Unsupported(f"PTX line {self.instruction.line}: operand {text}")

    def all_operands(self) -> list[Operand]:
        return [self.operand(text) for text in self.operands[1:]]

    def address(self, text: str) -> Operand:
        """Return a function that reads an address: [register], or [register+bytes]."""
        match = ADDRESS.fullmatch(text)
        if match is None:
            raise self.unsupported()
        base, offset = self.operand(match[1], np.uint64), np.uint64(int(match[2] or 0) % 2**64)
        return lambda state: base(state) + offset

    def result(self, compute: Callable[..., Any], *operands: Operand) -> Action:
        """Return a function that writes compute(operands) to the first operand of the instruction."""
        target = self.operands[0]
        return lambda state: state.write(target, compute(*(operand(state) for operand in operands)))


def _register(name: str, kind: type) -> Operand:
    kept = register_type(name)
    if kept is kind:
        return lambda state: state.read(name)
    if np.dtype(kept).itemsize == np.dtype(kind).itemsize:
        return lambda state: state.read(name).view(kind)
    return lambda state: state.read(name).astype(kind)


def _special(name: str, axis: int, kind: type, state: State) -> Any:
    return state.select(getattr(state, name)[axis]).astype(kind)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _unary(t: _Translation) -> Action:
    return t.result(arithmetic.UNARY[t.parts[0]], *t.all_operands())


def _binary(t: _Translation) -> Action:
    if "cc" in t.parts:
        raise t.unsupported()
    compute = arithmetic.BINARY[t.parts[0]]
    if t.parts[0] in ("min", "max") and "NaN" in t.parts:
        compute = np.minimum if t.parts[0] == "min" else np.maximum
    return t.result(compute, *t.all_operands())


def _fma(t: _Translation) -> Action:
    if t.parts[0] == "mad" and "wide" in t.parts:
        a, b, c = t.operand(t.operands[1]), t.operand(t.operands[2]), t.operands[3]
        wide = np.dtype(f"{np.dtype(t.type).kind}{2 * np.dtype(t.type).itemsize}").type
        return t.result(lambda a, b, c: arithmetic.multiply_wide(a, b) + c, a, b, t.operand(c, wide))
    if "hi" in t.parts:
        raise t.unsupported()
    mode = next((part for part in t.parts if part in ("rm", "rp", "rz")), "rn")
    target, (a, b, c) = t.operands[0], t.all_operands()

    def run(state: State) -> None:
        x, y, z = a(state), b(state), c(state)
        if t.type is np.float32 and (state.fuse or mode != "rn"):
            value = arithmetic.fused(x, y, z, mode)
        else:
            value = x * y + z
        state.write(target, np.clip(value, 0, 1) if "sat" in t.parts else value)

    return run


def _mul(t: _Translation) -> Action:
    how = {"wide": arithmetic.multiply_wide, "hi": arithmetic.multiply_high}
    return t.result(next((how[part] for part in t.parts if part in how), np.multiply), *t.all_operands())


def _shift(t: _Translation) -> Action:
    a, by = t.operand(t.operands[1]), t.operand(t.operands[2], np.uint32)
    return t.result(partial(arithmetic.shift, t.parts[0] == "shl"), a, by)


def _bit_field(t: _Translation) -> Action:
    values = 2 if t.parts[0] == "bfi" else 1
    operands = [t.operand(text, t.type if i < values else np.uint32) for i, text in enumerate(t.operands[1:])]
    return t.result(arithmetic.insert_bits if values == 2 else arithmetic.extract_bits, *operands)


def _compare(t: _Translation) -> Action:
    compute, joined = partial(arithmetic.compare, t.parts[1]), t.parts[2] if t.parts[2] in ("and", "or", "xor") else ""
    operands = [t.operand(text) for text in t.operands[1:3]]
    if not joined:
        return t.result(compute, *operands)
    other = t.operand(t.operands[3], np.bool_)
    return t.result(lambda a, b, c: arithmetic.BINARY[joined](compute(a, b), c), *operands, other)


def _select(t: _Translation) -> Action:
    a, b = (t.operand(text) for text in t.operands[1:3])
    return t.result(lambda a, b, wanted: np.where(wanted, a, b), a, b, t.operand(t.operands[3], np.bool_))


def _move(t: _Translation) -> Action:
    target, source = t.operands
    half = np.dtype(f"u{np.dtype(t.type).itemsize // 2 or 1}").type
    bits = np.dtype(half).itemsize * 8
    if target.startswith("{"):  # one register becomes two
        low, high = registers_in(target)
        whole = t.operand(source)

        def split(state: State) -> None:
            value = whole(state)
            state.write(low, value.astype(half))
            state.write(high, (value >> t.type(bits)).astype(half))

        return split
    if source.startswith("{"):  # two registers become one
        low_half, high_half = (t.operand(name, half) for name in registers_in(source))
        return t.result(lambda a, b: a.astype(t.type) | b.astype(t.type) << t.type(bits), low_half, high_half)
    return t.result(lambda a: a, t.operand(source))


def _convert(t: _Translation) -> Action:
    target, source = t.parts[-2], t.parts[-1]
    if target not in TYPES or source not in TYPES:
        raise t.unsupported()
    compute = partial(arithmetic.convert, target=TYPES[target], parts=t.parts[1:-2])
    return t.result(compute, t.operand(t.operands[1], TYPES[source]))


# -- memory -----------------------------------------------------------------------------------------------------------


def _space(t: _Translation) -> str:
    return next((part for part in t.parts if part in ("param", "shared", "local", "const")), "global")


def _width(t: _Translation) -> int:
    return next((int(part[1]) for part in t.parts if part in ("v2", "v4")), 1)


def _load(t: _Translation) -> Action:
    space, names = _space(t), registers_in(t.operands[0])
    if space == "param":
        position, kind = t.program.parameters[t.operands[1].strip("[]")]
        return lambda state: state.write(names[0], state.parameter(position, kind))
    if space not in ("global", "shared"):
        raise t.unsupported()
    address, width = t.address(t.operands[1]), _width(t)

    def run(state: State) -> None:
        values = state.memory(space).load(state.access(address(state)), t.type, width)
        for i, name in enumerate(names):
            state.write(name, np.ascontiguousarray(values[:, i]))

    return run


def _store(t: _Translation) -> Action:
    space, address = _space(t), t.address(t.operands[0])
    if space not in ("global", "shared"):
        raise t.unsupported()
    sources = [t.operand(name) for name in registers_in(t.operands[1])]

    def run(state: State) -> None:
        access = state.access(address(state))
        values = np.empty((access.address.size, len(sources)), t.type)
        for i, source in enumerate(sources):
            values[:, i] = source(state)
        state.memory(space).store(access, values)

    return run


def _copy(t: _Translation) -> Action:
    if "commit_group" in t.parts:
        return lambda state: state.copies.commit(state.threads())
    if "wait_group" in t.parts or "wait_all" in t.parts:
        left = int(t.operands[0]) if "wait_group" in t.parts else 0
        if "wait_all" in t.parts:
            raise t.unsupported()  # it also waits for copies that are not committed
        return lambda state: state.copies.wait(state.threads(), left, state.stamp())
    target, source, nbytes = t.address(t.operands[0]), t.address(t.operands[1]), int(t.operands[2])
    size = t.operand(t.operands[3], np.uint32) if len(t.operands) > 3 else None

    def run(state: State) -> None:
        to, origin = state.access(target(state)), state.access(source(state))
        read = np.broadcast_to(nbytes if size is None else size(state), to.address.shape)
        state.copies.start(origin, to, nbytes, read, state.threads())

    return run


# -- warps ------------------------------------------------------------------------------------------------------------


def _shuffle(t: _Translation) -> Action:
    if t.parts[1] != "sync":
        raise t.unsupported()
    target = t.operands[0].split("|")[0]
    value = t.operand(t.operands[1])
    distance, clamp, mask = (t.operand(text, np.uint32) for text in t.operands[2:])

    def run(state: State) -> None:
        check_whole(state.threads(), "a shuffle")
        if (mask(state) != ALL).any():
            raise KernelError("a shuffle in which not all threads of the warp take part")
        values, distances = (np.broadcast_to(x(state), state.threads().shape) for x in (value, distance))
        state.write(target, shuffle(t.parts[2], values, distances, int(np.max(clamp(state)))))

    return run


def _vote(t: _Translation) -> Action:
    if t.parts[1:3] != ["sync", "ballot"]:
        raise t.unsupported()
    wanted, mask = t.operand(t.operands[1], np.bool_), t.operand(t.operands[2], np.uint32)

    def run(state: State) -> None:
        check_whole(state.threads(), "a vote")
        if (mask(state) != ALL).any():
            raise KernelError("a vote in which not all threads of the warp take part")
        state.write(t.operands[0], ballot(np.broadcast_to(wanted(state), state.threads().shape)))

    return run


def _matrices(t: _Translation) -> Action:
    names, address = registers_in(t.operands[0]), t.address(t.operands[1])
    if t.parts[2:] != ["aligned", "m8n8", "x4", "shared", "b16"]:
        raise t.unsupported()

    def run(state: State) -> None:
        rows = state.memory("shared").load(state.access(address(state)), np.uint32, 4)
        for name, words in zip(names, tensor.by_rows(rows, state.threads())):
            state.write(name, words)

    return run


def _mma(t: _Translation) -> Action:
    if t.parts[3:] not in (["m16n8k8", *MMA, "tf32", "tf32", "f32"], ["m16n8k16", *MMA, "bf16", "bf16", "f32"]):
        raise t.unsupported()
    names = registers_in(t.operands[0])
    a, b = ([t.operand(name, np.uint32) for name in registers_in(text)] for text in t.operands[1:3])
    c = [t.operand(name, np.float32) for name in registers_in(t.operands[3])]

    def run(state: State) -> None:
        def words(operands: list[Operand]) -> list[np.ndarray]:
            return [np.broadcast_to(operand(state), state.threads().shape) for operand in operands]

        result = tensor.multiply(t.parts[-2], words(a), words(b), words(c), state.threads())
        for name, value in zip(names, result):
            state.write(name, value)

    return run


def _to_tf32(t: _Translation) -> Action:
    return t.result(tensor.round_to_tf32, t.operand(t.operands[1], np.float32))


def _to_bf16(t: _Translation) -> Action:
    high, low = (t.operand(text, np.float32) for text in t.operands[1:])
    return t.result(lambda h, w: tensor.round_to_bf16(h) << np.uint32(16) | tensor.round_to_bf16(w), high, low)


def _nothing(t: _Translation) -> Action:
    return lambda state: None


def _trap(t: _Translation) -> Action:
    def run(state: State) -> None:
        raise KernelError("the kernel stops with a trap")

    return run


TRANSLATORS: dict[str, Callable[[_Translation], Action]] = {
    "cvt.rna.tf32": _to_tf32, "cvt.rn.bf16x2": _to_bf16, "ldmatrix.sync": _matrices, "mma.sync": _mma,
    **dict.fromkeys(arithmetic.UNARY, _unary), **dict.fromkeys(arithmetic.BINARY, _binary),
    "fma": _fma, "mad": _fma, "mul": _mul, "shl": _shift, "shr": _shift, "bfi": _bit_field, "bfe": _bit_field,
    "setp": _compare, "selp": _select, "mov": _move, "cvta": _move, "cvt": _convert,
    "ld": _load, "st": _store, "cp.async": _copy, "shfl": _shuffle, "vote": _vote,
    "membar": _nothing, "fence": _nothing, "trap": _trap,
}  # fmt: skip
