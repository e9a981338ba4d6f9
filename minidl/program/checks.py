"""Checks: places that hold a value, compared by identity at every step, and restored after a recording.

A place is an attribute, an entry of a dictionary, the elements of a container, or the bytes of an array. A check stores
the value that the place held, and a function that reads the place again. `unchanged` compares about 20 places in a
microsecond. If a place holds another, perhaps equal object, it returns False; the fingerprint then compares values.

Random generators are not compared at every step. A recording compares their states before and after: a forward pass
that draws from one cannot be recorded.
"""

from __future__ import annotations

import contextvars
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

MISSING = object()
Keep = Callable[[Any, Any], bool]


class Check(NamedTuple):
    """`read(owner, key) is value` while the place is unchanged.

    path: the place's name in messages, such as "Net.act". home: the class whose attributes the owner shows, or None.
    """

    read: Callable[[Any, Any], Any]
    owner: Any
    key: Any
    value: Any
    path: str
    home: Any = None


def unchanged(checks: Iterable[Check]) -> bool:
    """Return whether every place holds the same object as before."""
    try:
        for read, owner, key, value, _, _ in checks:
            if read(owner, key) is not value:
                return False
    except (AttributeError, RuntimeError):  # RuntimeError: another thread changes a container during the comparison
        return False
    return True


# The functions that read a place. `dict.get`, `getattr` and `MappingProxyType.get` are used as well. The last one reads
# the attributes of a class as they are stored.


def cell(owner: types.CellType, _: Any) -> Any:
    """Return the value of a variable of a closure."""
    try:
        return owner.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING


def slot(owner: Any, name: str) -> Any:
    return getattr(owner, name, MISSING)


def variable(owner: contextvars.ContextVar[Any], _: Any) -> Any:
    return owner.get(MISSING)


absent = dict.__contains__  # False while a dictionary has no such key


def none_of(owner: dict[str, Any], names: frozenset[str]) -> bool:
    """Return True while a dictionary has none of these keys."""
    return owner.keys().isdisjoint(names)


def function(owner: types.FunctionType, before: tuple[Any, ...]) -> Any:
    """Return `before` if it still describes the function: (code, defaults, keyword defaults, has it no attributes?)."""
    code, defaults, keyword_defaults, plain = before
    same = owner.__code__ is code and owner.__defaults__ is defaults and owner.__kwdefaults__ is keyword_defaults
    return before if same and not (plain and owner.__dict__) else None


def elements(container: Any, before: tuple[Any, ...]) -> Any:
    """Return `before` if the container has exactly these elements, in this order; for a dictionary, these keys."""
    return before if len(container) == len(before) and all(map(operator.is_, container, before)) else None


def names(attributes: Any, before: tuple[str, ...]) -> Any:
    """Return `before` if a class or a module has exactly these attributes, in this order."""
    return before if tuple(attributes) == before else None


