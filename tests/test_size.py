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
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_no_file_is_long() -> None:
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in python_files("minidl", "kernels", "comm", "tests", "bench", "docs")
    }
    assert {name: length for name, length in lengths.items() if length > LINES} == {}


def test_no_function_outside_kernels_has_many_parameters() -> None:
    found = {}
    for file in python_files("minidl", "comm", "tests", "bench"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > PARAMETERS:
                    found[f"{file.relative_to(ROOT).as_posix()}:{node.name}"] = len(names)
    assert sorted(found) == sorted(MANY_PARAMETERS)


def test_the_package_has_few_files() -> None:
    assert len([path for path in (ROOT / "minidl").iterdir() if path.is_file()]) <= FILES


def test_ambiguous_names_are_used_for_one_class_only() -> None:
    classes = Counter(
        node.name
        for file in python_files("minidl", "comm", "kernels")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name in ("Job", "Session", "Task", "Buffer", "Progress", "Run") if classes[name] > 1] == []
