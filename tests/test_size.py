"""Limits that keep the code readable: the length of files and of parameter lists, and names of classes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES, PARAMETERS, FILES = 400, 8, 18

MANY_PARAMETERS = {  # allowed exceptions, each with the reason
}


def python_files(*folders: str) -> Iterator[Path]:
    """Yield each Python file of these folders once: skip the links `minidl/kernels` and `minidl/comm`."""
    links = (ROOT / "minidl" / "kernels", ROOT / "minidl" / "comm")
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(link in file.parents for link in links):
                yield file


@cache
def defined(file: Path) -> tuple[dict[str, int], list[str]]:
    """Return {function: number of its parameters, without self and cls}, and the names of the classes in a file.

    The trees are not kept: all together have two million objects, which slow Python's garbage collector down.
    """
    functions, classes = dict[str, int](), list[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            number = len(names) - (names[:1] in (["self"], ["cls"]))
            functions[node.name] = max(number, functions.get(node.name, 0))
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return functions, classes


def test_no_file_is_long() -> None:
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in python_files("minidl", "kernels", "comm", "tests", "bench", "docs")
    }
    assert {name: length for name, length in lengths.items() if length > LINES} == {}


def test_no_function_outside_kernels_has_many_parameters() -> None:
    found = [
        f"{file.relative_to(ROOT).as_posix()}:{name}"
        for file in python_files("minidl", "comm", "tests", "bench")
        for name, number in defined(file)[0].items()
        if number > PARAMETERS
    ]
    assert sorted(found) == sorted(MANY_PARAMETERS)


def test_the_package_has_few_files() -> None:
    assert len([path for path in (ROOT / "minidl").iterdir() if path.is_file()]) <= FILES


def test_ambiguous_names_are_used_for_one_class_only() -> None:
    classes = Counter(name for file in python_files("minidl", "comm", "kernels") for name in defined(file)[1])
    assert [name for name in ("Job", "Session", "Task", "Buffer", "Progress", "Run") if classes[name] > 1] == []
