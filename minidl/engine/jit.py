"""How kernels are compiled: the one place that imports Numba's decorators and chooses their flags.

    @jit            serial machine code, no GIL, cached on disk
    @apart_jit      the same for long functions: callers do not contain them, they call them
    @parallel_jit   apart, and with `prange` loops spread over the threads

Three choices hold for every kernel:

- No fast-math: every sum is added in the order in which it is written, and `a * b + c` is never contracted. With
  `reassoc` LLVM may choose another order wherever it inlines a kernel, and does: batch norm's gradient had other bits
  in the process that compiled it than in those that loaded it from the cache.
- A parallel loop runs over a fixed number of chunks, never over "one chunk for each thread": bits must not
  depend on the number of threads.
- The cache folder is named by a hash of every file under kernels/: Numba alone would not notice an edit in
  a helper that a kernel imports, and would go on running the old code. Only our kernels go there: Numba reads
  the folder's name when a function is decorated, so it is set for that moment, and code of others is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from minidl.engine.environment import isa, prepare

KERNELS = Path(__file__).parents[1] / "kernels"
UNUSED = 30 * 24 * 3600  # seconds: older folders of other versions are deleted


def _cache_folder() -> str | None:
    """A folder for compiled kernels that can be written to, keyed by their source; None where there is none."""
    target = cpu_target.target_context.codegen().magic_tuple()  # the CPU compiled for, with its features
    digest = hashlib.sha256(repr(target).encode())
    root = KERNELS if KERNELS.is_dir() else KERNELS.parent.parent / "kernels"
    for file in sorted([*root.rglob("*.py"), Path(__file__)]):
        digest.update(file.read_bytes())
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    home = Path(chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for base in (home / "minidl", Path(tempfile.gettempdir()) / f"minidl-{os.getuid()}"):
        folder = base / "kernels" / digest.hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Compiled code is run as it lies there: a folder of somebody else is not ours to trust.
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                _prune(folder)
                return str(folder)
        except OSError:
            continue
    return None


def _prune(folder: Path) -> None:
    """Delete the folders beside it that were not used for a month; each use sets a folder's time."""
    os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # another process was faster
            if other.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(other, ignore_errors=True)


prepare()
import numba  # noqa: E402
from llvmlite import binding  # noqa: E402
from numba import prange, types  # noqa: E402
from numba.core.base import user_function  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402

numba.config.reload_config()  # it may have been imported before
_folder = _cache_folder()


def _vector_unit() -> tuple[int, int, bool]:
    """Of the CPU that is compiled for: bytes in a vector register, how many there are, and whether x y + z is one
    instruction."""
    features = binding.get_host_cpu_features()
    if not isa() and features.get("avx512f"):
        return 64, 32, True
    if isa() in ("", "avx2") and features.get("avx2") and features.get("fma"):
        return 32, 16, True
    return 16, 32 if platform.machine() in ("aarch64", "arm64") else 16, platform.machine() in ("aarch64", "arm64")


VECTOR_BYTES, REGISTERS, HAS_FMA = _vector_unit()


# -- what decorators do -----------------------------------------------------------------------------------------------


def _compile(function: Callable[..., Any], parallel: bool, apart: bool) -> Any:
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = _folder or before
    try:
        kernel = numba.njit(
            nogil=True, cache=bool(_folder), error_model="numpy", parallel=parallel, no_cfunc_wrapper=True
        )(function)
    finally:
        config.CACHE_DIR = before
    if _folder:
        kernel._cache.save_overload = partial(_save, kernel._cache.save_overload)
    kernel.get_call_template = partial(_call_template, kernel, apart)
    if apart:
        _apart[kernel.__module__, kernel.__qualname__] = kernel
    return kernel


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a helper of kernels, as serial machine code."""
    return _compile(function, parallel=False, apart=False)


def apart_jit(function: Callable[..., Any]) -> Any:
    """A long function, compiled once and called, never copied into its callers."""
    return _compile(function, parallel=False, apart=True)


def parallel_jit(function: Callable[..., Any]) -> Any:
    """A kernel whose `prange` loops are spread over the threads. It is long: apart, too."""
    return _compile(function, parallel=True, apart="<locals>" not in function.__qualname__)


def _save(save: Callable[..., None], *arguments: Any) -> None:
    """Numba numbers a function's files by an index of them: two processes at once would take one number for two."""
    with suppress(OSError), open(f"{_folder}/lock", "w") as lock:  # not saved: the next process compiles again
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(*arguments)


def cached(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether the machine code for arguments of these types lies in the cache."""
    if not _folder:
        return False
    cache = kernel._cache
    return cache._index_key(signature, kernel.targetctx.codegen()) in cache._cache_file._load_index()


# -- how compiled functions call one another --------------------------------------------------------------------------

_apart: dict[tuple[str, str], Any] = {}  # (module, name) -> function
_symbols: set[str] = set()  # under which linkers know them


def _call_template(kernel: Any, apart: bool, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """What Numba asks when compiled code calls `kernel` with arguments of some types."""
    _, folded = kernel._compiler.fold_argument_types(arguments, keywords)
    folded = tuple(types.unliteral(argument) for argument in folded)  # f(0) and f(1) are one function
    template = type(kernel).get_call_template(kernel, folded, {})
    if apart:
        _Symbol(kernel.__module__, kernel.__qualname__, folded)()
    return template


@dataclass(frozen=True)
class _Symbol:
    """A function apart, for arguments of some types.

    Numba would link it into each caller, and optimise and emit it there once more, at each level of calls. Instead
    its address gets a name, and callers refer to the name.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Make the name known. A caller loaded from the cache does this first (its `_reload_init`)."""
        import_module(self.module)
        kernel = _apart[self.module, self.function]
        kernel.compile(self.arguments)  # or loads it
        compiled = kernel.overloads[self.arguments]
        name = f"{self.module}.{self.function}{self.arguments}"
        if name in _symbols:
            return
        _symbols.add(name)
        binding.add_symbol(name, compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
        named = copy(compiled.fndesc)
        named.mangled_name = name
        call_name = user_function(named, ())

        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            context.active_code_library._reload_init.add(self)
            return call_name(context, builder, signature, arguments)

        call.signature, call.libs = call_name.signature, ()  # type: ignore[attr-defined]
        context = kernel.targetctx
        context.remove_user_function(compiled.entry_point)  # as Numba would call it
        context._defns[compiled.entry_point].append(call, call.signature)  # type: ignore[attr-defined]


def threads() -> int:
    """How many threads parallel kernels use."""
    return numba.get_num_threads()


def set_threads(threads: int) -> None:
    """Use this many threads in parallel kernels, at most the machine's cores."""
    numba.set_num_threads(max(1, min(threads, numba.config.NUMBA_NUM_THREADS)))


if os.environ.get("MINIDL_THREADS"):
    set_threads(int(os.environ["MINIDL_THREADS"]))  # where Numba was imported before, with other threads


__all__ = [
    "HAS_FMA", "REGISTERS", "VECTOR_BYTES", "apart_jit", "cached", "jit", "parallel_jit", "prange", "set_threads",
    "threads",
]  # fmt: skip
