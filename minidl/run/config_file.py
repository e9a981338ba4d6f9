"""Configuration files, in TOML: the options of a run by topic.

    [method]                [method.gossip]         options that only the method gossip takes
    method = "gossip"       mix = "mass"

A user's file may also hold options without a section. The files of earlier versions of minidl hold every option of
every method. `from_toml` reads all these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError, nearest
from minidl.reading import TOML_LIMIT, Unreadable, blaming, text, toml_table
from minidl.run import declared
from minidl.run.config import CHOOSERS, GROUPS, Config, complete, no_effect, options_of
from minidl.run.hints import shown
from minidl.run.options import Option, options

# No method takes all of these: a file without sections that holds all of them is from an earlier version.
EARLIER = {"bucket", "mix", "overlap", "velocity"}


class FileOptions(dict[str, Any]):
    """Options of a file. source: the beginning of an error message about them."""

    source = ""


def file_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options in the file that --config names; empty without --config. given: those of the command line."""
    return read_toml(given["config"]) if given.get("config") else {}


def read_toml(path: str | Path) -> FileOptions:
    """Read and check the options in a TOML file. Raises ConfigError, with the file's name, if one is invalid."""
    source = f"config file {shown(str(path))}: "
    with blaming(f"config file {shown(str(path))}", ConfigError):
        content = text(path, TOML_LIMIT)
    try:
        found = from_toml(content)
    except ConfigError as error:
        raise ConfigError(f"{source}{error}") from None
    found.source = source
    return found


def from_toml(content: str) -> FileOptions:
    """Read and check the options in TOML text.

    Raises ConfigError if the text is not TOML, a key is unknown, or a value is not allowed.
    """
    try:
        tables = toml_table(content)
    except Unreadable as error:
        raise ConfigError(str(error)) from None
    found = FileOptions()
    sections = _sections(tables)
    for section, table in sections.items():
        for key, value in table.items():
            entry = _option(section, key)
            if key in found:
                raise ConfigError(f"key {key!r} is given twice: in [{section}] and elsewhere")
            found[key] = entry.check(value)
    for section in sections:
        chooser, dot, name = section.partition(".")
        if dot and (chooser not in found or declared.section(declared.choice_of(chooser, found[chooser])) != name):
            raise ConfigError(f"[{section}] holds options of the {chooser} {name}: set {chooser} = \"{name}\" in "
                              f"[{chooser}], or remove [{section}]")  # fmt: skip
    if len(sections) == 1 and found.keys() >= EARLIER:
        return FileOptions((name, value) for name, value in found.items() if not no_effect(name, complete(found)))
    return found


def _sections(tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of each section; "": keys outside sections. Raises ConfigError for an unknown section."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for key, value in tables.items():
        if not isinstance(value, dict):
            found[""][key] = value
            continue
        if key not in GROUPS:
            raise ConfigError(f"unknown section [{key}].{nearest(key, list(GROUPS))} Known: {', '.join(GROUPS)}")
        found[key] = {}
        for inner, what in value.items():
            if not isinstance(what, dict):
                found[key][inner] = what
            elif key in CHOOSERS and inner in _by_section(key):
                found[f"{key}.{inner}"] = what
            else:
                known = ", ".join(_by_section(key)) if key in CHOOSERS else "none"
                raise ConfigError(f"unknown section [{key}.{inner}]. Known {key}s: {known}")
    return found


def _by_section(chooser: str) -> dict[str, str]:
    """Return the models, optimizers or methods by the second part of their section's name."""
    return {declared.section(name): name for name in declared.choices(chooser)}


def _option(section: str, key: str) -> Option:
    """Return the option of a key in a section. Raises ConfigError if the section has no such key."""
    known = {name: entry for name, entry in options(Config).items() if entry.saved}
    if key in options(Config) and key not in known:
        raise ConfigError(f"key {key!r} is for the command line only: give --{key}")
    if key not in known:
        raise ConfigError(f"unknown key {key!r}.{nearest(key, list(known))} Known: {', '.join(known)}")
    chooser, dot, name = section.partition(".")
    if dot and key not in declared.choices(chooser)[_by_section(chooser)[name]].options:
        raise ConfigError(f"[{section}]: {name} has no option {key!r}")
    if section and known[key].group != chooser:
        raise ConfigError(f"key {key!r} is in [{section}], but belongs into [{known[key].group}]")
    return known[key]


def to_toml(config: Config) -> str:
    """Return the saved options of a config that have an effect as TOML text. `from_toml` reads the same values."""
    sections: dict[str, list[str]] = {}
    kept = saved(config)
    for group, about in GROUPS.items():
        for name, entry in kept.items():
            if entry.group.partition(".")[0] == group:
                head = f"[{entry.group}]" + (f"  # {about}" if entry.group == group else "")
                sections.setdefault(head, []).append(f"{name} = {_toml_value(getattr(config, name))}")
    return "\n\n".join("\n".join([head, *lines]) for head, lines in sections.items()) + "\n"


def saved(config: Config) -> dict[str, Option]:
    """Return the options that config.toml holds: those that have an effect and a value, and are not for one command."""
    return {name: entry for name, entry in options_of(vars(config)).items()
            if entry.saved and getattr(config, name) not in (None, "")}  # fmt: skip


def _toml_value(value: str | int | float | bool | tuple[str, ...]) -> str:
    """Format a value. TOML equals JSON for these kinds, except that TOML requires DEL to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
