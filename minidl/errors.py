"""Errors that a user can act on: each message is one line with the value, what was expected, and what to do.

The command-line tools print this line and exit with code 2. Programs that import minidl catch `MinidlError`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

MODULES = {"Matplotlib": "matplotlib", "tensorboardX": "tensorboardX"}  # of optional packages
LONGEST = 2000  # characters of a message that is printed: it may quote a hostile file


class MinidlError(Exception):
    """The base class of all errors that minidl raises intentionally.

    run: the folder of the run that the error has ended, in the process that leads the run.
    """

    run: Path | None = None


class ConfigError(MinidlError, ValueError):
    """An unknown option, key, model, data set or method, or a value out of range."""


class DataError(MinidlError, ValueError):
    """A data file is missing, truncated or corrupt, or the data set in it is not valid."""


class CheckpointError(MinidlError, ValueError):
    """A checkpoint cannot be read or written, or does not fit the model, the optimizer or the configuration."""


class DivergedError(MinidlError, ArithmeticError):
    """The loss or a weight became NaN or infinite."""


class AbortedError(MinidlError):
    """Another replica has failed and reports its error. This process exits with code 2 and prints nothing."""


class ReplicaLeftError(MinidlError):
    """Another rank of a script has left a training by an exception, without which this rank cannot complete it.

    If the exception ends the script of that rank, that rank reports it, and this error is not reported.
    """


class ShapeError(MinidlError, ValueError):
    """Arrays have the wrong shapes or types for an operation.

    While the error propagates through the modules of a model, they add the layer and its path (nn/module.py).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.layer = ""  # the layer that raised it: Conv2d(1, 32, 5x5)
        self.path = ""  # its path in the model: layer1.0.conv1
        self._module: object = None

    def name_layer(self, module: object, description: str, named_modules: Iterable[tuple[str, object]]) -> None:
        """Record the layer: it makes the first call. Outer modules make later calls; these record its path."""
        if self._module is None:
            self._module, self.layer = module, description
        else:
            self.path = next((name for name, inside in named_modules if inside is self._module), self.path)

    def __str__(self) -> str:
        where = f"layer {self.path}, {self.layer}" if self.path else self.layer
        return f"{where}: {self.message}" if where else self.message


EXPECTED = (MinidlError, MemoryError, OSError)  # command lines report these; any other exception is a fault of minidl


def explained(error: BaseException, less: str) -> str:
    """Return the message for one of the EXPECTED errors. less: how to need less memory."""
    if isinstance(error, MemoryError):
        return f"out of memory ({error}): {less}"
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or 'a file'}"
    return str(error)


def report(message: str) -> int:
    """Print an error as one line to standard error. Return the exit code 2."""
    words = " ".join(message.split())
    shortened = words if len(words) <= LONGEST else words[:LONGEST] + " ..."
    tell("minidl: error: " + printable(shortened))
    return 2


def tell(line: str) -> None:
    """Print a line to standard error at once. Lines of several ranks then do not mix, also without a buffer."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey. Names in files and names of files may contain them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def require_package(what: str, name: str, extra: str) -> None:
    """Raise ConfigError if an optional package is not installed. what: needs it. extra: of minidl, that contains it."""
    from importlib.util import find_spec

    try:
        found = find_spec(MODULES[name])
    except (ImportError, ValueError):  # of a finder that refuses the package; of a module without a spec
        found = None
    if found is None:
        raise ConfigError(f"{what} needs {name}: pip install 'minidl[{extra}]'")


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return " Did you mean 'lenet'?" with the known word most similar to `word`, or "" if none is similar."""
    from difflib import get_close_matches

    match = get_close_matches(word[:100], known, n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""
