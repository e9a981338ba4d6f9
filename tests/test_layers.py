"""No import points to a higher "room" (package or module) in CONTRIBUTING.md's table, and no imports form a cycle.
Each of these two rules has one exception. Imports inside functions and under TYPE_CHECKING count, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parent.parent
Imports = dict[str, set[str]]  # module -> the modules of minidl that it imports

UPWARD = {  # allowed exceptions: (importer, imported), with the reason
    ("minidl.engine.tensor", "minidl.ops"): "a Tensor's operators are ops, and ops return Tensors",
}
CIRCLE = re.compile(r"minidl\.(engine\.tensor|ops(\..*)?)")  # the import cycle that this exception causes


def modules(root: Path) -> dict[str, Path]:
    """Return {dotted name: file} of all modules of the package in a checkout."""
    found = {}
    for folder, package in (("minidl", "minidl"), ("kernels", "minidl.kernels"), ("comm", "minidl.comm")):
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            if folder != "minidl" or parts[0] not in ("kernels", "comm"):  # skip the links of these names
                found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") for each import anywhere in the syntax tree of a file in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def imports_of(root: Path) -> Imports:
    files, found = modules(root), {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        pairs = imported(ast.parse(file.read_text(encoding="utf-8")), package)
        names = {f"{module}.{word}" if f"{module}.{word}" in files else module for module, word in pairs}
        found[name] = {module for module in names if module in files} - {name}
    return found


def declared_order(text: str) -> list[str]:
    """Return the rooms in CONTRIBUTING.md's table of layers, from the lowest to the highest."""
    rows = re.findall(r"^\| *[0-9]+[a-z]? *\| *(`[^|]*`) *\|", text, re.MULTILINE)
    return [f"minidl.{room}" if room != "minidl" else room for row in rows for room in re.findall("`([^`]+)`", row)]


def layer(module: str, order: list[str]) -> int:
    """Return the position of the most specific room that contains a module. Raises AssertionError if none does."""
    rooms = [room for room in order if module == room or (module.startswith(room + ".") and room != "minidl")]
    assert rooms, f"{module} is in no room that CONTRIBUTING.md declares"
    return order.index(max(rooms, key=len))


def upward(imports: Imports, order: list[str]) -> list[tuple[str, str]]:
    """Return the imports (importer, imported) from a lower room to a higher one."""
    return [
        (name, other) for name, others in imports.items() for other in sorted(others)
        if layer(other, order) > layer(name, order)
    ]  # fmt: skip


def circles(imports: Imports) -> list[set[str]]:
    graph = networkx.DiGraph([(name, other) for name, others in imports.items() for other in others])
    return [found for found in networkx.strongly_connected_components(graph) if len(found) > 1]


@pytest.fixture(scope="module")
def order() -> list[str]:
    return declared_order((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_each_room_is_declared_once(order: list[str]) -> None:
    assert len(order) == len(set(order)) > 12
    for room in order:
        path = ROOT / room.removeprefix("minidl.").replace(".", "/")  # kernels/, comm/
        inside = ROOT / room.replace(".", "/")
        assert any(p.exists() for p in (path, inside, inside.with_suffix(".py"), path.with_suffix(".py"))), room


def test_no_import_points_upward(order: list[str]) -> None:
    found = set(upward(imports_of(ROOT), order))
    assert found - UPWARD.keys() == set()
    assert UPWARD.keys() - found == set(), "these exceptions are no longer needed"


def test_only_tensor_and_ops_form_an_import_cycle() -> None:
    found = circles(imports_of(ROOT))
    assert [c for c in found if not all(CIRCLE.fullmatch(name) for name in c)] == []
    assert len(found) == 1


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    """Every form of an import statement must be found."""
    forms: Iterable[str] = (
        "from minidl.top import name",
        "from minidl import top",
        "import minidl.top",
        "def f():\n    from ..top import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minidl.top import Name",
    )
    (tmp_path / "minidl" / "low").mkdir(parents=True)
    (tmp_path / "minidl" / "low" / "__init__.py").write_text("")
    (tmp_path / "minidl" / "top.py").write_text("from minidl.low import file\n")
    order = ["minidl.low", "minidl.top"]
    for form in forms:
        (tmp_path / "minidl" / "low" / "file.py").write_text(form + "\n")
        found = imports_of(tmp_path)
        assert upward(found, order) == [("minidl.low.file", "minidl.top")], form
        assert circles(found) == [{"minidl.low.file", "minidl.top"}], form
