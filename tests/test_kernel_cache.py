"""The cache of compiled kernels: which folders are safe, how processes share one, and how problems are reported."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from quick import quick

from minidl.engine import kernel_cache
from minidl.engine.kernel_cache import find_folder, make_trusted

STRANGER = 54321  # the id of another user
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


# -- which folders are trusted ------------------------------------------------------------------------------------


def refusal(folder: Path, *homes: Path) -> str:
    with pytest.raises(OSError) as refused:
        make_trusted(folder, homes)
    return f"{refused.value.filename}: {refused.value.strerror}"


def test_missing_folders_are_created_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make_trusted(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert [oct((tmp_path / part).stat().st_mode & 0o777) for part in ("a", "a/b")] == ["0o700", "0o700"]
    make_trusted(tmp_path / "a" / "b")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o772])
def test_no_folder_on_the_path_may_be_writable_by_others(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "parent" / "child" / "cache"
    make_trusted(folder)
    for part in (folder, folder.parent, folder.parent.parent):
        part.chmod(mode)
        assert refusal(folder) == f"{part}: other users can write to it (mode {mode:o})"
        part.chmod(0o700)
    make_trusted(folder)


def test_a_sticky_parent_may_be_writable_but_not_the_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    tmp_path.chmod(0o1777)
    make_trusted(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o1777)
    assert "other users can write to it" in refusal(tmp_path / "cache")


@as_root
@pytest.mark.parametrize("part", ["parent", "parent/cache"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, part: str) -> None:
    make_trusted(tmp_path / "parent" / "cache")
    os.chown(tmp_path / part, STRANGER, STRANGER)
    assert refusal(tmp_path / "parent" / "cache") == f"{tmp_path / part}: belongs to another user"


def test_symbolic_links_are_followed_and_their_targets_checked(tmp_path: Path) -> None:
    (tmp_path / "real" / "cache").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    make_trusted(tmp_path / "link" / "cache")
    (tmp_path / "real").chmod(0o777)
    assert "real: other users can write to it" in refusal(tmp_path / "link" / "cache")
    (tmp_path / "up").symlink_to("real/../other")  # in `real`, other users can replace folders by links
    assert "real: other users can write to it" in refusal(tmp_path / "up")


@as_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    tmp_path.chmod(0o1777)
    (tmp_path / "minidl-0").symlink_to("mine")
    os.lchown(tmp_path / "minidl-0", STRANGER, STRANGER)
    assert refusal(tmp_path / "minidl-0" / "kernels") == f"{tmp_path / 'minidl-0'}: belongs to another user"
    assert not list((tmp_path / "mine").iterdir())


def test_files_loops_and_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "cache") == f"{tmp_path / 'file'}: Not a directory"
    (tmp_path / "loop").symlink_to("loop")
    assert "loop: Too many levels of symbolic links" in refusal(tmp_path / "loop" / "cache")
    (tmp_path / "to").symlink_to("missing")
    make_trusted(tmp_path / "to" / "cache")
    assert (tmp_path / "missing" / "cache").is_dir()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # chmod would not do: root may always write
    assert refusal(tmp_path / "cache") == f"{tmp_path / 'cache'}: is not writable"


def test_the_parents_of_home_are_not_checked_but_home_is(tmp_path: Path) -> None:
    home = tmp_path / "people" / "home"
    home.mkdir(parents=True)
    home.parent.chmod(0o777)
    make_trusted(home / ".cache", [home])
    assert "people: other users can write to it" in refusal(home / ".cache")
    home.chmod(0o777)
    assert "home: other users can write to it" in refusal(home / ".cache", home)


def test_the_next_folder_is_used_if_the_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(first))
    monkeypatch.setattr(tempfile, "tempdir", str(second))
    assert find_folder("abc") == (first / "minidl" / "kernels" / "abc", [])
    first.chmod(0o777)
    reason = f"{first}: other users can write to it (mode 777)"
    assert find_folder("abc") == (second / f"minidl-{os.getuid()}" / "kernels" / "abc", [reason])
    second.chmod(0o777)
    folder, reasons = find_folder("abc")
    assert folder is None and len(reasons) == 2


# -- several processes share the cache ----------------------------------------------------------------------------

FUNCTIONS = """
import sys
import numpy as np
from minidl.engine.jit import apart_jit, jit

