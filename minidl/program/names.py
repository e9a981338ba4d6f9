"""The names of attributes and globals in a function's code, and functions whose results differ from call to call."""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import importlib
import os
import random
import secrets
import site
import sys
import threading
import time
import types
import uuid
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

LIBRARIES = {"minidl", "numpy", "scipy", "numba", "builtins", *sys.stdlib_module_names}
INSTALLED = (*site.getsitepackages(), site.getusersitepackages())

# Functions that read attributes by names that are not in the code.
DYNAMIC_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr", "vars", "attrgetter", "locals", "globals", "eval",
                     "exec", "asdict", "astuple"}  # fmt: skip
DYNAMIC_ATTRIBUTES = {"__dict__", "__getattribute__", "attrgetter", "asdict", "astuple"}

# Special methods that the code of a step does not call. It calls CONSTRUCTORS only if it reads the class itself.
CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
NOT_CALLED = CONSTRUCTORS | {"__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__",
                             "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__dir__"}  # fmt: skip
COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__"}

VARYING = [  # objects whose results differ from call to call, without a change that the fingerprint can find
    np.random.default_rng, np.random.RandomState, np.random.SeedSequence, np.random.PCG64, np.random.PCG64DXSM,
    np.random.Philox, np.random.MT19937, np.random.SFC64, random.Random, random.SystemRandom, builtins.input,
    os.environ, os.getenv, builtins.__import__, importlib.import_module,
    *[getattr(module, name) for module, names in {  # some of them do not exist on every system
        os: "environb getenvb getloadavg getrandom times urandom",
        secrets: "choice randbelow randbits token_bytes token_hex token_urlsafe",
        time: "asctime clock_gettime clock_gettime_ns ctime gmtime localtime monotonic monotonic_ns perf_counter "
              "perf_counter_ns process_time process_time_ns strftime thread_time thread_time_ns time time_ns",
        uuid: "uuid1 uuid4 uuid6 uuid7 uuid8",
    }.items() for name in names.split() if hasattr(module, name)],
]  # fmt: skip
_VARYING = {id(function) for function in VARYING}
_CLOCKS = {"now", "utcnow", "today"}  # class methods of datetime and date


def varies(value: object, names: set[str]) -> str:
    """Return why the results of an object differ from call to call, or "".

    It is in VARYING, it reads the current date, or it runs functions in other threads or processes.
    names: the attributes that the code reads.
    """
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, Executor) or value is threading.Thread or value is threading.Timer:
        return "and what other threads or processes compute is not recorded"
    reads_date = isinstance(value, type) and issubclass(kind, datetime.date) and not names.isdisjoint(_CLOCKS)
    if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, type):
        reads_date = issubclass(value.__self__, datetime.date) and value.__name__ in _CLOCKS
    return "whose results differ from call to call" if reads_date or id(value) in _VARYING else ""


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed package or to minidl."""
    if module in (None, "", "__main__"):  # in a notebook, the file of __main__ belongs to an installed package
        return False
    if module.partition(".")[0] in LIBRARIES:
        return True
    return (getattr(sys.modules.get(module), "__file__", None) or "").startswith(INSTALLED)


class Names(NamedTuple):
    """The names in the code of a function and of the functions inside it.

    dynamic: whether the code computes names of attributes. compares: whether it compares values (perhaps objects).
    """

    attributes: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[str]
    dynamic: bool
    compares: bool


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    attributes: set[str] = set()
    variables: set[str] = set()
    imports: set[str] = set()
    dynamic = compares = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        dynamic |= name == "MATCH_CLASS"  # the names are in constants, or in the class
        compares |= name in ("COMPARE_OP", "CONTAINS_OP")
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
            dynamic, compares = dynamic or inner.dynamic, compares or inner.compares
    dynamic = dynamic or bool(variables & DYNAMIC_FUNCTIONS or attributes & DYNAMIC_ATTRIBUTES)
    return Names(frozenset(attributes), frozenset(variables), frozenset(imports), dynamic, compares)


def function_of(member: Any) -> types.FunctionType | None:
    """Return the function of a method or property, as a class stores it; None for other attributes of a class."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return function if isinstance(function, types.FunctionType) else None


def library_names(bases: list[type], names: set[str], not_called: set[str]) -> set[str]:
    """Return the attributes that methods of library classes read, if code with these names may call the methods.

    bases: the library classes. not_called: special methods that the code does not call.
    """
    called = [name for base in bases for name in vars(base)
              if name in names or (name[:2] == name[-2:] == "__" and name not in not_called)]  # fmt: skip
    found: set[str] = set()
    while called:
        name = called.pop()
        for base in bases:
            function = function_of(vars(base).get(name))
            if function is not None:
                new = names_of(function.__code__).attributes - found
                found |= new
                called += new
    return found
