"""The part of a fingerprint that finds code: functions, methods, classes, and modules of Python."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import types
from typing import Any

from minidl.nn.module import Module
from minidl.program import checks
from minidl.program.checks import GENERATORS
from minidl.program.hidden import Unrecordable
from minidl.program.libraries import (
    CONSTRUCTORS,
    CONSTRUCTS,
    UNBOUNDED_NAMES,
    is_installed,
    is_library,
    is_users,
)
from minidl.program.names import FOLLOWED, OPTIONAL, names_of
from minidl.program.walk import SKIPPED, Walk

DESCRIPTORS = types.MemberDescriptorType | types.GetSetDescriptorType


class CodeWalk(Walk):
    def _class(self, kind: type, constructed: bool = False) -> None:
        """Visit the methods of a class that the code may call, and the class attributes that the code names.

        constructed: whether the code may construct instances.
        """
        if (kind, constructed) in self._seen:
            return
        self._seen[kind, constructed] = 0
        if not is_library(type(kind).__module__):
            self._class(type(kind))
        bases = [base for base in kind.__mro__ if base.__module__ not in SKIPPED]
        libraries = [base for base in bases if is_library(base.__module__)]
        self._library_names[kind] = library_names(libraries, self.names, self._not_called)
        own = [base for base in bases if not is_library(base.__module__)]
        if not own:
            return
        members = [item for base in bases for item in vars(base).items() if not isinstance(item[1], DESCRIPTORS)]
        read = {name for name, member in members if self._read_in_class(name, member)}
        if not issubclass(kind, Module):  # layers are assumed to exist before the step
            by_class = any(isinstance(member, classmethod) for name, member in members if name in read)
            constructed = constructed or by_class or CONSTRUCTS in self.effects
        if constructed:
            read |= CONSTRUCTORS
        self._watch(getattr, kind, "__mro__", kind.__mro__, f"{kind.__name__}.__bases__")
        for base in own:
            attributes, where = base.__dict__, base.__name__
            names = tuple(attributes)
            self._watch(checks.names, attributes, names, names, f"an attribute of {where}", base)
            for name in sorted(read & attributes.keys()):
                self._follow(types.MappingProxyType.get, attributes, name, attributes[name], f"{where}.{name}", base)

    def _read_in_class(self, name: str, member: Any) -> bool:
        if name[:2] == name[-2:] == "__":
            return callable(member) and name not in self._not_called
        return self._counts(name)

    def _type(self, kind: type, path: str) -> None:
        if not is_library(kind.__module__):
            self._class(kind, constructed=True)

    def _function(self, function: types.FunctionType, path: str, bound: bool = False) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            found = checks.cell(cell, None)
            self._follow(checks.cell, cell, name, found, name)
        if not is_users(function):
            if is_installed(function.__globals__["__name__"]):
                self.names |= _installed_names(function)
            elif function.__closure__ or bound:
                self.names |= names_of(code).attributes
            return
        names = names_of(code)
        self._take_names(names)
        if not UNBOUNDED_NAMES.isdisjoint(names.attributes):
            raise Unrecordable(f"{path} uses {min(UNBOUNDED_NAMES & names.attributes)}, by which it can read anything")
        before = code, function.__defaults__, function.__kwdefaults__, not vars(function)
        self._watch(checks.function, function, before, before, path)
        self.values.append(id(code))
        self._kept.append(code)
        self._visit(function.__defaults__, f"{path}.__defaults__")
        self._visit(function.__kwdefaults__, f"{path}.__kwdefaults__")
        if vars(function):
            self._attributes(function, path)
        self._globals(function.__globals__, names.globals)
        for level, name in sorted(names.imports):
            self._import(level, name, function.__globals__)

    def _globals(self, variables: dict[str, Any], names: frozenset[str]) -> None:
        for name in sorted(names):
            if (id(variables), name) not in self._seen:
                self._seen[id(variables), name] = 0
                if name in variables:
                    self._follow(dict.get, variables, name, variables[name], name)
                    continue
                self._absent.setdefault(id(variables), (variables, set()))[1].add(name)
                if name not in FOLLOWED and hasattr(builtins, name):
                    self._take_effects(getattr(builtins, name), name)

    def _import(self, level: int, name: str, variables: dict[str, Any]) -> None:
        """Visit a module that a function imports when it runs. level: the number of dots before the name."""
        if level:
            name = importlib.util.resolve_name("." * level + name, variables.get("__package__") or "")
        if name in sys.modules:
            self._keys(sys.modules[name], name)
            self._visit(sys.modules[name], name)
        elif name.partition(".")[0] not in sys.stdlib_module_names:
            self._watch(checks.absent, sys.modules, name, False, f"the import of {name}")

    def _method(self, method: types.MethodType, path: str) -> None:
        if isinstance(method.__func__, types.FunctionType):
            self.values.append(id(method.__func__))
            self._kept.append(method.__func__)
            self._function(method.__func__, path, bound=True)
        else:
            self._visit(method.__func__, path)
        self._visit(method.__self__, path)

    def _builtin(self, function: types.BuiltinMethodType, path: str) -> None:
        self.values.append(function.__name__)
        if isinstance(function.__self__, types.ModuleType | None):
            self.values.append(id(function.__self__))
        else:
            self.names.add(function.__name__)
            self._visit(function.__self__, path)

    def _partial(self, partial: functools.partial[Any], path: str) -> None:
        self._visit(partial.func, path)
        self._visit(partial.args, path)
        self._visit(partial.keywords, path)

    def _wrapper(self, wrapper: Any, path: str) -> None:
        """Visit the functions of a property, a static method or a class method."""
        for name in ("fget", "fset", "fdel", "__func__", "func"):
            if getattr(wrapper, name, None) is not None:
                self._visit(getattr(wrapper, name), path)

    def _namespace(self, module: types.ModuleType, path: str) -> None:
        """Visit what the code reads of a Python module. Of a library, visit only modules, random generators, functions
        with effects and, if it is an installed package, other functions."""
        attributes = vars(module)
        if is_library(module.__name__):
            functions = (types.FunctionType,) if is_installed(module.__name__) else ()
            kinds = (types.ModuleType, *GENERATORS, *functions)
            for name in sorted(self.names & attributes.keys()):
                value, where = attributes[name], f"{path}.{name}"
                if isinstance(value, kinds):
                    self._visit(value, where)
                else:
                    self._take_effects(value, where)
            return
        if type(module) is not types.ModuleType:
            self._class(type(module))
        if self._beginnings or OPTIONAL in self.effects or "__getattr__" in attributes:
            self._keys(module, path)
        for name in sorted(attributes):
            if name == "__getattr__" or name in self.names or (name[:2] != "__" and self._counts(name)):
                self._follow(dict.get, attributes, name, attributes[name], f"{path}.{name}")

    def _keys(self, module: types.ModuleType, path: str) -> None:
        """Watch whether the module gets new attributes."""
        if not is_library(module.__name__):
            names = tuple(vars(module))
            self._watch(checks.names, vars(module), names, names, f"an attribute of {path}")


def function_of(member: Any) -> types.FunctionType | None:
    """Return the function of a method or property, as a class stores it; None for other attributes of a class."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return function if isinstance(function, types.FunctionType) else None


def library_names(bases: list[type], names: set[str], not_called: set[str]) -> set[str]:
    """Return the attributes that methods of library classes read. Methods that the code cannot call are left out.

    bases: the library classes. names: the names in the code. not_called: special methods that the code does not call.
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


@functools.lru_cache(1024)
def _installed_names(function: types.FunctionType) -> frozenset[str]:
    """Return the attributes that a function of an installed package reads, and the functions that it calls by name."""
    found: set[str] = set()
    waiting, seen = [function], {function}
    while waiting:
        function = waiting.pop()
        names = names_of(function.__code__)
        found |= names.attributes
        values = [function.__globals__.get(name) for name in names.globals]
        new = {value for value in values if isinstance(value, types.FunctionType)} - seen
        seen |= new
        waiting += new
    return frozenset(found)
