"""Options defined once: a dataclass field is both a command-line option and a key of a TOML file.

    @dataclass(frozen=True)
    class Config:
        lr: float = option(0.1, "learning rate", group="optimization", limits=ABOVE_ZERO)

`options(Config)` returns the descriptions of the fields. The command-line parser, the reader and the writer of TOML
files, the checks and the error messages are derived from them. This module does not depend on the meaning of options.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

from minidl.errors import ConfigError, nearest
from minidl.reading import TOML_LIMIT, Unreadable, text, toml_table


class Limits(NamedTuple):
    """The allowed values: a description for messages, and a test."""

    words: str
    allow: Callable[[Any], bool]


@dataclass(frozen=True)
class Option:
    """One option. kind: str, int, float, bool or tuple (of names, written a,b,c)."""

    name: str
    kind: type
    default: Any
    help: str
    group: str
    choices: tuple[str, ...]
    besides: Limits | None  # values allowed in addition to the choices
    limits: Limits | None
    saved: bool  # written to config.toml; False for options of a single command, such as --quiet

    @property
    def words(self) -> str:
        """The name as written on the command line: batch-size."""
        return self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """Convert an argument of the command line to a value. Returns invalid text unchanged; `check` rejects it."""
        if self.kind in (int, float):
            try:
                return self.kind(text)
            except ValueError:
                return text
        return text

    def check(self, value: Any) -> Any:
        """Convert a value to the option's kind. Raises ConfigError if its type is wrong, or if it is not allowed."""
        if self.kind is tuple:
            return self._check_words(value)
        if self.kind is float and type(value) is int:
            value = _float(value)
        right_kind = type(value) is self.kind  # not isinstance: bool is a subclass of int
        if not right_kind or (self.kind is float and not math.isfinite(value)):
            raise self._wrong(value)
        if self.limits and not self.limits.allow(value):
            raise self._wrong(value)
        if self.kind is str:
            self._check_text(value)
        return value

    def _check_words(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = () if value in ("", "none") else value.split(",")
        if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
            raise self._wrong(value)
        for word in value:
            self._check_choice(word)
        return tuple(value)

    def _check_text(self, value: str) -> None:
        if "\0" in value or not _is_unicode(value):
            raise self._wrong(value)
        if self.choices and not (self.besides and self.besides.allow(value)):
            self._check_choice(value)

    def _check_choice(self, word: str) -> None:
        if word not in self.choices:
            known = ", ".join(self.choices) + (f", {self.besides.words}" if self.besides else "")
            raise ConfigError(f"unknown {self.words} {word!r}.{nearest(word, self.choices)} Known: {known}")

    def _wrong(self, value: Any) -> ConfigError:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
                 tuple: "names separated by commas"}  # fmt: skip
        limits = f" {self.limits.words}" if self.limits else ""
        return ConfigError(f"{self.words}: expected {kinds[self.kind]}{limits}, got {value!r}")


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8 are decoded as lone surrogates
        return False
    return True


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    besides: Limits | None = None,
    limits: Limits | None = None,
    saved: bool = True,
) -> Any:
    """Return a dataclass field that defines an option; see `Option` for the arguments."""
    described = dict(help=help, group=group, choices=choices, besides=besides, limits=limits, saved=saved)
    return field(default=default, metadata=described)


@cache
def options(config: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of its fields."""
    kinds = get_type_hints(config)
    return {
        entry.name: Option(
            name=entry.name,
            kind=getattr(kinds[entry.name], "__origin__", kinds[entry.name]),
            default=entry.default,
            **entry.metadata,
        )
        for entry in fields(config)
    }


# The command line.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(config: type, argv: list[str], program: str, **texts: str) -> dict[str, Any]:
    """Parse and check the options in `argv`. Options that are not given are absent from the result.

    texts: description and epilog of --help. Raises ConfigError if an option is unknown or its value is not allowed.
    """
    parser = _Parser(
        prog=program,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options]",
        **texts,  # type: ignore[arg-type]
    )
    known = options(config)
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(o.group for o in known.values())}
    for entry in known.values():
        _add(groups[entry.group], entry)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise _unknown_argument(unknown[0], ["--" + entry.words for entry in known.values()])
    return {
        name: value if known[name].kind is bool else known[name].check(known[name].parse(value))
        for name, value in vars(given).items()
    }


def _add(group: Any, entry: Option) -> None:
    if entry.kind is bool:
        group.add_argument("--" + entry.words, action="store_true", help=entry.help)
        return
    default = "none" if entry.default == () else str(entry.default)
    text = entry.help + (": " + ", ".join(entry.choices) if entry.choices else "")
    text += f" (default: {default})" if default else ""
    metavar = {int: "N", float: "X", str: "NAME" if entry.choices else "PATH", tuple: "A,B"}[entry.kind]
    group.add_argument("--" + entry.words, metavar=metavar, help=text.replace("%", "%%"))


def _unknown_argument(argument: str, known: list[str]) -> ConfigError:
    name = argument.split("=")[0]
    if name.startswith("-"):
        return ConfigError(f"unknown option {name}.{nearest(name, known)} --help lists all options")
    return ConfigError(f"unexpected argument {argument!r}: every option begins with --; see --help")


# Files.


def read_toml(config: type, path: str | Path) -> dict[str, Any]:
    """Read and check the options in a TOML file. Raises ConfigError, with the file's name, if one is invalid."""
    try:
        return from_toml(config, text(path, TOML_LIMIT))
    except OSError as error:
        raise ConfigError(f"cannot read config file {str(path)!r}: {error.strerror}") from None
    except (Unreadable, ConfigError) as error:
        raise ConfigError(f"config file {str(path)!r}: {error}") from None


def from_toml(config: type, content: str) -> dict[str, Any]:
    """Read and check the options in TOML text.

    Raises ConfigError if a key is unknown or a value is not allowed, Unreadable if the text is not TOML.
    """
    known = {name: entry for name, entry in options(config).items() if entry.saved}
    values = toml_table(content)
    for key in values:
        if key in options(config) and key not in known:
            raise ConfigError(f"key {key!r} is for the command line only: give --{key}")
        if key not in known:
            raise ConfigError(f"unknown key {key!r}.{nearest(key, list(known))} Known: {', '.join(known)}")
    return {key: known[key].check(value) for key, value in values.items()}


def to_toml(config: Any) -> str:
    """Return all saved options of a config as TOML text, by group. `from_toml` reads back the same values."""
    lines: list[str] = []
    group = ""
    for name, entry in options(config.__class__).items():
        if entry.saved:
            if entry.group != group:
                group = entry.group
                lines += ["", f"# {group}"]
            lines.append(f"{name} = {_toml_value(getattr(config, name))}")
    return "\n".join(lines).strip() + "\n"


def _toml_value(value: str | int | float | bool | tuple[str, ...]) -> str:
    """Format a value. TOML equals JSON for these kinds, except that TOML requires DEL to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
