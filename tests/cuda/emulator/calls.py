"""Replaces calls in PTX by the called functions' instructions. NVIDIA's powers of float64 numbers are such functions.

A call stores its arguments in parameters, and loads the result from one. Here, registers take the place of parameters.
The registers and labels of each copy of a function have names of their own.
"""

from __future__ import annotations

import re
from itertools import count

FUNCTION = re.compile(r"^\.func\s*\([^)]*\)\s*(\w+)\s*\([^)]*\)\s*\{\n(.*?)^\}", re.M | re.S)
CALL = re.compile(
    r"\{ // callseq (?:(?!// callseq).)*?call\.uni \((\w+)\),\s*(\w+),\s*\(([\w,\s]*)\s*\);.*?// callseq \d+", re.S
)
STORE = re.compile(r"st\.param\.(\w+)\s+\[(\w+)\+0\], ([%\w]+);")
LOAD = re.compile(r"ld\.param\.(\w+)\s+([%\w]+), \[(\w+)(?:\+0)?\];")
REGISTER = re.compile(r"%(p|rs|r|rd|f|fd)(\d+)\b")
PREFIX = {"f32": "%f", "f64": "%fd", "b32": "%r", "u32": "%r", "b64": "%rd", "u64": "%rd"}
APART = 1_000_000  # added to the numbers of a copy's registers


def inline(ptx: str) -> str:
    """Return PTX without functions and calls."""
    functions = {name: body for name, body in FUNCTION.findall(ptx)}
    ptx = FUNCTION.sub("", ptx)
    for number in count(1):
        call = CALL.search(ptx)
        if call is None or call[2] not in functions:
            return ptx
        ptx = ptx[: call.start()] + _copy(call, functions[call[2]], number) + ptx[call.end() :]
    raise AssertionError


def _copy(call: re.Match[str], body: str, number: int) -> str:
    """Return the instructions of a call: its stores, the function's instructions, and the load of the result."""
    result, name = call[1], call[2]
    arguments = [argument.strip() for argument in call[3].split(",")]
    places = {argument: 2 * number * APART + i for i, argument in enumerate(arguments)}
    places[result] = 2 * number * APART + len(arguments)
    within = {f"{name}_param_{i}": places[argument] for i, argument in enumerate(arguments)}
    within["func_retval0"] = places[result]
    end = f"$call_{number}_end"
    body = REGISTER.sub(lambda r: f"%{r[1]}{int(r[2]) + (2 * number + 1) * APART}", body)
    body = re.sub(r"\$(L\w+)", rf"$call_{number}_\1", _moves(body, within))
    body = re.sub(r"\bret;", f"bra {end};", body)
    before, after = call[0].split("call.uni")
    after = "\n".join(line for line in after.splitlines() if "ld.param" in line)
    return "\n".join((_moves(before, places), body, f"{end}:", _moves(after, places), "}"))


def _moves(text: str, places: dict[str, int]) -> str:
    """Replace stores to parameters, and loads from them, by moves. places: {parameter: number of its register}"""
    text = STORE.sub(lambda s: f"mov.{s[1]} {PREFIX[s[1]]}{places[s[2]]}, {s[3]};", text)
    return LOAD.sub(lambda s: f"mov.{s[1]} {s[2]}, {PREFIX[s[1]]}{places[s[3]]};", text)
