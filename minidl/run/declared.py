"""Options that models, optimizers and methods declare, each in its own file, as the literal OPTIONS:

    OPTIONS = {
        "period": {"default": 8, "min": 1, "help": "steps between two averages"},
        "velocity": {"like": "momentum", "choices": {"local": "it stays local", "mixed": "it is averaged too"}},
    }

    default     its type is the option's type. None: the method chooses the value, as `help` says; a number is expected
    help        what the option does
    choices     {value or form: its meaning}; a form contains capital letters, such as torus:RxC
    min, max, above, below      the limits of a number
    needs       {other option: value, or list of values}: the option has an effect only with such a value of the other
    used_with   the same, but a file may have the option also where it has no effect
    instead_of  the option that has no effect if this one is set
    all_of      the name of a file in comm/methods: all of its options apply here, too
    like        the name of a model, an optimizer or a file in comm/methods that declares the same option: that
                declaration applies here, too, except for the keys that are given here. `choices` may then be a list
                of some of its values, which keep their meanings

Each method is a file with OPTIONS, a docstring and a class. A second literal, PRESET, is optional: {option: value} for
options that all methods take, such as lr; a user's own values override them. The class of a method with servers states
their number: `servers = 1`. If such a method has the option --center, it has servers only with --center rank. A class
with `alone = True` also trains a single replica, without others.

models.py declares all models, and optim/__init__.py all optimizers: in these two files, the keys of OPTIONS and ABOUT
are the names of the models and optimizers. One key is a form: FILE.py:FUNCTION stands for all models from users'
files.

The files are parsed, but not imported, so --help needs neither NumPy nor the methods. The closing bracket of a literal
must be at the beginning of a line. A new method needs its file and a line in comm/methods/__init__.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from minidl.run.options import Option, declared, matches

FILES = {"model": "minidl.models", "optimizer": "minidl.optim"}
METHODS = "minidl.comm.methods"


class Choice(NamedTuple):
    """A model, an optimizer or a method.

    about: one line. papers: the sentences of its docstring that cite papers. preset: its values of options that are not
    given. servers: the number of servers of a method. alone: whether a method also trains a single replica.
    """

    about: str
    papers: str
    options: Mapping[str, Option]
    preset: Mapping[str, Any] = MappingProxyType({})
    servers: int = 0
    alone: bool = False


@cache
def choices(chooser: str) -> dict[str, Choice]:
    """Return the models, optimizers or methods by name. chooser: model, optimizer or method."""
    if chooser in FILES:
        abouts, table = (_literal(FILES[chooser], name) for name in ("ABOUT", "OPTIONS"))
        return {name: Choice(abouts[name], "", _options(f"{chooser}.{section(name)}", table[name], table))
                for name in table}  # fmt: skip
    found = {}
    for name, target in _literal(METHODS, "METHODS").items():
        file, _, word = target.partition(".")
        module = f"{METHODS}.{file}"
        about, papers = described(_text(module).split('"""')[1])
        own = _options(f"{chooser}.{name}", _literal(module, "OPTIONS"), {})
        preset = _literal(module, "PRESET", optional=True)
        found[name] = Choice(about, papers, own, preset, *_of_class(module, word))
    return found


def servers(method: str, center: str | None) -> int:
    """Return the number of servers of a run. center: the value of --center; None: the method does not take it."""
    return choices("method")[method].servers if center in (None, "rank") else 0


def choice_of(chooser: str, value: str) -> str:
    """Return the name of the choice that a value is, or whose form it has: FILE.py:FUNCTION for my_net.py:build.

    The value must be valid.
    """
    known = choices(chooser)
    return value if value in known else next(name for name in known if matches(name, value))


def section(name: str) -> str:
    """Return the second part of the section of config.toml that holds a choice's options: lenet, or own for a form."""
    return name if name == name.lower() else "own"


def _options(group: str, table: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for name, declaration in table.items():
        entry = dict(declaration)
        if other := entry.pop("all_of", ""):
            found |= _options(group, _literal(f"{METHODS}.{other}", "OPTIONS"), {})
            continue
        if other := entry.pop("like", ""):
            origin = (others or {other: _literal(f"{METHODS}.{other}", "OPTIONS")})[other][name]
            if isinstance(some := entry.get("choices"), list):
                entry["choices"] = {value: origin["choices"][value] for value in some}
            entry = origin | entry
        found[name] = declared(name, group, **entry)
    return found


@cache
def _text(module: str) -> str:
    """Return the text of a module without importing it."""
    spec = find_spec(module)
    assert spec and spec.origin, module
    return Path(spec.origin).read_text(encoding="utf-8")


@cache
def _literal(module: str, name: str, optional: bool = False) -> Any:
    """Return the dict that a module assigns to this name: `NAME = {...}`, or lines up to one that begins with }.

    Only this part of the file is parsed, which is faster than to parse all of it.
    optional: whether to return an empty dict if the module does not assign to this name.
    """
    form = rf"^{name}\b[^=\n]*= (\{{[^\n]*\}}(?= *(?:#[^\n]*)?$)|\{{.*?^\}})"
    found = re.search(form, _text(module), re.MULTILINE | re.DOTALL)
    assert found or optional, f"{module} has no literal {name}"
    return ast.literal_eval(found[1]) if found else {}


def _of_class(module: str, name: str) -> tuple[int, bool]:
    """Return what the class of this name assigns to `servers` and `alone`; 0 and False if it assigns nothing."""
    body = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", _text(module), re.MULTILINE | re.DOTALL)
    assert body, f"{module} has no class {name}"
    found = re.search(r"^    servers = ([0-9]+)$", body[0], re.MULTILINE)
    alone = re.search(r"^    alone = True$", body[0], re.MULTILINE)
    return int(found[1]) if found else 0, alone is not None


def described(docstring: str) -> tuple[str, str]:
    """Return the first paragraph of a docstring as one line, and the later sentences that cite a year."""
    paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n") if not part.startswith(" ")]
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(paragraphs[1:]))
    return paragraphs[0], " ".join(sentence for sentence in sentences if re.search(r"\b(19|20)\d\d\b", sentence))
