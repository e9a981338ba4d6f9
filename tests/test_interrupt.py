"""Ctrl-C before training begins: one line, exit code 130, and no traceback. No folder of a run is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import Launched

COMPILING = str(Path(__file__).parent / "replicas" / "compiling.py")
SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--quiet", "--out"]
NOTHING = "minidl: stopped; there was nothing to save yet\n"
SITE = """
import atexit, os, signal, sys
def interrupt(*ignored):
    os.kill(os.getpid(), signal.SIGINT)
def hook(event, arguments):
    if event == "import" and arguments[0] == os.environ.get("AT") and "MINIDL_RANK" not in os.environ:
        interrupt()
sys.addaudithook(hook)
if os.environ.get("AT") == "exit":
    atexit.register(interrupt)
"""


def started(folder: Path, at: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command. It gets SIGINT when it imports the module `at`, or with "exit" at its end."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *words], cwd=folder, env=os.environ | {"AT": at, "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=300)  # fmt: skip


@pytest.mark.parametrize(("name", "at"), [
    pytest.param("train", "minidl.cli", marks=pytest.mark.slow),
    pytest.param("train", "numpy", marks=pytest.mark.slow),
    ("train", "numba.core.types"),
    ("simulate", "minidl.run.config"),
    ("launch", "minidl.comm.launch"),
])  # fmt: skip
def test_while_a_command_starts(tmp_path: Path, name: str, at: str) -> None:
    done = started(tmp_path, at, "-m", f"minidl.{name}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", NOTHING)


def test_while_an_installed_command_starts(tmp_path: Path) -> None:
    (tmp_path / "minidl-train").write_text("import sys; from minidl.train import main; sys.exit(main())")
    done = started(tmp_path, "minidl.cli", "minidl-train")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", NOTHING)


def test_after_the_result(tmp_path: Path) -> None:
    done = started(tmp_path, "exit", "-m", "minidl.train", "--help")
    assert done.returncode == 130 and "python -m minidl.train" in done.stdout and not done.stderr


def test_a_program_that_imports_minidl_handles_ctrl_c_itself(tmp_path: Path) -> None:
    code = "import minidl, signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


EDITABLE = """
import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{!r}]) if name.startswith("minidl.") and name.count(".") == 1 else None
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each)] + [Finder]
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_do_not_become_those_of_the_run(tmp_path: Path, closed: str) -> None:
    words = "--data synthetic:96x4x4x1:4 --model mlp --batch-size 16 --epochs 1 --workers 2 --out run --no-report"
    script = f'"$0" -m minidl.train {words} {closed}'
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
    assert ("test accuracy" in done.stdout) == (">&-" not in closed.split())
    assert ("epoch" in done.stderr) == ("2>&-" not in closed.split())


def test_in_a_folder_that_holds_a_clone(tmp_path: Path, root: Path) -> None:
    """An editable installation finds the modules of minidl, but Python prefers the folder minidl as a package."""
    (tmp_path / "minidl").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EDITABLE.format(str(root / "minidl")))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    code = "import minidl; assert not minidl.__file__; import minidl.train; print(minidl.__version__, minidl.fit)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("0.") and not done.stderr
    command = [sys.executable, "-m", "minidl.train", "--steps", "1", "--workers", "2", *SMALL, "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "average of 2 replicas" in done.stdout


@pytest.mark.parametrize(("ranks", "exists"), [(1, True), (2, False)])
def test_while_kernels_are_compiled(tmp_path: Path, ranks: int, exists: bool) -> None:
    """A folder that existed before remains, and is empty."""
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    with Launched(ranks, *SMALL, str(folder), program=[COMPILING]) as launched:
        launched.line()
        launched.process.send_signal(signal.SIGINT)
        code, _, errors = launched.finish()
    assert (code, errors) == (130, NOTHING)
    assert not list(folder.iterdir()) if exists else not folder.exists()


def test_a_process_alone(tmp_path: Path) -> None:
    command = [sys.executable, COMPILING, *SMALL, str(tmp_path / "run"), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=300)[1]
    assert (process.returncode, errors) == (130, NOTHING) and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["train", "--workers", "1"], ["train", "--workers", "2"], ["simulate"]])
def test_at_many_moments(tmp_path: Path, words: list[str]) -> None:
    name, *options = words
    for milliseconds in range(200, 3000, 70):
        command = [sys.executable, "-m", f"minidl.{name}", *SMALL, str(tmp_path / "run"), "--epochs", "1000", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
        if "Traceback" in errors and not re.search(r'File ".*/minidl/\w+', errors):
            continue  # Python itself was starting
        assert process.returncode == 130 and errors.count("\n") == 1 and "Traceback" not in errors, errors
        assert name == "simulate" or (tmp_path / "run").exists() != ("nothing to save" in errors)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
