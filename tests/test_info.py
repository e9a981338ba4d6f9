"""`python -m minidl.info`: true facts, also where something is missing; `python -m minidl`: the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

import pytest

import minidl
from minidl import resources
from minidl.__main__ import COMMANDS
from minidl.__main__ import main as commands
from minidl.cli import facts
from minidl.engine import jit
from minidl.info import main
from minidl.run.config import resolve
from minidl.train import processes

SECTIONS = {"software", "machine", "kernels", "mpi", "data", "default run"}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    """Return what the command prints with --json."""
    assert main([*words, "--json"]) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "output", lambda *command, without=(): "")


def test_facts_agree_with_their_sources(
    no_programs: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernel").write_bytes(bytes(100))
    monkeypatch.setattr(jit, "_folder", tmp_path)
    found = told(capsys)
    assert set(found) == SECTIONS
    assert str(found["software"]["minidl"]).startswith(minidl.__version__)
    assert found["software"]["numpy"] == metadata.version("numpy")
    assert found["machine"]["cores_used"] == resources.cores()
    assert found["kernels"]["threading_layer"] in ("omp", "tbb", "workqueue")
    assert found["kernels"]["kernel_cache"] == str(tmp_path)
    assert (found["kernels"]["files_in_the_cache"], found["kernels"]["size_of_the_cache_bytes"]) == (1, 100)


def test_text_has_every_section_and_fits_the_terminal(no_programs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line for line in lines if line and line[0] != " "} == SECTIONS
    assert [line for line in lines if len(line) > facts.WIDTH and len(line.split()) > 4] == []


@pytest.mark.parametrize("workers", ["", "1", "3"])
def test_default_run_is_the_one_that_train_begins(
    workers: str, monkeypatch: pytest.MonkeyPatch, no_programs: None
) -> None:
    monkeypatch.setenv("MINIDL_WORKERS", workers)
    told_workers = str(facts.default_run()["workers"]).partition(":")[0]
    assert int(told_workers) == processes(resolve({}))


def test_data_sets_are_found_where_train_finds_them(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINIDL_DATA", str(data_dir))
    found = facts.data_folders()
    assert Path(found["mnist"]).is_relative_to(data_dir) and Path(found["cifar10"]).is_relative_to(data_dir)
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert facts.data_folders()["mnist"] == f"not here; --data mnist downloads it to {tmp_path}/minidl/data"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert facts.data_folders()["mnist"].endswith("/minidl/data, not writable")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"")
    assert "add the missing part of mnist" in facts.data_folders()["mnist"]


def test_a_fact_that_cannot_be_had_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, no_programs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def caches() -> facts.Facts:
        raise PermissionError(13, "Permission denied", "/sys")

    monkeypatch.setattr(facts, "SECTIONS", {"machine": (facts.system, caches, facts.cores)})
    machine = told(capsys)["machine"]
    assert str(machine["caches"]).startswith("not known: PermissionError")
    assert machine["cores_used"] == resources.cores()


@pytest.mark.parametrize("missing", [("numpy",), ("numba", "mpi4py", "matplotlib")])
def test_packages_that_cannot_be_imported(missing: tuple[str, ...], root: Path, tmp_path: Path) -> None:
    code = (f"import sys; sys.modules |= dict.fromkeys({missing!r}); from minidl.info import main; "
            "sys.exit(main(['--json']))")  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["machine"]["cores_used"] == resources.cores()
    assert "ModuleNotFoundError" in found["kernels"]["features"]
    assert ("ModuleNotFoundError" in found["mpi"]["library"]) == ("mpi4py" in missing)


def test_links_between_two_processes(no_programs: None, capsys: pytest.CaptureFixture[str]) -> None:
    (link,) = told(capsys, "--measure")["links"]
    assert (link["from"], link["to"], link["on"]) == (0, 1, "one machine")
    assert 0.1 < link["microseconds"] < 1e6 and 1e6 < link["bytes_per_second"] < 1e12  # wrong units would be outside


def test_links_of_an_mpi_job(root: Path, tmp_path: Path) -> None:
    launcher = Path(sys.executable).parent / "mpiexec"
    if not launcher.exists():
        pytest.skip("no mpiexec in this environment")
    command = [str(launcher), "-n", "3", sys.executable, "-m", "minidl.info", "--measure", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [link["to"] for link in found["links"]] == [1, 2]
    assert found["default run"]["workers"].startswith("3: the ranks of")


@pytest.mark.parametrize("words", [["--mesure"], ["more"], ["--json=1x"]])
def test_bad_command_lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidl: error: ") and error.count("\n") == 1


def test_the_commands_are_those_that_are_installed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands([]) == 0
    printed = capsys.readouterr().out
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"].values()
    for module in [script.partition(":")[0] for script in scripts] + [f"minidl.{name}" for name in COMMANDS]:
        assert f"python -m {module} " in printed
        assert (root / (module.replace(".", "/") + ".py")).exists() or (root / module.replace(".", "/")).is_dir()
    assert commands(["trian"]) == 2 and commands(["train"]) == 2
    assert "expected python -m minidl.NAME" in capsys.readouterr().err


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what bash reads to complete commands."""
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "script"
    with open(path, "w") as file, redirect_stdout(file):
        assert commands(["--completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("minidl-train --method goss", {"gossip"}),
        ("minidl-train --valid", {"--validation"}),
        ("minidl-simulate --rank", {"--ranks"}),
        ("minidl-train --evaluate fil", {"file"}),
    ],
)
def test_a_shell_completes(words: str, expected: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    name = words.partition(" ")[0]
    ask = f"""source '{script}'
    function=$(complete -p {name} | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    $function {name} "${{COMP_WORDS[$COMP_CWORD]}}" "${{COMP_WORDS[$COMP_CWORD - 1]}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert set(done.stdout.split()) == expected, done.stderr


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands(["--completion", "fish"]) == 2 and commands(["--completion"]) == 2
    assert "expected one of bash, zsh, tcsh" in capsys.readouterr().err


@pytest.mark.parametrize(("printed", "version"), [
    ("HYDRA build details:\n    Version:             5.0.2\n", "MPICH 5.0.2"),
    ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", "mpiexec (Open MPI) 5.0.11"),
    ("", "does not run"),
])  # fmt: skip
def test_versions_of_launchers(printed: str, version: str) -> None:
    assert facts._version_of(printed) == version
