"""How kernels are compiled: the one place that imports Numba's decorators and chooses their flags.

    @jit            serial machine code, no GIL, cached on disk
    @parallel_jit   the same with `prange` loops spread over the threads

Three choices hold for every kernel:

- Only `reassoc` and `nsz` of fast-math: reductions may be vectorised, NaN and infinity stay visible, and
  `a * b + c` is never contracted behind our back, so that eager and recorded steps give the same bits.
- A parallel loop runs over a fixed number of chunks, never over "one chunk for each thread": bits must not
  depend on the number of threads.
- The cache folder is named by a hash of every file under kernels/: Numba alone would not notice an edit in
  a helper that a kernel imports, and would go on running the old code.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent / "kernels"
FAST_MATH = {"reassoc", "nsz"}


def _cache_folder() -> str | None:
    """A folder for compiled kernels that can be written to, keyed by their source; None where there is none."""
    digest = hashlib.sha256()
    root = KERNELS if KERNELS.is_dir() else KERNELS.parent.parent / "kernels"
    for file in sorted([*root.rglob("*.py"), Path(__file__)]):
        digest.update(file.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for base in (home / "minidl", Path(tempfile.gettempdir()) / f"minidl-{os.getuid()}"):
        folder = base / "kernels" / digest.hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Compiled code is run as it lies there: a folder of somebody else is not ours to trust.
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return str(folder)
        except OSError:
            continue
    return None


_folder = os.environ.get("NUMBA_CACHE_DIR") or _cache_folder()
if _folder:
    os.environ["NUMBA_CACHE_DIR"] = _folder
# A thread that waits for work spins briefly, then sleeps: machines are shared (measured in shared/prototypes).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Kernels split their work themselves; a BLAS that starts threads of its own would fight with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numba  # noqa: E402
from numba import prange  # noqa: E402

if _folder:
    numba.config.CACHE_DIR = _folder  # type: ignore[attr-defined]  # when somebody imported Numba before us

Kernel = Callable[..., None]

_OPTIONS: dict[str, Any] = dict(nogil=True, cache=bool(_folder), fastmath=FAST_MATH, error_model="numpy")
jit: Callable[[Callable[..., Any]], Any] = numba.njit(**_OPTIONS)
parallel_jit: Callable[[Callable[..., Any]], Any] = numba.njit(parallel=True, **_OPTIONS)


def set_threads(threads: int) -> None:
    """Use this many threads in parallel kernels, at most the machine's cores."""
    numba.set_num_threads(max(1, min(threads, numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


__all__ = ["Kernel", "jit", "parallel_jit", "prange", "set_threads"]
