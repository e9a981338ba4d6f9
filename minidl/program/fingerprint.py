"""Fingerprint: everything that the Python code of a step reads, besides the batch and the values of parameters.

A recorded step contains what Python code computed from settings: a dropout's p, a flag, a factor of the loss. It is
valid while these are unchanged. A fingerprint is a list of all values that the model and the loss can reach:
attributes, elements of containers, bytes of arrays, closures, defaults, global variables, attributes of classes.

Of an object, only the attributes that the code names count. The code is every function that the code of the model or
of the loss can reach by the names of attributes and globals. Therefore a loss that is a method of a trainer does not
depend on the trainer's count of steps, unless it reads it. If the code computes names (`getattr`, `vars`), all count.

Libraries (Python's, installed packages, minidl) are assumed to stay as they are. Not noticed are

- writes that bypass `Module.__setattr__`: `vars(module)["p"] = 0.5`, `object.__setattr__(module, "p", 0.5)`
- attributes of a library that are replaced, such as `ops.relu = ops.tanh`
- the state of objects that have no Python attributes, of files, and of the environment
"""

from __future__ import annotations

import array
import builtins
import collections
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidl.engine.tensor import Tensor
from minidl.nn.module import Module, changes
from minidl.program import checks
from minidl.program.checks import GENERATORS, Check
from minidl.program.names import is_library, names_of, varies
from minidl.program.record import Unrecordable

LARGEST = 2_000  # elements of containers that are compared at every step; 32 bytes of an array count as one
MOST = 100_000  # values in a fingerprint

LEAVES = (int, bool, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range)
BY_TEXT = (float, complex, slice)  # nan equals nan, and 0.0 differs from -0.0
OWN = ("training", "arena", "statistics")  # attributes of a module that a program's key or its memory cover
CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
NOT_CALLED = CONSTRUCTORS | {"__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__",
                             "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__dir__"}  # fmt: skip
DESCRIPTORS = types.MemberDescriptorType | types.GetSetDescriptorType
SKIPPED = ("builtins", "minidl.nn.module", "minidl.engine.tensor", "minidl.engine.parameter", "minidl.program.replay")


