"""Fingerprint: everything that the Python code of a step reads, besides the batch and the values of parameters.

A recorded step contains results that Python code computed from settings: a dropout's p, a flag, a weight in the loss.
The step is valid while these settings are unchanged. A fingerprint lists the values that the model and the loss can
reach: attributes, elements of containers, bytes of arrays, closures, defaults, global variables, attributes of classes.

An attribute of an object is listed only if its name occurs in the code. This is the code of the model, of the loss, and
of each function that this code names. For example, if the loss is a method of a trainer, the trainer's step counter is
listed only if the loss reads it. If the code computes names, every attribute that may have such a name is listed: for
`getattr(self, f"layer{i}")` all that begin with "layer", for `vars(self)` all. If an installed package defines the
class of an object, all its attributes are listed. Code that can read anything (`eval`, `globals`) is refused.

Libraries (Python's, installed packages, minidl) are assumed to stay as they are. These changes are not noticed:

- writes that bypass `Module.__setattr__`: `vars(module)["p"] = 0.5`, `object.__setattr__(module, "p", 0.5)`
- attributes of a library that are replaced, such as `ops.relu = ops.tanh`
- the state of an object from an extension module, if the object has neither attributes nor a buffer
- the contents of files
- attributes that a method of an installed package reads from the user's objects
- classes that are registered with an abstract class (`ABC.register`)
- random generators of libraries other than Python's, NumPy's and minidl's
- values that a user's own `Function` reads by calling `np.asarray` on its arguments
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import operator
import random
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from minidl.engine.arena import Arena
from minidl.engine.changes import changes
from minidl.engine.tensor import Tensor
from minidl.nn.module import Module
from minidl.program import checks
from minidl.program.checks import GENERATORS, Check
from minidl.program.code import CodeWalk
from minidl.program.hidden import Unrecordable
from minidl.program.libraries import is_library, is_native
from minidl.program.walk import LEAVES, Walk

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))  # of a dictionary


class Fingerprint(CodeWalk):
    """The settings of a step, as they are at construction.

    roots: the model, and the loss if there is one. earlier: an older fingerprint of the same step; the new one
    starts with the names of attributes that it found.

    refusal: the reason why the settings cannot be compared, or "". generators: path -> random generator.
    """

    def __init__(self, roots: tuple[Any, ...], earlier: Walk | None = None) -> None:
        self.changes = changes()  # before the walk: another thread may change a setting during it
        super().__init__(roots, earlier)

    def visit_of(self, kind: type) -> tuple[bool, Callable[[Any, Any, str], None]]:
        return _visit_of(kind)

    def unchanged(self, roots: tuple[Any, ...]) -> bool:
        """Return whether these are the same roots, and no change of a setting has been noticed."""
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

    # -- objects and containers ---------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor, path: str) -> None:
        """Visit the attributes that the user added to a tensor. `Replayed` compares the arrays of parameters."""
        if not is_library(type(tensor).__module__):
            self._class(type(tensor))
            self._attributes(tensor, path)

    def _module(self, module: Module, path: str) -> None:
        attributes, kind = vars(module), type(module)
        self.values.append(kind)
        self.modules.append(Check(getattr, module, "__class__", kind, path))
        before = tuple(attributes), tuple(attributes.values())
        self.modules.append(Check(checks.entries, attributes, before, before, path))
        self._class(kind)
        everything = self._reads_everything(kind)
        if id(module) not in self._below_model and self._counts("training"):
            self._follow(getattr, module, "training", module.training, f"{path}.training")
        for name, value in zip(*before, strict=True):
            if isinstance(value, Tensor):
                self.values.append((name, id(value)))
                self._kept.append(value)
                if not is_library(type(value).__module__):
                    self._tensor(value, f"{path}.{name}")
            elif is_engines(name, value):
                continue  # the key of a program contains the mode, and `Replayed` compares the arenas
            elif isinstance(value, Module) or everything or self._counts(name, kind):
                self.values.append(name)
                self._visit(value, f"{path}.{name}")
        self._slots(module, path)

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        if any(is_native(base.__module__) for base in kind.__mro__[:-1]):
            if isinstance(value, Iterator) and is_library(kind.__module__):
                raise Unrecordable(f"{path} is an iterator, and reading it would change it")
            with suppress(TypeError):  # it has no buffer; a number in shared memory, for example, has one
                self._array(memoryview(value), path)
            if hasattr(kind, "__array__"):
                raise Unrecordable(f"{path} is a {kind.__module__}.{kind.__name__}, whose values cannot be compared")
        self._class(kind)
        self._attributes(value, path)

    def _variable(self, variable: contextvars.ContextVar[Any], path: str) -> None:
        self._follow(checks.variable, variable, path, checks.variable(variable, path), path)

    def _mapping(self, mapping: Any, path: str) -> None:
        self._count(2 * len(mapping), path)
        before = tuple(mapping), tuple(mapping.values())
        self._watch(checks.entries, mapping, before, before, path)
        self.values.append(len(mapping))
        for key, value in zip(*before, strict=True):
            self._compare(key)
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
            if isinstance(container, set | frozenset):
                self._compare(value)
            self._visit(value, f"{path}[{i}]")
        self._subclass(container, path)

    def _subclass(self, container: Any, path: str) -> None:
        """Visit the attributes and methods of a named tuple, or of another subclass of a type of a library."""
        if not is_library(type(container).__module__):
            self._class(type(container))
            self._attributes(container, path)

    def _array(self, values: Any, path: str) -> None:
        before = checks.bytes_of(values)
        self._count(len(before) // 32, path)
        if isinstance(values, np.ndarray | np.void):
            if values.dtype.hasobject:
                raise Unrecordable(f"{path} is an array of objects, which cannot be compared")
            self.values.append((values.dtype.str, values.shape, values.strides))
            layout = values.dtype, values.shape
            self._watch(checks.layout, values, layout, layout, path)
        self.values.append(before)
        self._watch(checks.contents, values, before, before, path)
        self._subclass(values, path)

    def _generator(self, generator: Any, path: str) -> None:
        if isinstance(generator, random.SystemRandom):
            self._take_effects(random.SystemRandom, path)
        self.generators[path] = generator
        self._subclass(generator, path)


def is_engines(name: Any, value: Any) -> bool:
    """Return whether the engine, and not the user, sets this attribute of a module."""
    return name == "training" or (name in ("arena", "statistics") and isinstance(value, Arena | None))


Visit = Callable[[Fingerprint, Any, str], None]
VISITS: list[tuple[Any, bool, Visit]] = [  # types, whether an equal instance may replace another, the visit
    (Tensor, False, Fingerprint._tensor),
    (Module, False, Fingerprint._module),
    (np.ndarray | np.void | bytearray | memoryview | array.array, True, Fingerprint._array),
    (GENERATORS, False, Fingerprint._generator),
    (types.FunctionType, False, Fingerprint._function),
    (types.MethodType, True, Fingerprint._method),
    (types.BuiltinMethodType, True, Fingerprint._builtin),
    (functools.partial, True, Fingerprint._partial),
    (operator.attrgetter | operator.methodcaller, False, lambda self, getter, path: self.prefixes.add("")),
    (contextvars.ContextVar, False, Fingerprint._variable),
    (property | staticmethod | classmethod | functools.cached_property, True, Fingerprint._wrapper),
    (weakref.ref, True, lambda self, reference, path: self._visit(reference(), path)),
    (VIEWS, False, lambda self, view, path: self._visit(view.mapping, path)),
    (Executor, False, lambda self, executor, path: self._take_effects(ThreadPoolExecutor, path)),
    (type, False, Fingerprint._type),
    (types.ModuleType, False, Fingerprint._namespace),
    (dict | types.MappingProxyType, True, Fingerprint._mapping),
    (list | tuple | set | frozenset | collections.deque, True, Fingerprint._sequence),
    (object, False, Fingerprint._object),
]


@functools.lru_cache(4096)
def _visit_of(kind: type) -> tuple[bool, Visit]:
    return next((by_value, visit) for kinds, by_value, visit in VISITS if issubclass(kind, kinds))
