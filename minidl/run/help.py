"""The pages of --help: one with all options; and one for each topic, option, model, optimizer and method."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minidl.errors import EXPECTED, ConfigError, explained, nearest, report
from minidl.run import declared
from minidl.run.config import CHOOSERS, GROUPS, Config, resolve, takers
from minidl.run.hints import meant, shown
from minidl.run.options import HelpWanted, Option, options
from minidl.run.presets import rows

WIDTH = 88
INDENT = 24  # the column of the descriptions
MOST_USED = ("data", "model", "epochs", "batch_size", "optimizer", "lr", "cluster", "ranks", "workers", "method",
             "validation", "out", "resume", "config")  # fmt: skip
METAVARS = {int: "N", float: "X", tuple: "A,B"}


class Command(NamedTuple):
    """A command line. config: the dataclass of its options. examples: lines to print unchanged."""

    program: str
    config: type
    description: str
    examples: str


def page(command: Command, topic: str = "") -> str:
    """Return the page about a topic, option, model, optimizer or method; by default the one with all options.

    Raises ConfigError if the topic is unknown.
    """
    known = options(command.config)
    word = topic.lstrip("-").replace("-", "_")
    if not topic:
        lines = _all(command)
    elif topic in GROUPS:
        lines = _group(known, topic)
    elif found := [chooser for chooser in CHOOSERS if topic in declared.choices(chooser)]:
        lines = _choice(known, found[0], topic)
    elif others := [entry for entry in known.values() if word == entry.name or topic in entry.choices]:
        lines = (line for entry in others for line in _option(known, entry))
    else:
        topics = [*GROUPS, *(name for chooser in CHOOSERS for name in declared.choices(chooser))]
        other = meant(topic, {entry.words: entry.choices for entry in known.values()})
        hint = nearest(topic, topics) or (f" Did you mean '{other}'?" if other else "")
        raise ConfigError(f"--help: unknown topic {shown(topic)}.{hint} Expected one of {', '.join(GROUPS)}, or an "
                          "option, a model, an optimizer or a method")  # fmt: skip
    return "\n".join(lines)


def plain_page(command: Command) -> str:
    """Return the page of a command with few options. command: `program` is its whole usage."""
    lines = [line for entry in options(command.config).values() for line in _line(entry)]
    return "\n".join([f"usage: {command.program}", "", *_wrapped(command.description), "", "options", *lines,
                      command.examples.rstrip()])  # fmt: skip


def run_plain(command: Command, work: Callable[[list[str]], None], argv: Sequence[str] | None, less: str) -> int:
    """Run a command with few options. Returns the exit code: 0, 2 for an error, 130 if interrupted.

    work: does it, with the words of the command line. less: how to need less memory.
    """
    try:
        work(sys.argv[1:] if argv is None else list(argv))
    except HelpWanted:
        return printed(plain_page(command), "this page")
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        return report(explained(error, less))
    return 0


def show(command: Command, topic: str) -> int:
    """Print a page of --help. Returns the exit code: 0, or 2 if the topic is unknown."""
    try:
        return printed(page(command, topic), "this page")
    except ConfigError as error:
        return report(str(error))


def printed(text: str, what: str) -> int:
    """Print a text. Returns the exit code: 0, or 2 if standard output cannot be written. what: the text, in the error.

    A pipe breaks if the reader ends early, as in `--help | head`: this is no error.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest, which Python writes at exit
        if not isinstance(error, BrokenPipeError):
            return report(f"cannot print {what}: {error.strerror}")
    return 0


def _all(command: Command) -> Iterator[str]:
    known = _current(options(command.config))
    yield f"usage: {command.program} [options]"
    yield f"       {command.program} --help NAME"
    yield from _wrapped("NAME: one of the topics below, or an option, a model, an optimizer or a method", " " * 7)
    yield from ("", *_wrapped(command.description))
    yield from ("", "most used")
    for name in MOST_USED:
        if name in known:
            yield from _line(known[name])
    for group, about in GROUPS.items():
        yield from ("", f"{group}: {about}")
        for entry in _common(known, group):
            if entry.name not in MOST_USED:
                yield from _line(entry)
        if group in CHOOSERS:
            yield from _declared(command, group)
    yield command.examples.rstrip()
    yield from ("", "defaults that depend on the data set, the model, the optimizer or the method")
    for conditions, values in rows():
        yield from _row("  " + " ".join(conditions.values()), _preset(values))


def _declared(command: Command, chooser: str) -> Iterator[str]:
    """Yield the options that only some models, optimizers or methods take."""
    if chooser != "method":
        for name, names in takers(chooser).items():
            if name in options(command.config):
                where = f"only for {', '.join(names)}" if len(names) < 6 else f"not for {_others(chooser, names)}"
                entry = declared.choices(chooser)[names[0]].options[name]
                yield from _row(_usage(entry), f"({where}) {_sentence(entry, with_choices=True)}")
        return
    seen: dict[str, str] = {}
    for name, choice in declared.choices(chooser).items():
        yield from ("", *_wrapped(f"only for the method {name}: {choice.about}", "  "))
        for entry in choice.options.values():
            if entry.name not in options(command.config):
                continue
            same = seen.setdefault(entry.help, name)
            if same == name:
                yield from _line(entry)
            else:
                yield from _row(_usage(entry), f"as for {same}{_default(entry)}")


