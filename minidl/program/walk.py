"""Walk: collects values that the code of a step can reach, and places to compare at every step.

`Walk` has what all kinds of values need. code.py adds functions, classes and modules of Python; fingerprint.py adds
objects and containers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from minidl.nn.module import Module
from minidl.program import checks
from minidl.program.checks import Check
from minidl.program.hidden import Unrecordable
from minidl.program.libraries import (
    ALL_NAMES,
    CLOCKS,
    COMPARES,
    DATE,
    EFFECTS,
    NOT_CALLED,
    THREADS,
    UNBOUNDED,
    VARIES,
    is_installed,
    is_library,
)
from minidl.program.names import Names

LARGEST = 2_000  # the most elements of containers to compare at every step; 32 bytes of an array count as one element
MOST = 100_000  # the most values in a fingerprint

LEAVES = (int, bool, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range)
BY_TEXT = (float, complex, slice)  # compared as text, so that nan equals nan, and 0.0 differs from -0.0
SKIPPED = (
    "builtins", "minidl.nn.module", "minidl.engine.tensor", "minidl.engine.parameter", "minidl.program.replay",
    "minidl.program.replayed",
)  # fmt: skip


class Walk:
    """The state of a walk over all values that a step can reach.

    names, prefixes: the names of attributes that the code reads, and beginnings of names that it computes. effects:
    what functions in the code do (libraries.py).
    """

    def __init__(self, roots: tuple[Any, ...], earlier: Walk | None = None) -> None:
        self.roots = roots
        self.names: set[str] = set(earlier.names) if earlier else {"forward", "__wrapped__"}
        self.prefixes: set[str] = set(earlier.prefixes) if earlier else set()
        self.effects: set[str] = set(earlier.effects) if earlier else set()
        known = None
        while known != self._reach():  # walk again: a new name may be an attribute of an object seen before
            known = self._reach()
            self._walk()

    def _reach(self) -> tuple[int, int, int]:
        return len(self.names), len(self.prefixes), len(self.effects)

    def _walk(self) -> None:
        self.values: list[Any] = []  # types, leaves and ids; another fingerprint's must be equal
        self.watched: list[Check] = []  # places to compare at every step
        self.modules: list[Check] = []  # of layers; to compare only if engine.changes.changes() has increased
        self.generators: dict[str, Any] = {}
        self.refusal = ""
        self._kept: list[Any] = []  # visited objects, kept alive so that no other object gets the same id
        self._seen: dict[Any, int] = {}
        self._library_names: dict[type, set[str]] = {}
        self._everything: dict[type, bool] = {}
        self._slot_names: dict[type, list[str]] = {}
        self._absent: dict[int, tuple[dict[str, Any], set[str]]] = {}  # id of globals -> (globals, absent names)
        self._beginnings = tuple(self.prefixes)
        self._not_called = set().union(*(names for effect, names in NOT_CALLED.items() if effect not in self.effects))
        self._size = 0
        try:
            self._below_model = _modules_below(self.roots[0])
            for path, root in zip((type(self.roots[0]).__name__, "loss"), self.roots):
                self._visit(root, path)
            for variables, names in self._absent.values():
                self._watch(checks.none_of, variables, frozenset(names), True, "a global")
        except Unrecordable as error:
            self.refusal = str(error)
        except RecursionError:
            self.refusal = "its settings are nested too deeply to compare"
        except Exception as error:  # raised by the code of an unusual object
            self.refusal = f"its settings cannot be compared: {type(error).__name__}: {error}"

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in LEAVES:
            self.values.append((kind, value))
        elif kind in BY_TEXT or (isinstance(value, np.generic | np.dtype) and not isinstance(value, np.void)):
            self.values.append((kind, repr(value)))
        elif id(value) in self._seen:
            self.values.append(("seen", self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._kept)
            self._kept.append(value)
            if id(value) in EFFECTS:
                self._take_effects(value, path)
            if len(self.values) > MOST:
                raise Unrecordable(f"its settings are too many to compare ({path})")
            by_value, visit = self.visit_of(kind)
            self.values.append(kind if by_value else id(value))
            visit(self, value, path)

    def visit_of(self, kind: type) -> tuple[bool, Callable[[Any, Any, str], None]]:
        """Return whether an equal object may replace an object of this type, and the method that visits objects."""
        raise NotImplementedError

    def _watch(self, read: Callable[..., Any], owner: Any, key: Any, value: Any, path: str, home: Any = None) -> None:
        self.watched.append(Check(read, owner, key, value, path, home))

    def _follow(self, read: Callable[..., Any], owner: Any, key: str, value: Any, path: str, home: Any = None) -> None:
        """Watch a place and visit its value."""
        self.values.append(key)
        self._watch(read, owner, key, value, path, home)
        self._visit(value, path)

    def _count(self, size: int, path: str) -> None:
        self._size += size
        if self._size > LARGEST:
            raise Unrecordable(f"{path} is too large to compare at every step")

    def _counts(self, name: Any, kind: type = object) -> bool:
        """Return whether the code may read an attribute with this name of an object of this class."""
        if name in self.names or name in self._library_names.get(kind, ()):
            return True
        computed = bool(self._beginnings) and isinstance(name, str) and name.startswith(self._beginnings)
        return computed and not kind.__module__.startswith("minidl.program")

    def _take_effects(self, value: Any, path: str) -> None:
        """Note what a function of a library can do. Raise Unrecordable if its results cannot be known."""
        effects = EFFECTS.get(id(value), set())
        if VARIES in effects or (DATE in effects and not CLOCKS.isdisjoint(self.names)):
            raise Unrecordable(f"it uses {path}, whose results differ from call to call")
        if THREADS in effects:
            raise Unrecordable(f"it uses {path}, and what other threads or processes compute is not recorded")
        if UNBOUNDED in effects:
            raise Unrecordable(f"it uses {path}, by which it can read anything")
        self.effects |= effects
        self.prefixes |= {""} if ALL_NAMES in effects else set()

    def _take_names(self, names: Names) -> None:
        self.names |= names.attributes
        self.prefixes |= names.prefixes
        self.effects |= names.effects

    def _compare(self, key: Any) -> None:
        """Note that the code compares a key of a dictionary, or an element of a set, with other objects."""
        if type(key) not in LEAVES and not is_library(type(key).__module__):
            self.effects.add(COMPARES)

    # -- attributes --------------------------------------------------------------------------------------

    def _attributes(self, value: Any, path: str) -> None:
        """Visit the attributes that the code names; all of them if the code that reads them is not known."""
        kind = type(value)
        everything = self._reads_everything(kind)
        try:
            attributes = vars(value)
        except TypeError:
            attributes = None
        if isinstance(attributes, dict):
            self._count(len(attributes), path)
            before = tuple(attributes)
            self._watch(getattr, value, "__class__", value.__class__, path)
            self._watch(getattr, value, "__dict__", attributes, path)
            self._watch(checks.elements, attributes, before, before, path)
            for name in before:
                if everything or self._counts(name, kind):
                    self._follow(dict.get, attributes, name, attributes[name], f"{path}.{name}")
        self._slots(value, path)

    def _reads_everything(self, kind: type) -> bool:
        """Return whether all attributes count: the class computes attributes, or is part of an installed package."""
        found = self._everything.get(kind)
        if found is None:
            bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
            computed = any(name in vars(base) for base in bases for name in ("__getattr__", "__getattribute__"))
            found = self._everything[kind] = computed or any(is_installed(base.__module__) for base in bases)
        return found

    def _slots(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind not in self._slot_names:
            bases = [b for b in kind.__mro__ if is_installed(b.__module__) or not is_library(b.__module__)]
            members = [item for base in bases for item in vars(base).items()]
            self._slot_names[kind] = [n for n, member in members if isinstance(member, types.MemberDescriptorType)]
        for name in self._slot_names[kind]:
            if self._reads_everything(kind) or self._counts(name, kind):
                self._follow(checks.slot, value, name, checks.slot(value, name), f"{path}.{name}")


def _modules_below(model: Module) -> set[int]:
    """Return the ids of a model's modules, whose modes are part of the key of a program."""
    found, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found.add(id(module))
            waiting += [value for value in vars(module).values() if isinstance(value, Module)]
    return found
