"""The names that a function's code contains: attributes, globals, imported modules, and parts of computed names."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import NamedTuple

from minidl.program.libraries import COMPARES, CONSTRUCTS, READERS, TEXTS

OPTIONAL = "finds out whether attributes exist"
_ALL = {"__dict__", "__getattribute__"}  # attributes that give access to all attributes
_EFFECTS = {
    "COMPARE_OP": COMPARES, "CONTAINS_OP": COMPARES, "FORMAT_VALUE": TEXTS, "FORMAT_SIMPLE": TEXTS,
    "FORMAT_WITH_SPEC": TEXTS, "CONVERT_VALUE": TEXTS,
}  # fmt: skip
_ATTRIBUTES = {"sort": COMPARES, "index": COMPARES, "count": COMPARES, "remove": COMPARES, "format": TEXTS,
               "join": TEXTS, "__class__": CONSTRUCTS}  # fmt: skip


class Names(NamedTuple):
    """The names in the code of a function and of the functions inside it.

    imports: (level, name) of modules. prefixes: the code computes names of attributes that begin with one of these; ""
    if nothing is known about a name. effects: what the code does, from `libraries` and OPTIONAL.
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
        if name == "MATCH_CLASS":  # the names are in constants, or in the class
            prefixes.add("")
        elif name in _EFFECTS:
            effects.add(_EFFECTS[name])
        elif name == "BINARY_OP" and instruction.argrepr.startswith("%"):
            effects.add(TEXTS)
        elif "GLOBAL" in name or name in ("LOAD_NAME", "STORE_NAME"):
            variables.add(value)
            if value in READERS:
                effects.add(OPTIONAL)
                computed, known = _computed_name(instructions[at:])
                (attributes if known else prefixes).add(computed)
        elif name == "IMPORT_NAME":
            imports.add((instructions[at - 2].argval, value))
        elif instruction.opcode in dis.hasname:
            attributes.add(value)
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


def _computed_name(instructions: Sequence[dis.Instruction]) -> tuple[str, bool]:
    """Return the name that a call of `getattr` reads, and True; or the beginning of the name, and False.

    instructions: the code from the place that loads `getattr`. The beginning is known in `getattr(self, f"layer{i}")`,
    `"layer" + kind` and `"layer%d" % i`. Else it is "".
    """
    depth, depths = 0, [0]  # the number of values on the stack, before each instruction
    for instruction in instructions[1:]:
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs or instruction.is_jump_target:
            break
        if instruction.opname in ("PRECALL", "CALL") and instruction.arg == depth:
            return _name_of(list(instructions[1 : len(depths)]), depths[1:], depth)
        depths.append(depth)
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
    return "", False


def _name_of(arguments: list[dis.Instruction], depths: list[int], count: int) -> tuple[str, bool]:
    """Return the value of the second of `count` arguments, or its beginning, as `_computed_name` does."""
    starts = [max((at for at, depth in enumerate(depths) if depth == i), default=0) for i in range(count)] + [None]
    if count < 2 or depths[starts[1] or 0] != 1:  # or one instruction puts both arguments on the stack
        return "", False
    second, inside = arguments[starts[1] : starts[2]], depths[starts[1] : starts[2]]
    text = second[0].argval if second and second[0].opname == "LOAD_CONST" else None
    if not isinstance(text, str):
        return "", False
    if len(second) == 1:
        return text, True
    first_is_kept = min(inside[2:], default=0) > 2  # on the stack, until the last instruction
    last = second[-1].opname, second[-1].argrepr
    if first_is_kept and (last[0] == "BUILD_STRING" or last == ("BINARY_OP", "+")):
        return text, False
    return (text.partition("%")[0] if first_is_kept and last == ("BINARY_OP", "%") else ""), False
