"""Options defined once: a dataclass field is both a command-line option and a key of a configuration file.

    @dataclass(frozen=True)
    class Config:
        lr: float = option(0.1, "learning rate", group="optimizer", limits=limits(above=0))

`options(Config)` returns the descriptions of the fields. The command-line parser, the pages of --help, the checks and
the error messages are derived from these descriptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from minidl.errors import ConfigError, nearest
from minidl.run.hints import shown, unknown_option
from minidl.schema import LARGEST, is_plain

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
         tuple: "names separated by commas"}  # fmt: skip
# A choice with capital letters is a form: torus:RxC allows torus:2x3. These words stand for a path, a file, a name in
# Python, the first digits of a SHA-256, or a number above 0 (SHARE: at most 1). NUMBER stands for a whole number, and
# any other word in capitals for one of 1 or more.
WORDS = {"PATH": ".+", "FILE": ".+", "FUNCTION": "[A-Za-z_][A-Za-z_0-9]*", "HASH": "[0-9a-f]{8,64}",
         "NUMBER": "[0-9]{1,4}",
         "ALPHA": "(?=[0.]*[1-9])[0-9]*[.]?[0-9]+(e[+-]?[0-9]+)?",
         "SHARE": "(?=[0.]*[1-9])(0?[.][0-9]+|1|1[.]0+|[0-9]([.][0-9]+)?e-[0-9]+)"}  # fmt: skip


class Limits(NamedTuple):
    """The allowed values: a description for messages, and a test."""

    words: str
    allow: Callable[[Any], bool]


def limits(
    min: float | None = None, max: float | None = None, above: float | None = None, below: float | None = None
) -> Limits | None:
    """Return the limits min <= value <= max, above < value < below; None if no bound is given."""
    bounds = [(min, f"of {min} or more"), (above, f"above {above}"), (max, f"of at most {max}"),
              (below, f"below {below}")]  # fmt: skip
    words = " and ".join(text for bound, text in bounds if bound is not None)
    if min is not None and max is not None:
        words = f"between {min} and {max}"

    def allow(value: Any) -> bool:
        return ((min is None or value >= min) and (max is None or value <= max)
                and (above is None or value > above) and (below is None or value < below))  # fmt: skip

    return Limits(words, allow) if words else None


@dataclass(frozen=True)
class Option:
    """One option.

    kind: str, int, float, bool or tuple (of names, written a,b,c).
    group: the topic of --help, and the section of the configuration file, such as method, or method.gossip.
    choices: the allowed values or forms (see WORDS), each with its meaning or ""; empty: all values.
    saved: written to config.toml; False for options of a single command, such as --quiet.
    needs: {other option: value or form, or a list of them}: this option has an effect only if the other one has such
        a value.
    used_with: {other option: values or forms}: likewise, but an option without effect is refused only on the command
        line. In a file it is allowed, and keeps its value.
    instead_of: the name of another option, which has no effect if this one is neither 0 nor False.
    """

    name: str
    kind: type
    default: Any
    help: str
    group: str
    choices: Mapping[str, str]
    limits: Limits | None
    saved: bool
    needs: Mapping[str, str | Sequence[str]]
    used_with: Mapping[str, Sequence[str]]
    instead_of: str

    @property
    def words(self) -> str:
        """The name as written on the command line: batch-size."""
        return self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """The allowed values, for messages."""
        if self.choices and self.kind is not tuple:
            return ", ".join(self.choices)
        return KINDS[self.kind] + (f" {self.limits.words}" if self.limits else "")

    def parse(self, text: str) -> Any:
        """Convert an argument of the command line to a value. Returns invalid text unchanged; `check` rejects it."""
        if self.kind in (int, float):
            try:
                return plain_number(text, self.kind)
            except ValueError:
                return text
        return text

    def check(self, value: Any) -> Any:
        """Convert a value to the option's kind. Raises ConfigError if its type is wrong, or if it is not allowed.

        None is allowed if it is the default.
        """
        if value is None and self.default is None:
            return None
        if self.kind is tuple:
            return self._check_words(value)
        if self.kind is float and type(value) is int:
            value = _float(value)
        right_kind = type(value) is self.kind  # not isinstance: bool is a subclass of int
        if not right_kind or (self.kind is float and not math.isfinite(value)):
            raise self._wrong(value)
        if self.limits and not self.limits.allow(value):
            raise self._wrong(value)
        if self.kind is int and abs(value) > LARGEST:
            raise ConfigError(f"{self.words}: {shown(value)} is too large: expected at most 2^53")
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
            if list(value).count(word) > 1:
                raise ConfigError(f"{self.words}: {word} is given twice: give it once")
        return tuple(value)

    def _check_text(self, value: str) -> None:
        if not is_plain(value):
            raise self._wrong(value)
        if self.choices:
            self._check_choice(value)

    def _check_choice(self, word: str) -> None:
        for choice in self.choices:
            if matches(choice, word):
                return
        for choice in self.choices:
            beginning, suffix = re.split("[A-Z]", choice)[0], re.search("(?<=[A-Z])[.][a-z]+", choice)
            if (beginning and beginning != choice and word.startswith(beginning)) or (suffix and suffix[0] in word):
                example = f", such as {word}:build" if choice == "FILE.py:FUNCTION" and word.endswith(".py") else ""
                for number in ("ALPHA", "SHARE"):
                    example += f", where {number} is a number above 0" if choice.endswith(number) else ""
                raise ConfigError(f"{self.words}: {shown(word)} is not of the form {choice}{example}")
        plain = [choice for choice in self.choices if choice == choice.lower()]
        raise ConfigError(f"unknown {self.words} {shown(word)}.{nearest(word.strip().lower(), plain)} "
                          f"Known: {', '.join(self.choices)}")  # fmt: skip

    def _wrong(self, value: Any) -> ConfigError:
        kind = KINDS[self.kind] + (f" {self.limits.words}" if self.limits else "")
        return ConfigError(f"{self.words}: expected {kind}, got {shown(value)}")


def unmet(entry: Option, values: Mapping[str, Any], conditions: Mapping[str, str | Sequence[str]]) -> str:
    """Return why an option has no effect: which of `conditions` (see `Option.needs`) is not met; "" if all are met."""
    for other, needed in conditions.items():
        forms = [needed] if isinstance(needed, str) else needed
        if not any(matches(form, values[other]) for form in forms):
            allowed = " or ".join([", ".join(forms[:-1])] * (len(forms) > 1) + [forms[-1]])
            return (f"{entry.words} has an effect only with {other} {allowed}, and {other} is "
                    f"{shown(values[other])}: leave it out, or change {other}")  # fmt: skip
    return ""


def plain_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Convert the text of a number. Raises ValueError also for forms that only Python reads, such as 1_000."""
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError(text)
    return kind(text)