@apart_jit
def inner(a):
    return a + 1

@jit
def outer(a):
    return inner(a) + inner(a)

def run(*kinds):
    for kind in kinds:
        assert outer(np.dtype(kind).type(3)) == 8
    print(sum(outer.stats.cache_hits.values()), sum(outer.stats.cache_misses.values()))
"""
KINDS = ["f4", "f8", "i8"]


class Program:
    """A folder with the module `functions`, a cache, and processes that use both."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.cache, self.temporary = folder, folder / "cache", folder / "tmp"
        self.temporary.mkdir()
        (folder / "functions.py").write_text(FUNCTIONS)
        self.environment = os.environ | {
            "XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(self.temporary), "PYTHONPATH": f"{root}:{folder}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self.environment.pop("NUMBA_CACHE_DIR", None)

    def start(self, *kinds: str, before: str = "", after: str = "") -> subprocess.Popen[str]:
        code = f"import os, fcntl, errno\n{before}\nfrom functions import *\nrun(*{kinds})\n{after}"
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *kinds: str, before: str = "", after: str = "") -> tuple[str, list[str]]:
        """Return the output, which is "HITS MISSES", and the lines on standard error."""
        process = self.start(*kinds, before=before, after=after)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output.strip(), errors.splitlines()

    def files(self, name: str = "") -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file() and name in path.name]


@pytest.fixture
def program(tmp_path: Path, root: Path) -> Program:
    return Program(tmp_path, root)


def test_no_lock_is_needed(program: Program) -> None:
    refuse = """
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = fcntl.lockf = refuse
"""
    assert program.run("f8", before=refuse) == ("0 1", [])
    assert program.run("f8", before=refuse) == ("1 0", [])


def test_versions_that_processes_save_at_the_same_time_are_all_kept(program: Program) -> None:
    processes = [program.start(kind, "f8") for kind in KINDS]
    for process in processes:
        _, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
    assert program.run(*KINDS) == (f"{len(KINDS)} 0", [])


def test_a_process_that_is_killed_while_it_saves_damages_nothing(program: Program) -> None:
    kill = "os.replace = lambda *paths: os.kill(os.getpid(), 9)"
    process = program.start("f8", before=kill)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and len(program.files()) == 1  # the temporary file
    assert program.run("f8") == ("0 1", [])
    assert program.run("f8") == ("1 0", [])


def test_an_edited_source_file_is_compiled_again_in_place(program: Program) -> None:
    program.run("f8")
    files = program.files()
    (program.folder / "functions.py").write_text(FUNCTIONS.replace("== 8", "== 10").replace("a + 1", "a + 2"))
    assert program.run("f8") == ("0 1", [])
    assert program.files() == files


def test_a_function_is_loaded_without_what_numba_compiles_with(program: Program) -> None:
    assert program.run("f8") == ("0 1", [])
    no_bitcode = "from llvmlite import binding\nbinding.parse_bitcode = None"
    assert program.run("f8", before=no_bitcode, after="assert 'numba.np.arraymath' not in sys.modules") == ("1 0", [])
    assert program.run("f8", "f4") == ("1 1", [])


def test_a_users_function_in_the_cache_of_numba(program: Program) -> None:
    """It is loaded after one of minidl's functions, and compiled functions may contain it."""
    more = "import numba\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n"
    (program.folder / "more.py").write_text(more)
    after = ("import more\n@more.numba.njit\ndef twice(x):\n    return more.double(x) + more.double(x)\n"
             "assert more.double(3) == 6 and twice(3) == 12\nhits = sum(more.double.stats.cache_hits.values())\n"
             "assert hits == {}")  # fmt: skip
    assert program.run("f8", after=after.format(0)) == ("0 1", [])
    assert program.run("f8", after=after.format(1)) == ("1 0", [])


def test_a_function_between_two_that_are_compiled_in_different_processes(program: Program) -> None:
    """`last` contains `outer`, which refers to `inner`. A process that loads only `last` must find `inner`."""
    more = "from functions import *\n@jit\ndef last(a):\n    return outer(a) + 1\n"
    (program.folder / "more.py").write_text(more)
    assert program.run("f8") == ("0 1", [])
    for _ in range(2):  # compiled, then loaded
        after = "from more import last\nassert last(np.float64(3)) == 9\n"
        assert program.run(after=after) == ("0 0", [])


