"""What the environment says about a process, and what libraries must be told before they are imported.

    MINIDL_THREADS=n     threads of this process (`--threads` on the command line); all cores unless set
    MINIDL_WORKERS=n     replicas where --workers is not given; else two, where there are two cores
    MINIDL_ISA=avx2      compile for less than this CPU can (or =portable): to compare, and to test on one machine what
                         others will run
"""

from __future__ import annotations

import os
import platform
import sys

from minidl.errors import ConfigError

CPU_NAMES = {"avx2": "x86-64-v3", "portable": "x86-64-v2"}  # as LLVM calls them


def isa() -> str:
    """What to compile for; empty for all that this CPU can."""
    chosen = os.environ.get("MINIDL_ISA", "")
    if chosen and chosen not in CPU_NAMES:
        raise ConfigError(f"MINIDL_ISA is {chosen!r}: expected {' or '.join(CPU_NAMES)}, or nothing for all there is")
    return chosen


def number(name: str) -> int:
    """Of a variable; 0 where it is not set. Raises ConfigError for what is no number of 1 or more."""
    words = os.environ.get(name, "")
    if words and (not words.isdecimal() or int(words) < 1):
        raise ConfigError(f"{name} is {words!r}: expected a number of 1 or more")
    return int(words or 0)


def prepare(threads: int = 0) -> None:
    """Set what libraries read when they are imported. threads: as --threads says, where Numba has not started any.

    Raises ConfigError for a value that makes no sense.
    """
    if threads and "minidl.engine.jit" not in sys.modules:
        os.environ["MINIDL_THREADS"] = str(threads)
    if threads := number("MINIDL_THREADS"):
        os.environ.setdefault("NUMBA_NUM_THREADS", str(min(threads, os.cpu_count() or 1)))
    # A thread that waits for work spins briefly, then sleeps: machines are shared (measured in shared/prototypes).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Kernels split their work themselves; a BLAS that starts threads of its own would fight with them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isa() and platform.machine() in ("x86_64", "AMD64"):
        os.environ.update(NUMBA_CPU_NAME=CPU_NAMES[isa()], NUMBA_CPU_FEATURES="")
