"""Errors that a user can act on: each is one line with the value, what was expected and what to do.

The command lines print the line and exit with code 2; a library user catches `MinidlError`.
"""


class MinidlError(Exception):
    """Base of every error that minidl raises on purpose."""


class ConfigError(MinidlError, ValueError):
    """An unknown option, key, model, data set or method, or a value out of its range."""


class DataError(MinidlError, ValueError):
    """A data file that is missing, truncated, corrupt, or not what its name says."""


class CheckpointError(MinidlError, ValueError):
    """A checkpoint that is damaged, or belongs to another model."""


class DivergedError(MinidlError, ArithmeticError):
    """The loss became NaN or infinite."""


class ShapeError(MinidlError, ValueError):
    """Arrays whose shapes do not fit an operation; the layer that called it is added on the way out."""

    def __init__(self, message: str, layer: str = "") -> None:
        super().__init__(message)
        self.message, self.layer = message, layer

    def __str__(self) -> str:
        return f"{self.layer}: {self.message}" if self.layer else self.message


def nearest(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """`" Did you mean 'lenet'?"` for the nearest of the known words, or nothing when none is near."""
    from difflib import get_close_matches

    match = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""
