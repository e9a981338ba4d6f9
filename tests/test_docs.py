"""The Markdown pages: their links lead somewhere, their commands have valid options, and their Python code runs.

The code of docs/decentralised.md and docs/elastic.md is in test_course.py, that of docs/own_models.md in
test_own_models_page.py, the method of CONTRIBUTING.md in test_own_method.py, and README's first block in .ci/run.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import minidl
from minidl import launch, simulate, topology, train
from minidl.cli import arguments
from minidl.comm.methods import METHODS
from minidl.data.digits import read_digits
from minidl.engine.jit import HAS_FMA
from minidl.run.config import Config, resolve
from minidl.run.options import HelpWanted, options, parse

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "comm", "kernels", "bench", "examples", "minidl", "tests")
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    if "_build" not in page.parts
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LAUNCHED = re.compile(r"(mpiexec|srun)\b.*?(?=\bpython\b)")  # what stands before the command of a rank


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return the text of a page without its code."""
    return re.sub(r"`[^`\n]+`", "`code`", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the documentation site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        assert anchor not in found, f"{name(page)}: two headings {heading!r}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not re.findall(r"^\[[^\]]+\]: ", prose(page), re.MULTILINE), "this test reads only links of the form [](...)"
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match("https?://", target):
            continue
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), f"{name(page)}: {target}"
        assert goal.resolve().is_relative_to(ROOT.resolve()), f"{name(page)}: {target} is outside the repository"
        if anchor:
            assert goal.suffix == ".md" and anchor in anchors(goal), f"{name(page)}: {target}"


