"""Options as keywords of a function: its signature and help come from the same declarations as the command line's."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minidl.errors import ConfigError, nearest
from minidl.run import declared
from minidl.run.config import CHOOSERS, Config
from minidl.run.options import Option, options

Function = TypeVar("Function", bound=Callable[..., Any])
STARTED = ("the launcher determines the number of replicas: start the script with `python -m minidl.launch --workers "
           "N script.py` or `mpiexec -n N python script.py`")  # fmt: skip


def with_options(names: Mapping[str, Option]) -> Callable[[Function], Function]:
    """Name these options in the signature of a function that takes them as `**given`, and describe them in its help."""

    def decorate(function: Function) -> Function:
        before = signature(function)
        own = [p for p in before.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        added = [Parameter(name, Parameter.KEYWORD_ONLY, default=_default(name, entry), annotation=entry.kind.__name__)
                 for name, entry in names.items()]  # fmt: skip
        setattr(function, "__signature__", before.replace(parameters=[*own, *added]))  # noqa: B010
        lines = [line for name, entry in names.items() for line in _described(name, entry)]
        function.__doc__ = "\n".join([(function.__doc__ or "").rstrip(), "", "    Options:", "", *lines])
        return function

    return decorate


def _declarations(name: str) -> list[tuple[str, Option]]:
    """Return the models, optimizers and methods that declare an option, and their declarations."""
    every = [pair for chooser in CHOOSERS for pair in declared.choices(chooser).items()]
    return [(choice, known.options[name]) for choice, known in every if name in known.options]


def _default(name: str, entry: Option) -> object:
    """Return the default for the signature; None if it depends on the model, optimizer or method."""
    defaults = {option.default for _, option in _declarations(name)} or {entry.default}
    return defaults.pop() if len(defaults) == 1 else None


def _described(name: str, entry: Option) -> list[str]:
    """Return the lines of the help for one option."""
    found = _declarations(name)
    words = entry.help
    if found:
        texts: dict[str, list[str]] = {}
        for choice, option in found:
            texts.setdefault(f"{option.help} (default: {option.default})", []).append(choice)
        words = "; ".join(f"for {', '.join(choices)}: {text}" for text, choices in texts.items())
    if entry.choices:
        words += f": {', '.join(entry.choices)}"
    return textwrap.wrap(words, 112, initial_indent=f"        {name:<17}", subsequent_indent=" " * 25)


def checked(call: str, given: Mapping[str, Any], names: Mapping[str, Option]) -> dict[str, Any]:
    """Return the given options as plain values. Raises ConfigError for a name that the function does not take."""
    for name in given:
        if name in ("workers", "ranks"):
            raise ConfigError(f"{call}: {name} is no option here: {STARTED}")
        if name not in names:
            raise ConfigError(f"{call}: unknown option {name!r}.{nearest(name, list(names))} Known: {', '.join(names)}")
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number, and a path to text, because options have these types."""
    return value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value


def of_training(*without: str) -> dict[str, Option]:
    """Return the options of a training by name, except for these."""
    return {name: entry for name, entry in options(Config).items() if entry.saved and name not in without}