def test_a_helper_has_only_bitcode_and_can_print(program: Program) -> None:
    """Its callers contain it. They have what `print` needs, whether the two are compiled or loaded from the cache."""
    (program.folder / "more.py").write_text("""
import numpy as np
from minidl.engine.jit import helper, jit, parallel_jit, prange
@helper
def shown(a):
    print("shown", a)
    return a + 1
@jit
def alone(a):
    return shown(a)
@parallel_jit
def beside(out):
    for i in prange(out.size):
        out[i] = shown(out[i])
""")
    one = "from more import alone; assert alone(3) == 4"
    other = "from more import beside; found = np.array([3]); beside(found); assert found == 4"
    for after in (one, other, other):
        assert program.run(after=after) == ("0 0\nshown 3", [])
    (helper,), (caller,) = program.files("more.shown"), program.files("more.alone")
    assert [b"\x7fELF" in file.read_bytes() for file in (helper, caller)] == [False, True]


# -- problems are reported, once and in one line --------------------------------------------------------------------


def test_a_damaged_file_is_reported_and_replaced(program: Program) -> None:
    program.run("f8")
    (file,) = program.files("outer")
    line = f"minidl: a compiled kernel is damaged, so it is compiled again: {file}"
    for damage in (b"", b"x" * 10, b"x" * 100_000):
        file.write_bytes(damage)
        assert program.run("f8") == ("0 1", [line])
    assert program.run("f8") == ("1 0", [])


def test_a_missing_function_that_another_one_calls_is_reported(program: Program) -> None:
    program.run("f8")
    (file,) = program.files("inner")
    file.unlink()
    hits, lines = program.run("f8")
    assert hits == "1 0" and len(lines) == 1
    assert "the cache of compiled kernels is incomplete" in lines[0]
    assert f"functions.inner, which functions.outer calls, is missing in {file.parent}" in lines[0]
    assert program.run("f8") == ("1 0", [])


def test_a_file_that_cannot_be_read_is_reported(program: Program) -> None:
    program.run("f8")
    (file,) = program.files("outer")
    file.unlink()
    file.mkdir()
    hits, lines = program.run("f8")
    assert hits == "0 1" and f"cannot be read, so it is compiled again: {file}: Is a directory" in lines[0]


@pytest.mark.parametrize("call", quick(["tempfile.mkstemp", "os.fdopen", "os.replace"], "os.replace"))
def test_a_full_disk_is_reported_once(program: Program, call: str) -> None:
    full = f"""
import tempfile
def full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")
from minidl.engine import kernel_cache
{call} = full
"""
    hits, lines = program.run("f8", "f4", before=full)
    assert hits == "0 2" and len(lines) == 1, lines
    assert lines[0].startswith("minidl: compiled kernels cannot be saved, so each process compiles them again: ")
    assert "No space left on device; make room there, or set XDG_CACHE_HOME to a folder" in lines[0]
    assert not program.files()


def test_without_a_folder_one_line_says_why(program: Program) -> None:
    (program.temporary / f"minidl-{os.getuid()}").write_text("not a folder")
    program.cache.mkdir()
    program.cache.chmod(0o777)
    hits, lines = program.run("f8", "f4")
    assert hits == "0 2" and len(lines) == 1
    assert lines[0].startswith("minidl: compiled kernels cannot be kept, so each process compiles them again: ")
    assert f"{program.cache}: other users can write to it (mode 777)" in lines[0]
    assert "Not a directory" in lines[0] and "set XDG_CACHE_HOME" in lines[0]


def test_a_temporary_folder_is_named_when_it_is_filled(program: Program) -> None:
    program.cache.mkdir()
    program.cache.chmod(0o777)
    hits, lines = program.run("f8")
    assert hits == "0 1" and len(lines) == 1
    assert lines[0].startswith(f"minidl: compiled kernels are kept in a temporary folder: {program.temporary}/minidl-")
    assert f"{program.cache}: other users can write to it (mode 777)" in lines[0]
    assert program.run("f8") == ("1 0", [])


def test_functions_without_a_source_file_are_compiled_but_not_kept(program: Program) -> None:
    typed = "@jit\ndef double(a):\n    return 2 * a\nassert double(3) == 6"
    assert program.run("f8", after=typed) == ("0 1", [])
    assert not program.files("double")


def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    kernel_cache._report("test", "no terminal")
