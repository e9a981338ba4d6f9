"""minidl has the right files and runs in every form: checkout, sdist, wheel, wheel of the sdist, editable install.

Everything is built from a copy of the checkout, without build isolation and without dependencies. So the tests
download nothing, and an installed copy uses NumPy from the environment that runs the tests.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import minidl

ROOT = Path(__file__).parent.parent
LINKS = ("kernels", "comm")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "venv", "build", "_build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
# An environment without the checkout on the Python path, in which pip uses no network.
CLEAN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COVERAGE_PROCESS_START")}
CLEAN |= {"PIP_NO_INDEX": "1", "PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    """Return the standard output of a command. If the command fails, the assertion shows all its output."""
    environment = CLEAN | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code: str, cwd: Path, path: Path | None = None) -> str:
    return run(sys.executable, "-c", code, cwd=cwd, path=path).strip()


def copy_checkout(to: Path, text_links: bool = False) -> Path:
    """Copy the checkout; with `text_links`, links become text files, as git writes them under `core.symlinks=false`."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=NOT_COPIED)
    for name in LINKS if text_links else ():
        link = to / "minidl" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return to


def build(source: Path, to: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel of a source tree; return their paths."""
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", to, source, cwd=to.parent)
    (archive,), (wheel,) = to.glob("*.tar.gz"), to.glob("*.whl")
    return archive, wheel


def names(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as files:
        return {name for name in files.namelist() if ".dist-info/" not in name}


def source_files() -> set[str]:
    """Return the files that a wheel must have: Python, data, licences, lessons in `minidl/` and the linked folders."""
    kinds = {".py", ".gz", ".typed", ".md", ".txt", ".toml"}
    top = {f"minidl/{name}": ROOT / name for name in LINKS} | {"minidl": ROOT / "minidl"}
    return {
        f"{prefix}/{file.relative_to(folder).as_posix()}"
        for prefix, folder in top.items()
        for file in folder.rglob("*")
        if file.suffix in kinds and file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def built(space: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel of the checkout."""
    return build(copy_checkout(space / "checkout"), space / "dist")


def unpack(archive: Path, to: Path) -> Path:
    with tarfile.open(archive) as files:
        files.extractall(to, filter="data")
    (folder,) = to.iterdir()
    return folder


def install(wheel: Path, to: Path) -> Path:
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", to, wheel, cwd=to.parent)
    return to


def assert_runs(cwd: Path, path: Path | None = None) -> None:
    """Assert that the command line starts, and that kernels and comm are packages of minidl only."""
    assert "--model" in run(sys.executable, "-m", "minidl.train", "--help", cwd=cwd, path=path)
    code = "import minidl.kernels.matmul.reference as m, minidl.comm; print(m.__name__)"
    assert python(code, cwd, path) == "minidl.kernels.matmul.reference"


def test_a_wheel_holds_every_file_and_one_top_level_name(built: tuple[Path, Path]) -> None:
    files = names(built[1])
    assert files == source_files()
    assert {name.split("/")[0] for name in files} == {"minidl"}
    assert "minidl/kernels/README.md" in files and "minidl/py.typed" in files


def test_the_readme_of_a_package_has_no_relative_links(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        head, _, text = files.read(metadata).decode().partition("\n\n")
    readme = (ROOT / "README.md").read_text()
    assert "Description-Content-Type: text/markdown" in head and text.startswith("# minidl\n")
    assert readme.count("](docs/") > 3 and "](" not in text and "docs/decentralised.md: a one-hour course" in text
    assert text.split("```")[1::2] == readme.split("```")[1::2]


def test_an_installed_wheel_runs(built: tuple[Path, Path], space: Path) -> None:
    site = install(built[1], space / "site")
    top = {entry.name for entry in site.iterdir() if not entry.name.endswith(".dist-info")}
    assert top == {"minidl", "bin"}
    assert {entry.name for entry in (site / "bin").iterdir()} == {"minidl-launch", "minidl-simulate", "minidl-train"}
    for name in LINKS:
        assert (site / "minidl" / name).is_dir() and not (site / "minidl" / name).is_symlink()
    assert_runs(cwd=space, path=site)
    assert python("import minidl; print(minidl.__file__)", space, site) == str(site / "minidl" / "__init__.py")


@pytest.mark.slow  # .ci/run builds a wheel from an sdist, and tests it
def test_an_sdist_runs_and_builds_the_same_wheel(built: tuple[Path, Path], space: Path) -> None:
    archive, wheel = built
    folder = unpack(archive, space / "sdist")
    assert not any((folder / name).exists() for name in LINKS)
    assert all((folder / "minidl" / name).is_dir() for name in LINKS)
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "setup.py", "tests"} <= set(os.listdir(folder))
    assert_runs(cwd=folder)
    assert names(build(folder, space / "dist-of-sdist")[1]) == names(wheel)


@pytest.mark.slow
def test_links_checked_out_as_text_files(built: tuple[Path, Path], space: Path) -> None:
    checkout = copy_checkout(space / "text-links", text_links=True)
    assert_runs(cwd=checkout)
    archive, wheel = build(checkout, space / "dist-of-text-links")
    assert names(wheel) == names(built[1])
    with tarfile.open(archive) as ours, tarfile.open(built[0]) as theirs:
        assert set(ours.getnames()) == set(theirs.getnames())


@pytest.mark.parametrize("text_links", [
    pytest.param(False, id="links"), pytest.param(True, id="text links", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_editable_install_exposes_one_name(space: Path, text_links: bool) -> None:
    checkout = copy_checkout(space / f"editable-{text_links}", text_links)
    environment = space / f"venv-{text_links}"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=space)
    interpreter = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter]
    lent = Path(pytest.__file__).parent.parent  # holds setuptools, which the new environment lacks
    run(*pip, "install", "--no-deps", "--no-build-isolation", "-e", checkout, cwd=space, path=lent)
    elsewhere = space / f"elsewhere-{text_links}"
    elsewhere.mkdir()
    code = """
from importlib.util import find_spec
import minidl
print(minidl.__file__)
print([name for name in ("kernels", "comm", "bench", "docs", "tests", "setup") if find_spec(name)])
print([bool(find_spec(f"minidl.{name}")) for name in ("train", "comm", "kernels.matmul.reference")])
"""
    here, top_level, inside = run(interpreter, "-c", code, cwd=elsewhere).splitlines()
    assert here == str(checkout / "minidl" / "__init__.py")
    assert top_level == "[]"
    assert inside == "[True, True, True]"
    assert (environment / "bin" / "minidl-train").is_file()


def test_the_links_are_relative() -> None:
    for name in LINKS:
        link = ROOT / "minidl" / name
        if link.is_symlink():
            assert os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists(), "a top-level package of this name shadows other projects"


def test_importing_minidl_imports_no_numpy(space: Path) -> None:
    code = "import sys, minidl; print({'numpy', 'numba', 'scipy', 'tqdm'} & set(sys.modules), minidl.__version__)"
    assert python(code, space, ROOT) == f"set() {minidl.__version__}"


def test_every_export_exists_and_is_known_to_type_checkers() -> None:
    for name in minidl.__all__:
        assert getattr(minidl, name) is not None and name in dir(minidl)
    with pytest.raises(AttributeError, match="no attribute 'tensr'"):
        minidl.tensr  # type: ignore[attr-defined]  # noqa: B018
    source = ast.parse((ROOT / "minidl" / "__init__.py").read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    typed = {
        alias.name: f"{node.module}.{alias.name}".removeprefix("minidl.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: where.replace(":", ".") for name, where in minidl._EXPORTS.items()}


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    commands = [shlex.split(line)[0].partition("=")[2] for line in script.splitlines() if line.startswith("README_")]
    assert len(commands) == 2
    for command in commands:
        assert command in readme.splitlines()


def test_the_citation_names_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {minidl.__version__}" in lines