def entries(mapping: Any, before: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Any:
    """Return `before`, which is (keys, values), if the mapping has exactly these entries, in this order."""
    keys, values = before
    same = elements(mapping, keys) is keys and all(map(operator.is_, mapping.values(), values))
    return before if same else None


def contents(array: Any, before: bytes) -> Any:
    """Return `before` if an array has exactly these bytes."""
    return before if bytes_of(array) == before else None


def layout(array: np.ndarray, before: tuple[Any, ...]) -> Any:
    """Return `before`, which is (type, shape), if an array still has this type and this shape."""
    return before if (array.dtype, array.shape) == before else None


def bytes_of(array: Any) -> bytes:
    return array.tobytes() if hasattr(array, "tobytes") else bytes(array)


def first_change(checks: Iterable[Check]) -> str:
    """Return the path of the first place that has changed, or an empty string."""
    for check in checks:
        if not unchanged([check]):
            if check.read is none_of:
                return min(check.owner.keys() & check.key)
            if check.read is not entries:
                return check.path
            keys, values = check.value
            before, now = dict(zip(keys, values, strict=True)), dict(check.owner)
            names = [key for key in {**before, **now} if before.get(key, MISSING) is not now.get(key, MISSING)]
            names.sort(key=lambda name: name in ("training", "arena", "statistics"))  # last: they follow from others
            return f"{check.path}.{names[0]}" if names else check.path
    return ""


def renewed(check: Check) -> Check:
    """Return this check. If it compares the entries of a mapping, it now expects the present entries."""
    if check.read is not entries:
        return check
    now = tuple(check.owner), tuple(check.owner.values())
    return check._replace(key=now, value=now)


def restore(checks: Iterable[Check], but: Keep = lambda key, value: False) -> None:
    """Write the old values to all places that have changed and can be written.

    but: (key, value) -> whether to leave an entry of a mapping as it is.
    """
    for check in checks:
        if not unchanged([check]):
            with suppress(AttributeError, TypeError, ValueError):  # not every place can be written: a read-only view
                _write(check, but)


def _write(check: Check, but: Keep) -> None:
    read, owner, key, value = check[:4]
    if read is dict.get:
        owner[key] = value
    elif read is absent:
        if owner is not sys.modules:  # an import is not undone
            owner.pop(key, None)
    elif read is none_of:
        for name in key:
            owner.pop(name, None)
    elif read is function:
        owner.__code__, owner.__defaults__, owner.__kwdefaults__, plain = value
        if plain:
            owner.__dict__.clear()
    elif read is cell:
        owner.cell_contents = value
    elif read is variable:
        owner.set(value)
    elif read is names and check.home is not None:
        for name in [name for name in owner if name not in value]:
            delattr(check.home, name)
    elif check.home is not None or read in (getattr, slot):
        setattr(check.home or owner, key, value)
    elif read is entries:
        _write_entries(owner, dict(zip(*value, strict=True)), but)
    elif read is layout:
        owner.resize(value[1], refcheck=False)
    elif read is contents:
        bytes_now = np.frombuffer(value, np.uint8)
        if isinstance(owner, np.ndarray):
            owner[...] = bytes_now.view(owner.dtype).reshape(owner.shape)
        else:
            memoryview(owner).cast("B")[:] = bytes_now.data
    elif isinstance(owner, dict):  # the names of attributes, whose values have separate checks
        for name in [name for name in owner if name not in value]:
            if not isinstance(owner[name], types.ModuleType):  # an import is not undone
                del owner[name]
    else:
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(value)


def _write_entries(owner: dict[Any, Any], before: dict[Any, Any], but: Keep) -> None:
    before = {name: value for name, value in before.items() if name in owner or not but(name, value)}
    before |= {name: value for name, value in owner.items() if but(name, value)}
    for name in [name for name in owner if name not in before]:
        del owner[name]
    for name, value in before.items():
        if owner.get(name, MISSING) is not value:
            owner[name] = value
    if list(owner) != list(before):  # only if the order differs: other threads may be reading these attributes
        owner.clear()
        owner.update(before)


# Random generators.

GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def _get(source: Any) -> Any:
    """Return the state of a generator, or of the module `random` or `np.random`."""
    if hasattr(source, "getstate"):
        return source.getstate()
    if hasattr(source, "get_state"):
        return source.get_state(legacy=False)
    return getattr(source, "bit_generator", source).state


def _set(source: Any, state: Any) -> None:
    if hasattr(source, "setstate"):
        source.setstate(state)
    elif hasattr(source, "set_state"):
        source.set_state(state)
    else:
        getattr(source, "bit_generator", source).state = state


def _advance(source: Any) -> None:
    """Draw a number, so that a recording begins with another state than the step before."""
    if hasattr(source, "getrandbits"):
        source.getrandbits(32)
    elif hasattr(source, "get_state"):
        source.bytes(4)
    else:
        getattr(source, "bit_generator", source).random_raw()


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


@contextmanager
def other_random_states(generators: dict[str, Any]) -> Iterator[Callable[[], str]]:
    """Change the states of the generators within the `with` block, and restore them afterwards.

    generators: name -> generator. Yields a function that names a generator that the block has used, or returns "".
    """
    sources = {"np.random": np.random, "random": random, **generators}
    before = {name: _get(source) for name, source in sources.items()}
    try:
        for source in sources.values():
            _advance(source)
        start = {name: _comparable(_get(source)) for name, source in sources.items()}
        yield lambda: next((name for name, source in sources.items() if _comparable(_get(source)) != start[name]), "")
    finally:
        for name, source in sources.items():
            _set(source, before[name])
