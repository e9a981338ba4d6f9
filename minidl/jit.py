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

from minidl.environment import isa, prepare

KERNELS = Path(__file__).parent / "kernels"
UNUSED = 30 * 24 * 3600  # seconds: older folders of other versions are deleted


def _cache_folder() -> str | None:
    """A folder for compiled kernels that can be written to, keyed by their source; None where there is none."""
    digest = hashlib.sha256(isa().encode())
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


prepare()
import numba  # noqa: E402
from llvmlite import binding  # noqa: E402
from numba import prange  # noqa: E402

numba.config.reload_config()  # it may have been imported before


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
    numba.set_num_threads(max(1, min(threads, numba.config.NUMBA_NUM_THREADS)))


if os.environ.get("MINIDL_THREADS"):
    set_threads(int(os.environ["MINIDL_THREADS"]))  # where Numba was imported before, with other threads


__all__ = ["HAS_FMA", "REGISTERS", "VECTOR_BYTES", "jit", "parallel_jit", "prange", "set_threads", "threads"]
