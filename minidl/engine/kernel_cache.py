"""The cache of compiled kernels on disk: its folder, its files, and how processes share them.

A file holds one function, compiled for one tuple of argument types:

    SHA-256 of the function's source file | SHA-256 of the last part | key and compiled function (`libraries.save`)

The key is everything else on which the code depends: the function, the types, the CPU, the versions of Python and
Numba. Processes share the cache without a lock, since some network file systems have none, and without an index: the
name of a file ends with a hash of its key. A process writes a temporary file and renames it, so a file is complete or
missing. If two processes compile the same function, the later file replaces the earlier, equivalent one.

minidl executes the code in these files. So the cache is used only if no other user can change it (`make_trusted`).

engine/jit.py imports this module after it has set the environment variables that Numba reads.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import inspect
import os
import pickle
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from minidl.engine import libraries

UNUSED = 30 * 24 * 3600  # seconds after which the unused cache folder of another version is deleted
DIGEST = 32  # bytes of a SHA-256
_SET = "set XDG_CACHE_HOME to a folder into which only you can write"

_reported: set[str] = set()
_loading: list[str] = []  # functions that are being loaded from the cache; each calls the next one


def _report(problem: str, details: str) -> None:
    """Print a problem with the cache, in one line. Later reports of the same problem in this process are ignored."""
    if problem not in _reported:
        _reported.add(problem)
        with suppress(OSError, ValueError):  # the terminal may be gone
            start = "\r\033[K" if sys.stderr.isatty() else ""  # a progress display may have begun a line
            print(f"{start}minidl: {problem}: {details}", file=sys.stderr, flush=True)


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


# -- the folder -------------------------------------------------------------------------------------------------------


def find_folder(name: str) -> tuple[Path | None, list[str]]:
    """Return the first folder `name` that can be created and trusted (or None), and why earlier ones were refused.

    The first candidate is in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, the second in the temporary folder.
    """
    refused: list[str] = []
    homes: set[Path] = set()
    with suppress(RuntimeError, OSError):  # this user has no home
        homes = {Path.home(), Path.home().resolve()} if Path.home().is_absolute() else set()
    for base in _bases():
        folder = base / "kernels" / name
        try:
            make_trusted(folder, homes)
            _prune(folder)
            return folder, refused
        except OSError as error:
            refused.append(_reason(error))
    return None, refused or ["this user has no home folder"]


def _bases() -> Iterator[Path]:
    with suppress(RuntimeError):  # no home
        chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
        yield Path(chosen or Path.home() / ".cache").absolute() / "minidl"
    with suppress(FileNotFoundError):  # no folder for temporary files
        yield Path(tempfile.gettempdir()).absolute() / f"minidl-{os.getuid()}"


def make_trusted(folder: Path, homes: Collection[Path] = ()) -> None:
    """Create `folder`, unless it exists. Raise an OSError if it is not writable, or if another user could change it.

    Only this user may write into the folder, and only this user or root may replace it. So this user or root must own
    each folder on the path. Other users may write into a parent only if it is sticky, like /tmp: they cannot rename or
    delete the files of others there. A symbolic link is checked like a folder, and so is the path to which it refers.
    The parents of a home folder (`homes`) are not checked: a user with write access to them already controls the
    account.
    """
    _check(folder, homes)
    info = folder.stat()
    if info.st_uid != os.getuid():
        raise _refusal(folder, "belongs to another user")
    if info.st_mode & 0o022:
        raise _refusal(folder, f"other users can write to it (mode {stat.S_IMODE(info.st_mode):o})")
    if not os.access(folder, os.W_OK):
        raise _refusal(folder, "is not writable")


def _check(path: Path, homes: Collection[Path]) -> None:
    """Check each component of a path, starting at the root. Other users cannot change a component that was checked."""
    at_end = path in homes or path == path.parent
    if not at_end:
        _check(path.parent, homes)
    try:
        info = path.stat() if at_end else path.lstat()
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process created it first
            path.mkdir(mode=0o700)
        info = path.lstat()
    # In a user namespace, as containers use it, root may appear as another user: the owner of "/".
    if info.st_uid not in (os.getuid(), 0, os.stat("/").st_uid):
        raise _refusal(path, "belongs to another user")
    if stat.S_ISLNK(info.st_mode):
        with suppress(FileNotFoundError):
            path.stat()  # fails if the links form a loop
        _check(path.parent / path.readlink(), homes)
    elif not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    elif info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise _refusal(path, f"other users can write to it (mode {stat.S_IMODE(info.st_mode):o})")


def _refusal(path: Path, reason: str) -> PermissionError:
    return PermissionError(errno.EACCES, reason, str(path))


def _prune(folder: Path) -> None:
    """Mark the folder as used now, and delete its sibling folders that were not used for a month."""
    os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # another process deleted it first
            if other.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(other, ignore_errors=True)


# -- the files --------------------------------------------------------------------------------------------------------


class KernelCache:
    """The compiled versions of one function on disk. It replaces the cache of Numba's dispatcher and has its methods.

    folder, refused: the result of `find_folder`. called_by_python: whether Python can call the machine code.
    """

    def __init__(
        self, function: Callable[..., Any], folder: Path | None, refused: list[str], called_by_python: bool
    ) -> None:
        self.function, self.folder, self.refused, self.called_by_python = function, folder, refused, called_by_python
        self.name, self.source = f"{function.__module__}.{function.__qualname__}", inspect.getfile(function)
        self.stamp = _stamp(self.source)  # now, since the file may be edited later

    @property
    def cache_path(self) -> str | None:
        return str(self.folder) if self.folder else None

    def contains(self, signature: tuple[Any, ...], codegen: Any) -> bool:
        """Return whether there is machine code for arguments of these types."""
        return self._read(self._key(signature, codegen)) is not None

    def load_overload(self, signature: tuple[Any, ...], context: Any) -> Any:
        """Return the compiled function, or None if it is not in the cache.

        Numba's own cache calls `context.refresh()` here, which registers all that Numba can compile (0.2 s in each
        process). Machine code needs only the symbols of Numba's runtime, and a compilation calls `refresh` itself.
        An exception is the hash of a string, which no kernel computes.
        """
        rtsys.initialize(context)
        codegen = context.codegen()
        codegen.unserialize_library = functools.partial(libraries.load, codegen)
        key = self._key(signature, codegen)
        data = self._read(key)
        stored, compiled = pickle.loads(data) if data else (None, ())
        if stored == key:
            _loading.append(self.name)
            try:
                found = CompileResult._rebuild(context, *compiled)  # also loads the functions that this one calls
                # A function that is compiled now and contains this one must load them, too. Numba forgets that.
                found.library._reload_init.update(found.reload_init)
                return found
            finally:
                _loading.pop()
        if _loading and not self._path(key).exists():
            _report("the cache of compiled kernels is incomplete, so kernels are compiled again",
                    f"{self.name}, which {_loading[-1]} calls, is missing in {self.folder}")  # fmt: skip
        return None

    def save_overload(self, signature: tuple[Any, ...], compiled: Any) -> None:
        """Write the compiled function to the cache."""
        if not self.folder or not self.stamp:
            return
        if compiled.lifted or compiled.library.has_dynamic_globals:
            _report("this kernel cannot be cached, so each process compiles it again",
                    f"{self.name} contains objects or addresses of this process")  # fmt: skip
            return
        key = self._key(signature, compiled.codegen)
        data = dumps((key, libraries.save(compiled)))
        path = self._path(key)
        try:
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix="writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self.stamp + hashlib.sha256(data).digest() + data)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            _report("compiled kernels cannot be saved, so each process compiles them again",
                    f"{self.folder}: {error.strerror}; make room there, or {_SET}")  # fmt: skip

    def flush(self) -> None:
        """Do nothing. Numba calls this before it compiles all versions again; the new files replace the old ones."""

    def enable(self) -> None:
        """Part of the interface of Numba's caches; unused."""

    disable = enable

    def _read(self, key: tuple[Any, ...]) -> bytes | None:
        """Return the pickled part of a file, or None if the file is missing, damaged, or of another source version."""
        if not self.folder:
            _report("compiled kernels cannot be kept, so each process compiles them again",
                    f"{'; '.join(self.refused)}; change that, or {_SET}")  # fmt: skip
            return None
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            if self.refused:  # reported only if a kernel must be compiled
                _report("compiled kernels are kept in a temporary folder",
                        f"{self.folder}, because of {'; '.join(self.refused)}; change that, or {_SET}")  # fmt: skip
            return None
        except OSError as error:
            _report("a compiled kernel cannot be read, so it is compiled again", _reason(error))
            return None
        stamp, digest, data = content[:DIGEST], content[DIGEST : 2 * DIGEST], content[2 * DIGEST :]
        if digest != hashlib.sha256(data).digest():
            _report("a compiled kernel is damaged, so it is compiled again", str(self._path(key)))
            return None
        return data if stamp == self.stamp else None

    def _path(self, key: tuple[Any, ...]) -> Path:
        assert self.folder
        readable = re.sub(r"[^\w.]", "", self.name)[:100]
        return self.folder / f"{readable}-{hashlib.sha256(repr(key).encode()).hexdigest()[:DIGEST]}"

    def _key(self, signature: tuple[Any, ...], codegen: Any) -> tuple[Any, ...]:
        """Return what the machine code depends on, except the source file's contents."""
        code = self.function.__code__
        enclosed = tuple(cell.cell_contents for cell in self.function.__closure__ or ())
        return (
            self.name, self.source, code.co_firstlineno, hashlib.sha256(code.co_code).hexdigest(),
            hashlib.sha256(dumps(enclosed)).hexdigest() if enclosed else "", tuple(signature), codegen.magic_tuple(),
            platform.python_version(), sys.implementation.cache_tag, numba.__version__, self.called_by_python,
        )  # fmt: skip


@functools.cache
def _stamp(source: str) -> bytes:
    """Return the SHA-256 of a source file; b"" if there is no file, as for functions typed into Python."""
    with suppress(FileNotFoundError):
        return hashlib.sha256(Path(source).read_bytes()).digest()
    return b""