def matches(choice: str, value: Any) -> bool:
    """Return whether a value is this choice, or has its form: matches("torus:RxC", "torus:2x3")."""
    if value == choice or not isinstance(value, str) or choice == choice.lower():
        return value == choice and choice == choice.lower()
    pattern = re.sub("[A-Z]+", lambda word: WORDS.get(word[0], "0*[1-9][0-9]*"), re.escape(choice))
    return re.fullmatch(pattern, value, re.DOTALL) is not None


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def option(default: Any, help: str, *, group: str, **more: Any) -> Any:
    """Return a dataclass field that defines an option. more: other fields of `Option`."""
    plain: dict[str, Any] = dict(choices={}, limits=None, saved=True, needs={}, used_with={}, instead_of="")
    return field(default=default, metadata=plain | dict(help=help, group=group) | more)


def declared(name: str, group: str, default: Any, help: str, **more: Any) -> Option:
    """Return an option that the file of a model, an optimizer or a method declares in OPTIONS (see declared.py).

    default: None means that the option is a number, and that the method chooses it if it is not given.
    """
    bounds = {bound: more.pop(bound) for bound in ("min", "max", "above", "below") if bound in more}
    more = dict(choices={}, needs={}, used_with={}, instead_of="") | more
    kind = float if default is None else type(default)
    return Option(name, kind, default, help, group, limits=limits(**bounds), saved=True, **more)


@cache
def options(config: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of its fields."""
    kinds = get_type_hints(config)
    return {
        entry.name: Option(
            name=entry.name,
            kind=getattr(kinds[entry.name], "__origin__", kinds[entry.name]),
            **{"default": entry.default, **entry.metadata},
        )
        for entry in fields(config)
    }


# The command line.


class HelpWanted(Exception):
    """The command line contains --help. topic: the word after it, such as gossip, or ""."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


def parse(config: type, argv: Sequence[str]) -> dict[str, Any]:
    """Parse and check the options in `argv`. Options that are not given are absent from the result.

    If an option is given twice, the last value counts. Raises HelpWanted for --help or -h, ConfigError for an unknown
    option or a value that is not allowed.
    """
    _find_help(argv)
    known = {"--" + entry.words: entry for entry in options(config).values()}
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known:
            raise unknown_option(word, {entry.words: entry.choices for entry in known.values()})
        entry = known[name]
        if entry.kind is bool:
            if equals:
                raise ConfigError(f"{name} takes no value, got {shown(text)}: write only {name}")
            given[entry.name] = True
            continue
        if not equals:
            text = _value(entry, next(words, None))
        if not text and entry.kind is str and not entry.choices:
            raise ConfigError(f"{name}: expected the path of a file or folder, got ''")
        given[entry.name] = entry.check(entry.parse(text))
    return given


def _find_help(argv: Sequence[str]) -> None:
    """Raise HelpWanted for --help, which may follow other options; ConfigError if it is followed by several words."""
    for number, word in enumerate(argv):
        name, equals, topic = word.partition("=")
        if name in ("--help", "-h"):
            after = [topic] * bool(equals) + list(argv[number + 1 :])
            if len(after) > 1:
                raise ConfigError(f"--help shows one page: leave out {shown(after[1])}")
            raise HelpWanted("".join(after))


def _value(entry: Option, text: str | None) -> str:
    """Return the word after an option as its value. Raises ConfigError if there is none, or if it is an option."""
    if text is None or text.startswith("--"):
        found = "the command line ends" if text is None else f"{shown(text)} follows"
        expected = "the path of a file or folder" if entry.kind is str and not entry.choices else entry.expected
        raise ConfigError(f"--{entry.words}: expected a value, but {found}: {expected}")
    return text