def _others(chooser: str, names: Iterable[str]) -> str:
    return ", ".join(name for name in declared.choices(chooser) if name not in names)


def _group(known: Mapping[str, Option], group: str) -> Iterator[str]:
    yield f"{group}: {GROUPS[group]}"
    for entry in _common(_current(known), group):
        yield from ("", *_details(entry))
    if group in CHOOSERS:
        yield from ("", f"options that only some {group}s take; --help NAME describes them")
        for name, choice in declared.choices(group).items():
            if words := ", ".join(f"--{entry.words}" for entry in choice.options.values() if entry.name in known):
                yield from _row(f"  {name}", words)


def _option(known: Mapping[str, Option], entry: Option) -> Iterator[str]:
    """Yield the page of an option. If methods declare it differently, each declaration has its own section."""
    names = takers(entry.group).get(entry.name, []) if entry.group in CHOOSERS else []
    if not names:
        yield from _details(_current(known)[entry.name])
    seen: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        own = declared.choices(entry.group)[name].options[entry.name]
        condition = "".join(f" with --{other} {_values(needed)}" for other, needed in own.needs.items())
        seen.setdefault(tuple(_details(replace(own, needs={}))), []).append(name + condition)
    for lines, those in seen.items():
        yield from (*_wrapped(f"for --{entry.group} {', '.join(those)}:"), *lines)


def _common(known: Mapping[str, Option], group: str) -> list[Option]:
    """Return the options of a group without those that only some models, optimizers or methods take."""
    special = takers(group) if group in CHOOSERS else {}
    return [entry for entry in known.values() if entry.group == group and entry.name not in special]


def _choice(known: Mapping[str, Option], chooser: str, name: str) -> Iterator[str]:
    """Yield the page of a model, an optimizer or a method."""
    choice = declared.choices(chooser)[name]
    yield from _wrapped(f"{chooser} {name}: {choice.about}")
    if choice.papers:
        yield from ("", *_wrapped(choice.papers))
    entries = [entry for entry in choice.options.values() if entry.name in known]
    yield from ("", f"options that --{chooser} {name} takes, besides those that all take:" if entries else
                f"--{chooser} {name} takes no further options")  # fmt: skip
    for entry in entries:
        yield from _details(entry)
    presets = [(conditions, values) for conditions, values in rows() if conditions.get(chooser) == name]
    if presets:
        yield from ("", "defaults")
        for conditions, values in presets:
            yield from _row("  " + " ".join(conditions.values()), _preset(values))


def _details(entry: Option) -> Iterator[str]:
    """Yield the lines of an option, with one line for each allowed value that has a description."""
    meanings = {choice: meaning for choice, meaning in entry.choices.items() if meaning}
    yield from _row(_usage(entry), _sentence(entry, with_choices=not meanings))
    for choice, meaning in meanings.items():
        yield from _row("      " + choice, meaning)
    for other, needed in {**entry.needs, **entry.used_with}.items():
        yield from _row("", f"only with --{other} {_values(needed)}")


def _values(needed: str | Sequence[str]) -> str:
    return needed if isinstance(needed, str) else ", ".join(needed)


def _line(entry: Option) -> Iterator[str]:
    return _row(_usage(entry), _sentence(entry, with_choices=True))


def _usage(entry: Option) -> str:
    metavar = METAVARS.get(entry.kind, "NAME" if entry.choices else "PATH")
    return f"  --{entry.words}" + ("" if entry.kind is bool else f" {metavar}")


def _sentence(entry: Option, with_choices: bool) -> str:
    text = entry.help + (f": {', '.join(entry.choices)}" if entry.choices and with_choices else "")
    return text + ("" if entry.kind is bool else _default(entry))


def _default(entry: Option) -> str:
    default = "" if entry.default is None else _text(entry.default)
    return f" (default: {default})" if default else ""


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _preset(values: Mapping[str, Any]) -> str:
    return "  ".join(f"--{name.replace('_', '-')} {_text(value)}" for name, value in values.items())


def _current(known: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options with the defaults that apply if no option is given."""
    config: Config = resolve({})
    defaults = {name: value for name, value in vars(config).items() if value is not None and name != "data_dir"}
    return {name: replace(entry, default=defaults.get(name, entry.default)) for name, entry in known.items()}


def _row(left: str, text: str) -> Iterator[str]:
    """Yield lines with the text in a column to the right of `left`, or below it if `left` is too long."""
    lines = textwrap.wrap(text, WIDTH - INDENT, break_on_hyphens=False) or [""]
    if len(left) + 2 > INDENT:
        yield left
    else:
        yield left.ljust(INDENT) + lines.pop(0)
    yield from (" " * INDENT + line for line in lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
