"""The first instructions of a command: no standard file is closed, Ctrl-C prints one line, the package is complete.

The imports of NumPy and Numba take most of the first second of a command. So minidl/__init__.py imports this file
before all others. It handles Ctrl-C only if this process was started as one of the commands, not if a program
imports minidl. run/signals.py replaces the handler while a run is trained.
"""

import os
import sys

# Python has loaded this module, unlike `signal`.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

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
        try:  # noqa: SIM105 (this file imports nothing that Python has not loaded yet)
            os.write(2, _message)
        except OSError:  # the terminal may be gone
            pass
    os._exit(128 + signum)


def _is_command() -> bool:
    first = sys.argv[0] if sys.argv else ""
    if first != "-m":  # Python's name for a module that it has not found yet
        return os.path.basename(first) in [f"minidl-{name}" for name in COMMANDS]
    words = sys.orig_argv
    modules = [words[i + 1] for i in range(1, len(words) - 1) if words[i][0:1] == "-" and words[i][-1:] == "m"]
    return bool(modules) and modules[0] in [f"minidl.{name}" for name in COMMANDS]


def _complete() -> None:
    """Execute minidl/__init__.py if Python has not done it.

    If the working folder holds a folder called minidl, such as a clone of the project, Python takes this folder for a
    namespace package. It then finds the modules of an editable installation, but not the __init__.py of their package.
    """
    package, here = sys.modules["minidl"], os.path.dirname(os.path.abspath(__file__))
    if getattr(package, "__file__", None) is None:
        from importlib.util import spec_from_file_location

        file = os.path.join(here, "__init__.py")
        spec = spec_from_file_location("minidl", file, submodule_search_locations=[here])
        assert spec and spec.loader
        package.__file__, package.__path__, package.__spec__ = file, [here], spec
        spec.loader.exec_module(package)


def _open_standard_files() -> None:
    """Open /dev/null in place of standard input, output or error, if the parent process has closed it.

    Otherwise the next file that is opened, such as the memory that replicas share, would get its number. What is
    printed would land in it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # its number is the lowest that is free: fd
            setattr(sys, name, open(fd, "w" if fd else "r"))  # noqa: SIM115


if _is_command():
    _open_standard_files()
    if getsignal(SIGINT) is default_int_handler:  # else Ctrl-C is ignored, or handled elsewhere
        signal(SIGINT, _end)
_complete()
