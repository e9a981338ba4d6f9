"""Fingerprint: everything that the Python code of a step reads, besides the batch and the values of parameters.

A recorded step contains results that Python code computed from settings: a dropout's p, a flag, a factor of the loss.
The step is valid while these settings are unchanged. A fingerprint lists all values that the model and the loss can
reach: attributes, elements of containers, bytes of arrays, closures, defaults, global variables, attributes of classes.

An attribute of an object counts only if its name occurs in the code. The code is the model, the loss, and each function
that they can reach by the names of attributes and globals. If the loss is a method of a trainer, the trainer's number
of steps counts only if the loss reads it. If the code computes names (`getattr`, `vars`), all attributes count.

Libraries (Python's, installed packages, minidl) are assumed to stay as they are. These changes are not noticed:

- writes that bypass `Module.__setattr__`: `vars(module)["p"] = 0.5`, `object.__setattr__(module, "p", 0.5)`
- attributes of a library that are replaced, such as `ops.relu = ops.tanh`
- the state of objects of extension modules that offer neither attributes nor a buffer, and the contents of files
- random generators of libraries other than Python's, NumPy's and minidl's
- values that a user's own `Function` reads by `np.asarray` of its arguments
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import functools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from minidl.engine.tensor import Tensor
from minidl.nn.module import Module, changes
from minidl.program import checks
from minidl.program.checks import GENERATORS, Check
from minidl.program.hidden import Unrecordable
from minidl.program.names import (
    COMPARISONS,
    CONSTRUCTORS,
    DYNAMIC_FUNCTIONS,
    NOT_CALLED,
    function_of,
    is_library,
    library_names,
    names_of,
    varies,
)

LARGEST = 2_000  # elements of containers that are compared at every step; 32 bytes of an array count as one element
MOST = 100_000  # values in a fingerprint

LEAVES = (int, bool, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range)
BY_TEXT = (float, complex, slice)  # nan equals nan, and 0.0 differs from -0.0
OWN = ("training", "arena", "statistics")  # attributes of a module that a program's key or its memory cover
DESCRIPTORS = types.MemberDescriptorType | types.GetSetDescriptorType
SKIPPED = ("builtins", "minidl.nn.module", "minidl.engine.tensor", "minidl.engine.parameter", "minidl.program.replay")


class Fingerprint:
    """The settings of a step, as they are at construction.

    roots: the model, and the loss if there is one. earlier: a fingerprint of the same step, whose names are used again.

    refusal: the reason why the settings cannot be compared, or "". generators: path -> random generator.
    """

    def __init__(self, roots: tuple[Any, ...], earlier: Fingerprint | None = None) -> None:
        self.roots = roots
        self.names: set[str] = set(earlier.names) if earlier else {"forward", "__wrapped__"}
        self.dynamic: bool = earlier.dynamic if earlier else False
        self.not_called: set[str] = earlier.not_called if earlier else NOT_CALLED | COMPARISONS
        self.changes = changes()  # before the walk: another thread may change a setting during it
        known = None
        while known != self._reach():  # a new name may be an attribute of an object seen before
            known = self._reach()
            self._walk()

    def _reach(self) -> tuple[int, bool, int]:
        return len(self.names), self.dynamic, len(self.not_called)

    def _walk(self) -> None:
        self.values: list[Any] = []  # types, leaves and identities: comparable with ==
        self.watched: list[Check] = []  # places to compare at every step
        self.modules: list[Check] = []  # places to compare if the counter of changes has moved
        self.generators: dict[str, Any] = {}
        self.refusal = ""
        self._kept: list[Any] = []  # alive, so that no other object gets the same id
        self._seen: dict[Any, int] = {}
        self._library_names: dict[type, set[str]] = {}
        self._size = 0
        try:
            for path, root in zip((type(self.roots[0]).__name__, "loss"), self.roots):
                self._visit(root, path)
        except Unrecordable as error:
            self.refusal = str(error)
        except RecursionError:
            self.refusal = "its settings are nested too deeply to compare"
        except Exception as error:  # raised by the code of an unusual object
            self.refusal = f"its settings cannot be compared: {type(error).__name__}: {error}"

    def unchanged(self, roots: tuple[Any, ...]) -> bool:
        """Return whether these are the same roots, and all settings are certainly unchanged."""
        if not all(map(operator.is_, roots, self.roots)):
            return False
        now = changes()
        if self.changes != now:
            if self.refusal or not checks.unchanged(self.modules):
                return False
            self.changes = now
        return bool(self.refusal) or checks.unchanged(self.watched)

    def equals(self, other: Fingerprint) -> bool:
        return self.values == other.values and self.refusal == other.refusal

    def first_change(self) -> str:
        """Return the path of a setting that differs now, or an empty string."""
        return checks.first_change([*self.watched, *self.modules])

    # -- the walk ----------------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in LEAVES:
            self.values.append((kind, value))
        elif kind in BY_TEXT or isinstance(value, np.generic | np.dtype):
            self.values.append((kind, repr(value)))
        elif id(value) in self._seen:
            self.values.append(("seen", self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._kept)
            self._kept.append(value)
            self._refuse_varying(value, path)
            if len(self.values) > MOST:
                raise Unrecordable(f"its settings are too many to compare ({path})")
            by_value, visit = _visit_of(kind)  # type: ignore[arg-type]
            self.values.append(kind if by_value else id(value))
            visit(self, value, path)

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
        """Return whether an attribute of an object of this class counts."""
        everything = self.dynamic and not kind.__module__.startswith("minidl.program")
        return everything or name in self.names or name in self._library_names.get(kind, ())

    def _refuse_varying(self, value: Any, path: str) -> None:
        if reason := varies(value, self.names):
            raise Unrecordable(f"it uses {path}, {reason}")

    def _identity(self, value: Any, path: str) -> None:
        """A tensor: only its identity counts. `Replayed` compares the arrays of parameters."""

    def _module(self, module: Module, path: str) -> None:
        attributes, kind = vars(module), type(module)
        self.values.append(kind)
        self.modules.append(Check(getattr, module, "__class__", kind, path))
        before = tuple(attributes), tuple(attributes.values())
        self.modules.append(Check(checks.entries, attributes, before, before, path))
        self._class(kind)
        for name, value in zip(*before, strict=True):
            if isinstance(value, Tensor):
                self.values.append((name, id(value)))
                self._kept.append(value)
            elif name not in OWN and (isinstance(value, Module) or self._counts(name, kind)):
                self.values.append(name)
                self._visit(value, f"{path}.{name}")
        self._slots(module, path)

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        if is_library(kind.__module__):
            if isinstance(value, Iterator):
                raise Unrecordable(f"{path} is an iterator, and reading it would change it")
            with suppress(TypeError):  # such as a number in shared memory
                self._array(memoryview(value), path)
            if hasattr(kind, "__array__"):
                raise Unrecordable(f"{path} is a {kind.__module__}.{kind.__name__}, whose values cannot be compared")
        self._class(kind)
        self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> None:
        """The attributes that the code names. If the class of the object computes attributes, all of them."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
        computed = any(name in vars(base) for base in bases for name in ("__getattr__", "__getattribute__"))
        try:
            attributes = vars(value)
        except TypeError:
            attributes = None
        if isinstance(attributes, dict) and (attributes or not isinstance(value, types.FunctionType)):
            self._count(len(attributes), path)
            before = tuple(attributes)
            self._watch(getattr, value, "__class__", value.__class__, path)
            self._watch(getattr, value, "__dict__", attributes, path)
            self._watch(checks.elements, attributes, before, before, path)
            for name in before:
                if computed or self._counts(name, kind):
                    self._follow(dict.get, attributes, name, attributes[name], f"{path}.{name}")
        self._slots(value, path, computed)

    def _slots(self, value: Any, path: str, computed: bool = False) -> None:
        for base in type(value).__mro__:
            if not is_library(base.__module__):
                for name, member in vars(base).items():
                    if isinstance(member, types.MemberDescriptorType) and (computed or self._counts(name, type(value))):
                        self._follow(checks.slot, value, name, checks.slot(value, name), f"{path}.{name}")

    def _class(self, kind: type, constructed: bool = False) -> None:
        """The methods of a class that the code may call, and the class attributes that the code names.

        constructed: the code may construct instances.
        """
        if (kind, constructed) in self._seen:
            return
        self._seen[kind, constructed] = 0
        bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
        libraries = [base for base in bases if is_library(base.__module__)]
        self._library_names[kind] = library_names(libraries, self.names, self.not_called)
        own = [base for base in bases if not is_library(base.__module__)]
        read = set()
        for base in own and bases:
            for name, member in vars(base).items():
                special = name[:2] == name[-2:] == "__"
                if function_of(member) is not None:
                    called = name not in self.not_called if special else name in self.names
                    if called or (constructed and name in CONSTRUCTORS):
                        read.add(name)
                elif not special and name not in OWN and self._counts(name) and not isinstance(member, DESCRIPTORS):
                    read.add(name)
        for base in own:
            members, where = base.__dict__, base.__name__
            for name in sorted(read):
                self._follow(types.MappingProxyType.get, members, name, members.get(name), f"{where}.{name}", base)

    def _type(self, kind: type, path: str) -> None:
        if not is_library(kind.__module__):
            self._class(kind, constructed=True)

    def _function(self, function: types.FunctionType, path: str, bound: bool = False) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            found = checks.cell(cell, None)
            self._follow(checks.cell, cell, name, found, name)
        if is_library(function.__module__):
            if function.__closure__ or bound:
                self.names |= names_of(code).attributes
            return
        names = names_of(code)
        self.names |= names.attributes
        self.dynamic |= names.dynamic
        self.not_called = NOT_CALLED if names.compares else self.not_called
        self._watch(getattr, function, "__code__", code, path)
        self.values.append(id(code))
        self._kept.append(code)
        for name in ("__defaults__", "__kwdefaults__"):
            self._follow(getattr, function, name, getattr(function, name), f"{path}.{name}")
        self._attributes(function, path)
        variables = function.__globals__
        for name in sorted(names.globals):
            if (id(variables), name) not in self._seen:
                self._seen[id(variables), name] = 0
                if name in variables:
                    self._follow(dict.get, variables, name, variables[name], name)
                elif hasattr(builtins, name):
                    self._refuse_varying(getattr(builtins, name), name)
                else:
                    self._watch(checks.absent, variables, name, None, name)
        for name in sorted(names.imports):
            if name in sys.modules:
                self._visit(sys.modules[name], name)

    def _method(self, method: types.MethodType, path: str) -> None:
        if isinstance(method.__func__, types.FunctionType):
            self.values.append(id(method.__func__))
            self._kept.append(method.__func__)
            self._function(method.__func__, path, bound=True)
        else:
            self._visit(method.__func__, path)
        self._visit(method.__self__, path)

    def _builtin(self, function: types.BuiltinMethodType, path: str) -> None:
        self.dynamic |= function.__name__ in DYNAMIC_FUNCTIONS
        self.values.append(function.__name__)
        if isinstance(function.__self__, types.ModuleType | type | None):
            self.values.append(id(function.__self__))
        else:
            self._visit(function.__self__, path)

    def _partial(self, partial: functools.partial[Any], path: str) -> None:
        self._visit(partial.func, path)
        self._visit(partial.args, path)
        self._visit(partial.keywords, path)

    def _variable(self, variable: contextvars.ContextVar[Any], path: str) -> None:
        self._follow(checks.variable, variable, path, checks.variable(variable, path), path)

    def _wrapper(self, wrapper: Any, path: str) -> None:
        """A property, a static method or a class method."""
        for name in ("fget", "__func__", "func"):
            if getattr(wrapper, name, None) is not None:
                self._visit(getattr(wrapper, name), path)

    def _namespace(self, module: types.ModuleType, path: str) -> None:
        """A Python module: the names that the code reads. Of a library, only generators and functions that vary."""
        attributes, library = vars(module), is_library(module.__name__)
        for name in sorted(self.names & attributes.keys()):
            value, where = attributes[name], f"{path}.{name}"
            if not library:
                self._follow(dict.get, attributes, name, value, where)
            elif isinstance(value, (types.ModuleType, *GENERATORS)):
                self._visit(value, where)
            else:
                self._refuse_varying(value, where)

    def _mapping(self, mapping: Any, path: str) -> None:
        self._count(2 * len(mapping), path)
        before = tuple(mapping), tuple(mapping.values())
        self._watch(checks.entries, mapping, before, before, path)
        self.values.append(len(mapping))
        for key, value in zip(*before, strict=True):
            self._visit(key, f"a key of {path}")
            self._visit(value, f"{path}[{key!r}]" if type(key) in LEAVES else path)
        self._subclass(mapping, path)

    def _sequence(self, container: Any, path: str) -> None:
        before = tuple(container)
        self.values.append(len(before))
        if not isinstance(container, tuple | frozenset):
            self._count(len(before), path)
            self._watch(checks.elements, container, before, before, path)
        for i, value in enumerate(before):
            self._visit(value, f"{path}[{i}]")
        self._subclass(container, path)

    def _subclass(self, container: Any, path: str) -> None:
        """The attributes and methods of a named tuple, or of another subclass of a container."""
        if type(container).__module__ not in ("builtins", "collections"):
            self._class(type(container))
            self._attributes(container, path)

    def _array(self, values: Any, path: str) -> None:
        before = checks.bytes_of(values)
        self._count(len(before) // 32, path)
        if isinstance(values, np.ndarray):
            if values.dtype.hasobject:
                raise Unrecordable(f"{path} is an array of objects, which cannot be compared")
            self.values.append((values.dtype.str, values.shape, values.strides))
        self.values.append(before)
        self._watch(checks.contents, values, before, before, path)

    def _generator(self, generator: Any, path: str) -> None:
        if isinstance(generator, random.SystemRandom):
            raise Unrecordable(f"it uses {path}, whose results differ from call to call")
        self.generators[path] = generator


Visit = Callable[[Fingerprint, Any, str], None]
VISITS: list[tuple[Any, bool, Visit]] = [  # types, whether equal values are the same, how to visit them
    (Tensor, False, Fingerprint._identity),
    (Module, False, Fingerprint._module),
    (np.ndarray | bytearray | memoryview | array.array, True, Fingerprint._array),
    (GENERATORS, False, Fingerprint._generator),
    (types.FunctionType, False, Fingerprint._function),
    (types.MethodType, True, Fingerprint._method),
    (types.BuiltinMethodType, True, Fingerprint._builtin),
    (functools.partial, True, Fingerprint._partial),
    (operator.attrgetter | operator.methodcaller, False, lambda self, getter, path: setattr(self, "dynamic", True)),
    (contextvars.ContextVar, False, Fingerprint._variable),
    (property | staticmethod | classmethod | functools.cached_property, True, Fingerprint._wrapper),
    (weakref.ref, True, lambda self, reference, path: self._visit(reference(), path)),
    (type, False, Fingerprint._type),
    (types.ModuleType, False, Fingerprint._namespace),
    (dict | types.MappingProxyType, True, Fingerprint._mapping),
    (list | tuple | set | frozenset | collections.deque, True, Fingerprint._sequence),
    (object, False, Fingerprint._object),
]


@functools.lru_cache(4096)
def _visit_of(kind: type) -> tuple[bool, Visit]:
    return next((by_value, visit) for kinds, by_value, visit in VISITS if issubclass(kind, kinds))
