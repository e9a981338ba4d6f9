"""Completion of the commands' options in a shell: `python -m minidl --completion bash >> ~/.bashrc`.

shtab generates the code from a parser of argparse. minidl does not parse with argparse (run/options.py), so this file
describes minidl's options to argparse.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping

from minidl.errors import ConfigError
from minidl.run.options import options

SHELLS = ("bash", "zsh", "tcsh")
PATHS = ("data_dir", "out", "config", "resume", "join", "evaluate", "init", "cluster")  # options that name files


def script(shell: str, commands: Mapping[str, type]) -> str:
    """Return the code for a shell. commands: {installed command: the dataclass of its options}.

    Raises ConfigError if the shell is unknown, or if shtab is not installed.
    """
    if shell not in SHELLS:
        raise ConfigError(f"--completion {shell}: expected one of {', '.join(SHELLS)}")
    try:
        import shtab
    except ImportError:
        raise ConfigError("--completion needs the package shtab: pip install 'minidl[completion]'") from None
    return "\n".join(shtab.complete(_parser(name, config), shell) for name, config in commands.items())


def _parser(command: str, config: type) -> ArgumentParser:
    """Return argparse's description of a command, with the values of an option that are plain words."""
    parser = ArgumentParser(command)
    for entry in options(config).values():
        name, text = "--" + entry.words, entry.help.replace("%", "%%")
        if entry.kind is bool:
            parser.add_argument(name, action="store_true", help=text)
            continue
        words = [word for word in entry.choices if word == word.lower()]
        argument = parser.add_argument(name, choices=words or None, help=text)
        if entry.name in PATHS:
            argument.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # type: ignore[attr-defined]
    return parser
