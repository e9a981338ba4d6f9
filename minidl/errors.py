"""Errors that a user can act on: each message is one line with the value, what was expected, and what to do.

The command-line tools print this line and exit with code 2. Library users catch `MinidlError`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable


class MinidlError(Exception):
    """The base class of all errors that minidl raises intentionally."""


class ConfigError(MinidlError, ValueError):
    """An unknown option, key, model, data set or method, or a value out of range."""


class DataError(MinidlError, ValueError):
    """A data file is missing, truncated or corrupt, or its content does not match its name."""


class CheckpointError(MinidlError, ValueError):
    """A checkpoint is damaged, or belongs to another model."""


class DivergedError(MinidlError, ArithmeticError):
    """The loss became NaN or infinite."""


class AbortedError(MinidlError):
    """Another replica failed and reported the error: this one exits silently."""


class ShapeError(MinidlError, ValueError):
    """Arrays have the wrong shapes or types for an operation.

    Modules add the path of the layer while the error propagates through them (nn/module.py).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.layer = ""  # the layer that raised it: Conv2d(1, 32, 5x5)
        self.path = ""  # its path in the model: layer1.0.conv1
        self._module: object = None

    def name_layer(self, module: object, description: str, named_modules: Iterable[tuple[str, object]]) -> None:
        """Called by each module that the error propagates through, innermost first: the first one is the layer."""
        if self._module is None:
            self._module, self.layer = module, description
        else:
            self.path = next((name for name, inside in named_modules if inside is self._module), self.path)

    def __str__(self) -> str:
        where = f"layer {self.path}, {self.layer}" if self.path else self.layer
        return f"{where}: {self.message}" if where else self.message


def report(message: str) -> int:
    """Print an error as one line to standard error; return the exit code 2."""
    print("minidl: error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return 2


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """A hint such as `" Did you mean 'lenet'?"` with the known word nearest to `word`, or "" if none is similar."""
    from difflib import get_close_matches

    match = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""
