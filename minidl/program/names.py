"""The names that a function's code contains: attributes, globals, imported modules, and parts of computed names."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

from minidl.program.libraries import COMPARES, CONSTRUCTS, TEXTS

OPTIONAL = "finds out whether attributes exist"
READERS = {"getattr", "setattr", "hasattr", "delattr"}
FOLLOWED = READERS | {"type"}  # functions whose effects `names_of` finds
_ALL = {"__dict__", "__getattribute__"}  # attributes that give access to all attributes
_EFFECTS = {
    "COMPARE_OP": COMPARES, "CONTAINS_OP": COMPARES, "FORMAT_VALUE": TEXTS, "FORMAT_SIMPLE": TEXTS,
    "FORMAT_WITH_SPEC": TEXTS, "CONVERT_VALUE": TEXTS,
}  # fmt: skip
_ATTRIBUTES = {"sort": COMPARES, "index": COMPARES, "count": COMPARES, "remove": COMPARES, "format": TEXTS,
               "join": TEXTS}  # fmt: skip


class Names(NamedTuple):
    """The names in the code of a function and of the functions inside it.

    imports: (level, name) of modules. prefixes: the beginnings of attributes' names that the code computes; "" if a
    beginning is not known. effects: what the code does: constants of libraries.py, OPTIONAL.
    """

    attributes: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[tuple[int, str]]
    prefixes: frozenset[str]
    effects: frozenset[str]


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    attributes: set[str] = set()
    variables: set[str] = set()
    imports: set[tuple[int, str]] = set()
    prefixes: set[str] = set()
    effects = {OPTIONAL} if code.co_exceptiontable else set()
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for at, instruction in enumerate(instructions):
        name, value = instruction.opname, instruction.argval
        if name == "MATCH_CLASS":  # a pattern like `Point(x=0)` reads attributes that the instruction does not name
            prefixes.add("")
        elif name in _EFFECTS:
            effects.add(_EFFECTS[name])
        elif name == "BINARY_OP" and instruction.argrepr.startswith("%"):
            effects.add(TEXTS)
        elif "GLOBAL" in name or name in ("LOAD_NAME", "STORE_NAME"):
            variables.add(value)
            if value in READERS:
                effects.add(OPTIONAL)
                computed, known = _computed_name(_call(instructions[at:]))
                (attributes if known else prefixes).add(computed)
            elif value == "type" and not _is_inspected(_call(instructions[at:]).following):
                effects.add(CONSTRUCTS)
        elif name == "IMPORT_NAME":
            imports.add((instructions[at - 2].argval, value))
        elif instruction.opcode in dis.hasname:
            attributes.add(value)
            if value == "__class__" and (name == "LOAD_METHOD" or not _is_inspected(instructions[at + 1 :])):
                effects.add(CONSTRUCTS)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_of(constant)
            attributes |= inner.attributes
            variables |= inner.globals
            imports |= inner.imports
            prefixes |= inner.prefixes
            effects |= inner.effects
    if attributes & _ALL:
        prefixes.add("")
    effects |= {_ATTRIBUTES[name] for name in attributes & _ATTRIBUTES.keys()}
    return Names(*map(frozenset, (attributes, variables, imports, prefixes, effects)))  # type: ignore[arg-type]


def _is_inspected(following: list[dis.Instruction]) -> bool:
    """Return whether the instructions only read an attribute of a class or compare it, and do not call the class."""
    names = [instruction.opname for instruction in following[:3]]
    if names[:1] in (["LOAD_ATTR"], ["LOAD_METHOD"], ["IS_OP"]):
        return True
    return names == ["LOAD_FAST", "LOAD_ATTR", "IS_OP"] and following[1].argval == "__class__"


class _Call(NamedTuple):
    """A call of a function.

    arguments: the instructions that compute the arguments. depths: the number of values on the stack before each.
    number: the number of arguments; 0 if the instructions cannot be followed. following: what comes after the call.
    """

    arguments: list[dis.Instruction]
    depths: list[int]
    number: int
    following: list[dis.Instruction]


def _call(instructions: list[dis.Instruction]) -> _Call:
    """Return the call that begins at the instruction which loads the function."""
    depth = 0
    depths: list[int] = []
    for at, instruction in enumerate(instructions[1:], 1):
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs or instruction.is_jump_target:
            break
        if instruction.opname in ("PRECALL", "CALL") and instruction.arg == depth:
            end = at + (2 if instruction.opname == "PRECALL" else 1)
            return _Call(instructions[1:at], depths, depth, instructions[end:])
        depths.append(depth)
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
    return _Call([], [], 0, [])


def _computed_name(call: _Call) -> tuple[str, bool]:
    """Return (name, True) if a call of `getattr` reads a constant name, else (beginning of the name, False).

    The beginning is known in `getattr(self, f"layer{i}")`, `"layer" + kind` and `"layer%d" % i`. Else it is "".
    """
    depths, count = call.depths, call.number
    starts = [max((at for at, depth in enumerate(depths) if depth == i), default=0) for i in range(count)] + [None]
    if count < 2 or depths[starts[1] or 0] != 1:  # or one instruction puts two arguments on the stack
        return "", False
    second, inside = call.arguments[starts[1] : starts[2]], depths[starts[1] : starts[2]]
    text = second[0].argval if second and second[0].opname == "LOAD_CONST" else None
    if not isinstance(text, str):
        return "", False
    if len(second) == 1:
        return text, True
    first_is_kept = min(inside[2:], default=0) > 2  # it stays on the stack until the last instruction
    last = second[-1].opname, second[-1].argrepr
    if first_is_kept and (last[0] == "BUILD_STRING" or last == ("BINARY_OP", "+")):
        return text, False
    return (text.partition("%")[0] if first_is_kept and last == ("BINARY_OP", "%") else ""), False
