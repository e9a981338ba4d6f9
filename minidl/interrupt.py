"""Ctrl-C while a command starts: one line instead of a traceback.

The imports of NumPy and Numba take most of the first second of a command. So minidl/__init__.py imports this file
before all others. It has an effect only if this process was started as one of the commands, not if a program imports
minidl. run/signals.py replaces the handler while a run is trained.
"""

from __future__ import annotations

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal  # the module `signal` imports others
from contextlib import suppress

COMMANDS = ("train", "simulate", "launch")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # set by MPI's launchers: the first rank reports for all
_message = b"minidl: stopped; there was nothing to save yet\n"


def finish() -> None:
    """From now on, Ctrl-C ends the process without a line: the command has reported its result."""
    global _message
    _message = b""


def restore() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: this process executes a program of the user."""
    if getsignal(SIGINT) is _end:
        signal(SIGINT, default_int_handler)


def _end(signum: int, frame: object) -> None:
    if all(os.environ.get(name, "0") == "0" for name in RANKS):
        with suppress(OSError):  # the terminal may be gone
            os.write(2, _message)
    os._exit(128 + signum)


def _is_command() -> bool:
    first = sys.argv[0] if sys.argv else ""
    if first != "-m":  # Python's name for a module that it has not found yet
        return os.path.basename(first) in [f"minidl-{name}" for name in COMMANDS]
    words = sys.orig_argv
    modules = [words[i + 1] for i in range(1, len(words) - 1) if words[i][0:1] == "-" and words[i][-1:] == "m"]
    return bool(modules) and modules[0] in [f"minidl.{name}" for name in COMMANDS]


if _is_command() and getsignal(SIGINT) is default_int_handler:  # else Ctrl-C is ignored, or handled elsewhere
    signal(SIGINT, _end)
