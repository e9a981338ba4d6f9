"""The names of attributes and globals in a function's code, and functions that return other values at each call."""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import os
import random
import secrets
import site
import sys
import time
import types
import uuid
from typing import NamedTuple

import numpy as np

LIBRARIES = {"minidl", "numpy", "scipy", "numba", "builtins", *sys.stdlib_module_names}
INSTALLED = (*site.getsitepackages(), site.getusersitepackages())

# Functions that read attributes by names that are not in the code.
DYNAMIC_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr", "vars", "attrgetter", "locals", "globals", "eval",
                     "exec", "asdict", "astuple"}  # fmt: skip
DYNAMIC_ATTRIBUTES = {"__dict__", "__getattribute__", "attrgetter", "asdict", "astuple"}

VARYING = [  # functions and classes whose results differ from call to call
    np.random.default_rng, np.random.RandomState, np.random.SeedSequence, np.random.PCG64, np.random.PCG64DXSM,
    np.random.Philox, np.random.MT19937, np.random.SFC64, random.Random, random.SystemRandom, os.urandom, uuid.uuid1,
    uuid.uuid4, secrets.token_bytes, secrets.token_hex, secrets.randbelow, secrets.choice, secrets.randbits, time.time,
    time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns, time.process_time,
    builtins.input,
]  # fmt: skip
_VARYING = {id(function) for function in VARYING}
_CLOCKS = {"now", "utcnow", "today"}  # class methods of datetime and date


def varies(value: object, names: set[str]) -> bool:
    """Return whether a function or class returns other values at each call. names: the attributes that are read."""
    return id(value) in _VARYING or (value in (datetime.datetime, datetime.date) and not names.isdisjoint(_CLOCKS))


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed package or to minidl."""
    if not module or module.partition(".")[0] in LIBRARIES:
        return True
    return (getattr(sys.modules.get(module), "__file__", None) or "").startswith(INSTALLED)


class Names(NamedTuple):
    """The names in the code of a function and of the functions inside it. dynamic: whether it computes names."""

    attributes: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[str]
    dynamic: bool


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    attributes: set[str] = set()
    variables: set[str] = set()
    imports: set[str] = set()
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if "GLOBAL" in name or name in ("LOAD_NAME", "STORE_NAME"):
            variables.add(instruction.argval)
        elif name == "IMPORT_NAME":
            imports.add(instruction.argval)
        elif instruction.opcode in dis.hasname:
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_of(constant)
            attributes |= inner.attributes
            variables |= inner.globals
            imports |= inner.imports
        elif isinstance(constant, tuple):  # the keywords of a class pattern: `case Point(x=0)`
            attributes.update(item for item in constant if isinstance(item, str))
    dynamic = bool(variables & DYNAMIC_FUNCTIONS or attributes & DYNAMIC_ATTRIBUTES)
    return Names(frozenset(attributes), frozenset(variables), frozenset(imports), dynamic)
