"""Grade the file of a learner: run it, call its functions, and tell which result is wrong for which input."""

from __future__ import annotations

import traceback
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from minidl.checked import shown
from minidl.errors import printable

FEW = 6  # elements of an array that a message shows


class Wrong(Exception):
    """A wrong result. call: the call that had it, with its arguments. expected, got: the two results."""

    def __init__(self, call: str, expected: str, got: str) -> None:
        super().__init__(call, expected, got)
        self.lines = (f"for       {call}", f"expected  {expected}", f"got       {got}")


def grade(path: Path, lesson: str, number: int) -> tuple[str, ...]:
    """Execute the file of a learner, and check it. Returns () if it is a solution, else the lines that tell why not."""
    check = getattr(import_module(f"minidl.learn.checks.{lesson}"), f"check_{number}")
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(_load(path))
    except Wrong as wrong:
        return tuple(printable(line) for line in wrong.lines)
    except (Exception, SystemExit) as error:
        return (printable(_explained(error, path)),)
    return ()


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random multiples of 1/4 between -3 and 3: a learner can check small cases by hand."""
    return random.integers(-12, 13, shape) / 4


def call(function: str, **arguments: object) -> str:
    """Return a call as text. A large array is shown as its shape."""
    words = []
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            words.append(f"{name}={value.tolist()}" if value.size <= FEW else f"{name} {value.shape}")
        else:
            words.append(f"{name}={value}")
    return f"{function}({', '.join(words)})"


def compare(given: str, name: str, got: object, expected: object, tolerance: float = 1e-9) -> None:
    """Raise Wrong, with the first wrong element, unless `got` has the shape and the elements of `expected`.

    given: the call with its arguments. name: the result, such as "out". tolerance: relative to the largest element, but
    at least absolute. 0: the elements must be equal.
    """
    right = np.asarray(expected)
    try:
        found = np.asarray(got)
        numbers = found.astype(np.float64)
    except (TypeError, ValueError):
        raise Wrong(given, f"{name}: numbers of shape {right.shape}", shown(got)) from None
    if found.shape != right.shape:
        what = f"shape {found.shape}" if isinstance(got, np.ndarray) else shown(got)
        raise Wrong(given, f"{name} of shape {right.shape}", what)
    wrong = ~(abs(numbers - right) <= tolerance * max(1.0, float(abs(right).max(initial=0))))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = f"{name}[{', '.join(map(str, at))}]" if at else name
        raise Wrong(given, f"{where} = {right[at]!s}", f"{where} = {found[at]!s}")


def _load(path: Path) -> ModuleType:
    """Execute a file, and return its module."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))  # the user's own program
    return module


def _explained(error: BaseException, path: Path) -> str:
    """Return one line about an error that a learner's file has raised, with the line of this file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, NotImplementedError) and lines:
        return f"{path.name}, line {lines[-1]}: the hole is still there: replace this line by your code"
    text = traceback.format_exception_only(error)[-1]
    if isinstance(error, SyntaxError):
        lines, text = [error.lineno or 1], f"{type(error).__name__}: {error.msg}"
    where = f"{path.name}, line {lines[-1]}" if lines else path.name
    return " ".join(f"{where}: {text}".split())