def function_of(member: Any) -> types.FunctionType | None:
    """Return the function of a method or property, as a class stores it; None for other attributes of a class."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return function if isinstance(function, types.FunctionType) else None


def library_names(bases: list[type], names: set[str]) -> set[str]:
    """Return the names in the code of methods of library classes that code with these names may call."""
    called = [name for base in bases for name in vars(base)
              if name in names or (name[:2] == name[-2:] == "__" and name not in NOT_CALLED)]  # fmt: skip
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


class Fingerprint:
    """The settings of a step, as they are at construction.

    roots: name -> the model, and the loss. earlier: a fingerprint of the same step, whose names are used again.

    refusal: the reason why the settings cannot be compared, or "". generators: path -> random generator.
    """

    def __init__(self, roots: Mapping[str, Any], earlier: Fingerprint | None = None) -> None:
        self.roots = dict(roots)
        self.names: set[str] = set(earlier.names) if earlier else {"forward", "__wrapped__"}
        self.dynamic: bool = earlier.dynamic if earlier else False
        self.changes = changes()  # before the walk: another thread may change a setting during it
        known = None
        while known != (len(self.names), self.dynamic):  # a new name may be an attribute of an object seen before
            known = len(self.names), self.dynamic
            self._walk()

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
            for path, root in self.roots.items():
                self._visit(root, path)
        except Unrecordable as error:
            self.refusal = str(error)
        except RecursionError:
            self.refusal = "its settings are nested too deeply to compare"

    def unchanged(self, roots: Mapping[str, Any]) -> bool:
        """Return whether the roots and all settings are certainly unchanged."""
        if any([self.roots.get(name) is not root for name, root in roots.items()]):
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
        """Return the path of a setting that differs now, or ""."""
        return checks.first_change([*self.watched, *self.modules])

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise Unrecordable if the `with` block changes a setting or draws random numbers. Undo what it changed."""
        before = [*self.watched, *map(checks.renewed, self.modules)]
        with checks.other_random_states(self.generators) as drawn:
            try:
                yield
                if drawn():
                    raise Unrecordable(f"it draws random numbers from {drawn()}; minidl's ops.dropout can be recorded")
                changed = checks.first_change(before)
                if changed and not self.equals(Fingerprint(self.roots, self)):  # not only by an equal value
                    raise Unrecordable(f"{changed} changes from step to step")
            finally:
                checks.restore(before)

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
            if len(self.values) > MOST:
                raise Unrecordable(f"its settings are too many to compare ({path})")
            for kinds, by_value, visit in VISITS:
                if isinstance(value, kinds):
                    self.values.append(kind if by_value else id(value))
                    visit(self, value, path)
                    return
            self.values.append(id(value))
            self._object(value, path)

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
        return self.dynamic or name in self.names or name in self._library_names.get(kind, ())

    def _refuse_varying(self, value: Any, path: str) -> None:
        if varies(value, self.names):
            raise Unrecordable(f"it calls {path}, which returns other values at each call")

    def _identity(self, value: Any, path: str) -> None:
        """A tensor, or another value of which only the identity counts. `Replayed` compares parameters' arrays."""

    def _module(self, module: Module, path: str) -> None:
        attributes, kind = vars(module), type(module)
        self.values.append(kind)
        self.modules.append(Check(getattr, module, "__class__", kind, path))
        before = tuple(attributes), tuple(attributes.values())
        self.modules.append(Check(checks.entries, attributes, before, before, path))
        self._class(kind)
        for name, value in zip(*before, strict=True):
            if name not in OWN and (isinstance(value, Module | Tensor) or self._counts(name, kind)):
                self.values.append(name)
                self._visit(value, f"{path}.{name}")

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        if is_library(kind.__module__) and isinstance(value, Iterator):
            raise Unrecordable(f"{path} is an iterator, and reading it would change it")
        self._class(kind)
        self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> None:
        """The attributes of an object that the code names; all of them if its class computes attributes."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
        computed = any(name in vars(base) for base in bases for name in ("__getattr__", "__getattribute__"))
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = {}
        if isinstance(attributes, dict) and attributes:
            self._count(len(attributes), path)
            before = tuple(attributes)
            self._watch(getattr, value, "__class__", kind, path)
            self._watch(getattr, value, "__dict__", attributes, path)
            self._watch(checks.elements, attributes, before, before, path)
            for name in before:
                if computed or self._counts(name, kind):
                    self._follow(dict.get, attributes, name, attributes[name], f"{path}.{name}")
        for base in bases:
            for name, member in vars(base).items():
                is_slot = isinstance(member, types.MemberDescriptorType) and not is_library(base.__module__)
                if is_slot and (computed or self._counts(name, kind)):
                    self._follow(checks.slot, value, name, checks.slot(value, name), f"{path}.{name}")

    def _class(self, kind: type, constructed: bool = False) -> None:
        """The methods of a class that the code may call, and the class attributes that it names.

        constructed: the code may construct instances.
        """
        if (kind, constructed) in self._seen:
            return
        self._seen[kind, constructed] = 0
        bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
        self._library_names[kind] = library_names([base for base in bases if is_library(base.__module__)], self.names)
        own = [base for base in bases if not is_library(base.__module__)]
        read = set()
        for base in own and bases:
            for name, member in vars(base).items():
                special = name[:2] == name[-2:] == "__"
                if (function := function_of(member)) is not None:
                    called = name not in NOT_CALLED if special else name in self.names
                    if called or (constructed and name in CONSTRUCTORS):
                        read.add(name)
                        if base in own:
                            self.names |= names_of(function.__code__).attributes
                elif not special and name not in OWN and self._counts(name) and not isinstance(member, DESCRIPTORS):
                    read.add(name)
        for base in own:
            members, where = base.__dict__, base.__name__
            for name in sorted(read):
                self._follow(types.MappingProxyType.get, members, name, members.get(name), f"{where}.{name}", base)

    def _type(self, kind: type, path: str) -> None:
        self._refuse_varying(kind, path)
        if not is_library(kind.__module__):
            self._class(kind, constructed=True)

    def _function(self, function: types.FunctionType, path: str) -> None:
        self._refuse_varying(function, path)
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            found = checks.cell(cell, None)
            self._follow(checks.cell, cell, name, found, name)
        if is_library(function.__module__):
            return
        names = names_of(code)
        self.names |= names.attributes
        self.dynamic |= names.dynamic
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
        self._visit(method.__func__, path)
        self._visit(method.__self__, path)

    def _builtin(self, function: types.BuiltinMethodType, path: str) -> None:
        self._refuse_varying(function, path)
        self.values.append(function.__name__)
        if isinstance(function.__self__, types.ModuleType | type | None):
            self.values.append(id(function.__self__))
        else:
            self._visit(function.__self__, path)

    def _partial(self, partial: functools.partial[Any], path: str) -> None:
        self._visit(partial.func, path)
        self._visit(partial.args, path)
        self._visit(partial.keywords, path)

    def _wrapper(self, wrapper: Any, path: str) -> None:
        """A property, a static method or a class method."""
        for name in ("fget", "__func__", "func"):
            if getattr(wrapper, name, None) is not None:
                self._visit(getattr(wrapper, name), path)

    def _reference(self, reference: weakref.ref[Any], path: str) -> None:
        self._visit(reference(), path)

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
            raise Unrecordable(f"it calls {path}, which returns other values at each call")
        self.generators[path] = generator


Visit = Callable[[Fingerprint, Any, str], None]
VISITS: list[tuple[Any, bool, Visit]] = [  # types, whether equal values are the same, what to do
    (Tensor, False, Fingerprint._identity),
    (Module, False, Fingerprint._module),
    (np.ndarray | bytearray | memoryview | array.array, True, Fingerprint._array),
    (GENERATORS, False, Fingerprint._generator),
    (types.FunctionType, False, Fingerprint._function),
    (types.MethodType, True, Fingerprint._method),
    (types.BuiltinMethodType, True, Fingerprint._builtin),
    (functools.partial, True, Fingerprint._partial),
    (property | staticmethod | classmethod | functools.cached_property, True, Fingerprint._wrapper),
    (weakref.ref, True, Fingerprint._reference),
    (type, False, Fingerprint._type),
    (types.ModuleType, False, Fingerprint._namespace),
    (dict | types.MappingProxyType, True, Fingerprint._mapping),
    (list | tuple | set | frozenset | collections.deque, True, Fingerprint._sequence),
]
