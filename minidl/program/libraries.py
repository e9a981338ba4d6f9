"""Libraries: which code belongs to Python, to minidl or to an installed package, and what some of its functions do.

The fingerprint does not read the code of libraries. Instead, a table lists functions whose effects it must know. It
recognises these functions under any name (`from operator import attrgetter as read`), because it compares identities.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import datetime
import functools
import gc
import importlib
import inspect
import operator
import os
import pickle
import random
import secrets
import site
import sys
import sysconfig
import threading
import time
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

LIBRARIES = {"minidl", "numpy", "scipy", "numba", "builtins", *sys.stdlib_module_names}
PYTHON = (os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
INSTALLED = (*site.getsitepackages(), site.getusersitepackages())

# What a function can do, besides what its arguments and its code show.
VARIES = "results that differ from call to call"
UNBOUNDED = "access to everything"
ALL_NAMES = "reads attributes whose names are not in the code"
COMPARES = "calls comparisons of objects"
TEXTS = "makes texts of objects"
CONSTRUCTS = "makes objects of classes that the code does not name"
COPIES = "copies objects"
DATE = "tells the time, by some methods"
THREADS = "computes in other threads or processes, where nothing is recorded"

_OBJECTS: dict[str, list[Any]] = {
    VARIES: [
        np.random.default_rng, np.random.RandomState, np.random.SeedSequence, np.random.PCG64, np.random.PCG64DXSM,
        np.random.Philox, np.random.MT19937, np.random.SFC64, random.Random, random.SystemRandom, builtins.input,
        os.environ, os.getenv,
        *[getattr(module, name) for module, names in {  # some of them do not exist on every system
            os: "environb getenvb getloadavg getrandom times urandom",
            secrets: "choice randbelow randbits token_bytes token_hex token_urlsafe",
            time: "asctime clock_gettime clock_gettime_ns ctime gmtime localtime monotonic monotonic_ns perf_counter "
                  "perf_counter_ns process_time process_time_ns strftime thread_time thread_time_ns time time_ns",
            uuid: "uuid1 uuid4 uuid6 uuid7 uuid8",
        }.items() for name in names.split() if hasattr(module, name)],
    ],
    THREADS: [threading.Thread, threading.Timer, ThreadPoolExecutor],
    UNBOUNDED: [
        builtins.globals, builtins.eval, builtins.exec, builtins.__import__, importlib.import_module, sys.modules,
        sys._getframe, inspect.currentframe, inspect.stack, gc.get_objects, gc.get_referrers,
    ],
    ALL_NAMES: [
        builtins.getattr, builtins.setattr, builtins.hasattr, builtins.delattr, builtins.vars, builtins.dir,
        operator.attrgetter, operator.methodcaller, dataclasses.asdict, dataclasses.astuple, dataclasses.replace,
        inspect.getmembers, inspect.getattr_static, copy.copy, copy.deepcopy, pickle.dumps,
    ],
    COMPARES: [
        builtins.min, builtins.max, builtins.sorted, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
        operator.ge, operator.contains, operator.indexOf, operator.countOf, builtins.hash, functools.lru_cache,
    ],
    TEXTS: [builtins.str, builtins.repr, builtins.ascii, builtins.format, builtins.print],
    CONSTRUCTS: [builtins.type, dataclasses.replace, copy.copy, copy.deepcopy],
    COPIES: [copy.copy, copy.deepcopy, pickle.dumps],
    DATE: [datetime.datetime, datetime.date],
}  # fmt: skip
EFFECTS: dict[int, set[str]] = {}  # id of a function -> its effects
for _effect, _values in _OBJECTS.items():
    for _value in _values:
        EFFECTS.setdefault(id(_value), set()).add(_effect)

UNBOUNDED_NAMES = {"__globals__", "f_globals", "f_locals", "f_back", "__subclasses__"}
CLOCKS = {"now", "utcnow", "today"}  # class methods of datetime and date

COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__"}
CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
# Effect -> special methods that Python calls only in code with this effect; under "": those that no step calls.
NOT_CALLED: dict[str, set[str]] = {
    "": {"__init_subclass__", "__del__", "__dir__", "__set_name__", *CONSTRUCTORS},
    TEXTS: {"__repr__", "__str__"},
    COMPARES: COMPARISONS,
    COPIES: {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"},
}


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, to minidl or to an installed package."""
    if module in (None, "", "__main__"):  # in a notebook, the file of __main__ belongs to an installed package
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if file.startswith(INSTALLED):
        return True
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:  # perhaps a user's file of the same name
        return not file or file.startswith(PYTHON)
    return top in LIBRARIES


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module belongs to an installed package, other than Python, minidl, NumPy, SciPy and Numba."""
    return is_library(module) and module.partition(".")[0] not in LIBRARIES


def is_users(function: types.FunctionType) -> bool:
    """Return whether the user wrote a function. Its `__module__` may be wrong, since a decorator can change it."""
    return not is_library(function.__globals__.get("__name__"))


@functools.cache
def is_native(module: str) -> bool:
    """Return whether a module is a library's or compiled: its objects may have a state that Python cannot read."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return is_library(module) or (bool(file) and not file.endswith((".py", ".pyc")))