def commands() -> Iterator[tuple[str, str]]:
    """Yield the shell commands of all pages: the page, the command."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for _, language, code in FENCE.findall(text):
            if language == "bash":
                whole = re.sub(r"<<'(\w+)'.*?^\1$", "", code, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
                yield from ((name(page), line.strip()) for line in whole.splitlines() if line.strip())
        yield from ((name(page), code) for code in re.findall(r"`(python -m minidl\.[^`\n]+)`", FENCE.sub("", text)))


COMMANDS = list(commands())
OF_MINIDL = [(page, line) for page, line in COMMANDS if "-m minidl." in line]


def checked(words: list[str]) -> None:
    """Check the words after `python -m`: parse them as the command does. Raises ConfigError if they are wrong."""
    command, rest = words[0].removeprefix("minidl."), words[1:]
    with suppress(HelpWanted):
        if command == "train":
            given = parse(Config, arguments.with_devices(rest))
            arguments.check(given)
            resolve({key: value for key, value in given.items() if value != "my_net.py:build"})
        elif command == "simulate":
            given = parse(simulate.Options, rest)
            simulate.check(given)
            resolve({key: value for key, value in given.items() if key in options(Config)})
        elif command == "launch":
            own = next((place for place, word in enumerate(rest) if word.endswith(".py")), len(rest))
            parse(launch.Options, rest[:own])
        elif command == "topology":
            topology._arguments(rest)
        else:
            assert importlib.util.find_spec(words[0]), words[0]


@pytest.mark.parametrize(("page", "line"), OF_MINIDL)
def test_commands_have_valid_options(page: str, line: str) -> None:
    for word in re.findall(r"\[(--[^\]]*)\]", line):
        line = line.replace(f"[{word}]", word)
    placeholders = {"DATA": "digits", "MODEL": "lenet", "K": "2", "SEED": "1"}
    plain = " ".join(placeholders.get(word, word) for word in line.split(" "))
    words = shlex.split(LAUNCHED.sub("", plain), comments=True)
    assert words.index("-m") >= 1
    checked(words[words.index("-m") + 1 :])


def test_the_check_of_commands_finds_mistakes() -> None:
    assert len(OF_MINIDL) > 30
    for line in ("minidl.train --metod gossip", "minidl.train --method gossip --rho 0.1", "minidl.topology ring",
                 "minidl.simulate --ranks many", "minidl.launch --worker 2 x.py"):  # fmt: skip
        with pytest.raises(minidl.MinidlError):
            checked(line.split())


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_shell_blocks_are_bash_and_name_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(code for _, language, code in FENCE.findall(text) if language == "bash")
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for script in re.findall(r"python ((?:bench|docs|examples|tests)/[^\s<]+\.py)", text):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m (bench[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


ASSEMBLY = [(name(page), code) for page in PAGES for _, _, code in FENCE.findall(page.read_text(encoding="utf-8"))
            if "inspect_asm" in code]  # fmt: skip


@pytest.mark.slow  # each compiles a kernel
@pytest.mark.skipif(not HAS_FMA, reason="the lessons show instructions of AVX2 or AVX-512")
@pytest.mark.parametrize("page, code", ASSEMBLY, ids=[page for page, _ in ASSEMBLY])
def test_the_assembly_commands_of_the_lessons_print_instructions(page: str, code: str) -> None:
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert done.stdout.strip() not in ("", "0")


def python_blocks(page: str) -> list[str]:
    return [code for _, kind, code in FENCE.findall((ROOT / page).read_text(encoding="utf-8")) if kind == "python"]


def test_the_python_code_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(["--epochs", "1", "--quiet"]) == 0  # the run whose weights the last block loads
    names: dict[str, Any] = {"images": read_digits(0).x_test[:5]}
    blocks = python_blocks("README.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["history"].test.accuracy > 0.95
    assert (tmp_path / "net.safetensors").is_file()


def test_the_python_code_of_the_guide() -> None:
    names: dict[str, Any] = {}
    recorded, without = python_blocks("docs/guide.md")
    exec(compile(recorded, "guide.md", "exec"), names)
    assert 0 < names["correct"] <= 32 and names["loss"] < 2.0
    exec(compile(without, "guide.md", "exec"), names)
    assert float(names["loss"].data) < 1.0


def test_the_python_code_of_topologies() -> None:
    names: dict[str, Any] = {}
    for block in python_blocks("docs/topologies.md"):
        exec(compile(block, "topologies.md", "exec"), names)
    assert names["graph"].weights(0, 1) == pytest.approx({0: 1 / 3, 2: 2 / 3})
    assert (names["shares"] @ names["uneven"].matrix(0)).round(9).tolist() == names["shares"]


def test_every_method_has_a_formula_a_picture_a_use_and_a_line_of_the_guide() -> None:
    text = (ROOT / "comm" / "methods" / "README.md").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    formulas, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (pictures,) = [section for section in sections if section.startswith("In pictures")]
    (uses,) = [section for section in sections if section.startswith("When to use which")]
    for method in METHODS:
        assert f"\n| `{method}` |" in formulas, method
        assert re.search(rf"^    {method} +0  ", pictures, re.MULTILINE), method
        assert re.search(rf"`{method}[ `]", uses.split("\n\n")[1]), method
        assert f"`{method}`" in guide, method


def test_every_block_has_a_language_that_tests_know() -> None:
    tested = {"README.md", "CONTRIBUTING.md", "docs/decentralised.md", "docs/elastic.md", "docs/guide.md",
              "docs/own_models.md", "docs/topologies.md", "kernels/activation/README.md"}  # fmt: skip
    for page in PAGES:
        for _, language, _ in FENCE.findall(page.read_text(encoding="utf-8")):
            assert language in ("", "bash", "python", "text"), f"{name(page)}: {language}"
            assert language != "python" or name(page) in tested, f"{name(page)}: no test runs its Python code"
    [needs_mpmath] = python_blocks("kernels/activation/README.md")
    compile(needs_mpmath, "activation", "exec")


# -- the documentation site --------------------------------------------------------------------------------------------


def module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{file}", ROOT / "docs" / f"{file}.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api" / "index.rst").read_text(encoding="utf-8")
    pages = {page.stem for page in (ROOT / "docs" / "api").glob("*.rst")}
    for public in minidl.__all__:
        assert f"minidl.{public}" in text or f"run.{public}" in text or public in pages | {"__version__"} or (
            public == "MinidlError"), public  # fmt: skip


def test_docstrings_become_restructured_text() -> None:
    as_rst = module("docstrings").as_rst
    text = """\
mixing: put `x_i
or y` with *others* (W_ij * x_j).

    x = mix(x)

weight: the share
    of the other
x, y (N,): two arrays. Raises nothing
Raises ConfigError if not.

    x_i <- sum_j W_ij x_j  |norm|
- one
- two `a|b`"""
    assert [line for line in as_rst(text.splitlines()) if line] == [
        "mixing: put ``x_i", r"or y`` with \*others\* (W\_ij \* x\_j).",
        ".. code-block:: python", "    x = mix(x)",
        "- **weight**: the share", "  of the other",
        "- **x, y (N,)**: two arrays. Raises nothing",
        "Raises ConfigError if not.",
        ".. code-block:: none", "    x_i <- sum_j W_ij x_j  |norm|",
        "- one", r"- two ``a|b``",
    ]  # fmt: skip


def test_the_pages_of_the_site_exist_and_ci_builds_it() -> None:
    site = (ROOT / "docs" / "pages.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"((?:docs|comm|kernels|bench|tests)/[\w/.-]+|[A-Z]{5,})"', site))
    missing = {name(page).removesuffix(".md") for page in PAGES} - named - {"README", "minidl/data/digits.LICENSE"}
    assert all(page.startswith("kernels/") for page in missing), "docs/pages.py does not name a page"
    assert "python -m sphinx -W docs docs/_build" in (ROOT / "CONTRIBUTING.md").read_text()
    assert '/python" -m sphinx -q -W docs docs/_build' in (ROOT / ".ci" / "run").read_text()
