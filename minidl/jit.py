"""How kernels are compiled: the one place that imports Numba's decorators and chooses their flags.

    @jit            serial machine code, no GIL, cached on disk
    @parallel_jit   the same with `prange` loops spread over the threads

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

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError

KERNELS = Path(__file__).parent / "kernels"
UNUSED = 30 * 24 * 3600  # seconds: older folders of other versions are deleted


def _cache_folder() -> str | None:
    """A folder for compiled kernels that can be written to, keyed by their source; None where there is none."""
    digest = hashlib.sha256()
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


_folder = _cache_folder()


def _choose_threads() -> None:
    """MINIDL_THREADS is for this process, and said before Numba starts its threads."""
    words = os.environ.get("MINIDL_THREADS", "")
    if not words:
        return
    if not words.isdecimal() or int(words) < 1:
        raise ConfigError(f"MINIDL_THREADS is {words!r}: expected a number of threads of 1 or more")
    os.environ.setdefault("NUMBA_NUM_THREADS", str(min(int(words), os.cpu_count() or 1)))


_choose_threads()
# A thread that waits for work spins briefly, then sleeps: machines are shared (measured in shared/prototypes).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Kernels split their work themselves; a BLAS that starts threads of its own would fight with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# MINIDL_ISA=avx2 or =portable compiles for less than this CPU can: to compare, and to test on one machine what others
# will run.
ISA = os.environ.get("MINIDL_ISA", "")
_CPU_NAMES = {"avx2": "x86-64-v3", "portable": "x86-64-v2"}
if ISA and ISA not in _CPU_NAMES:
    raise ConfigError(f"MINIDL_ISA is {ISA!r}: expected {' or '.join(_CPU_NAMES)}, or nothing for all there is")
if ISA in _CPU_NAMES and platform.machine() in ("x86_64", "AMD64"):
    os.environ.update(NUMBA_CPU_NAME=_CPU_NAMES[ISA], NUMBA_CPU_FEATURES="")

import numba  # noqa: E402
from llvmlite import binding  # noqa: E402
from numba import prange  # noqa: E402


def _vector_unit() -> tuple[int, int, bool]:
    """Of the CPU that is compiled for: bytes in a vector register, how many there are, and whether x y + z is one
    instruction."""
    features = binding.get_host_cpu_features()
    if not ISA and features.get("avx512f"):
        return 64, 32, True
    if ISA in ("", "avx2") and features.get("avx2") and features.get("fma"):
        return 32, 16, True
    return 16, 32 if platform.machine() in ("aarch64", "arm64") else 16, platform.machine() in ("aarch64", "arm64")


VECTOR_BYTES, REGISTERS, HAS_FMA = _vector_unit()


def _compile(function: Callable[..., Any], parallel: bool) -> Any:
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = _folder or before
    try:
        return numba.njit(
            nogil=True, cache=bool(_folder), error_model="numpy", parallel=parallel
        )(function)
    finally:
        config.CACHE_DIR = before


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a helper of kernels, as serial machine code."""
    return _compile(function, parallel=False)


def parallel_jit(function: Callable[..., Any]) -> Any:
    """A kernel whose `prange` loops are spread over the threads."""
    return _compile(function, parallel=True)


def threads() -> int:
    """How many threads parallel kernels use."""
    return numba.get_num_threads()


def set_threads(threads: int) -> None:
    """Use this many threads in parallel kernels, at most the machine's cores."""
    numba.set_num_threads(max(1, min(threads, numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


__all__ = ["HAS_FMA", "REGISTERS", "VECTOR_BYTES", "jit", "parallel_jit", "prange", "set_threads", "threads"]
