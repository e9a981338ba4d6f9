"""Settings from environment variables, and variables that libraries read when they are imported.

    MINIDL_THREADS=n     threads of this process (`--threads` on the command line); default: all cores
    MINIDL_WORKERS=n     replicas if --workers is not given; default: two if there are at least two cores
    MINIDL_ISA=avx2      compile for a smaller instruction set than this CPU has (or =portable): for comparisons, and to
                         test on one machine the code that others will run
"""

from __future__ import annotations

import os
import platform
import sys

from minidl.errors import ConfigError

CPU_NAMES = {"avx2": "x86-64-v3", "portable": "x86-64-v2"}  # LLVM's names


def isa() -> str:
    """The instruction set to compile for (MINIDL_ISA), or "" for everything this CPU has. Raises ConfigError."""
    chosen = os.environ.get("MINIDL_ISA", "")
    if chosen and chosen not in CPU_NAMES:
        raise ConfigError(f"MINIDL_ISA is {chosen!r}: expected {' or '.join(CPU_NAMES)}, or unset for this CPU's own")
    return chosen


def number(name: str) -> int:
    """The value of an environment variable as an integer, or 0 if it is not set.

    Raises ConfigError if the value is not an integer of at least 1.
    """
    text = os.environ.get(name, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"{name} is {text!r}: expected a number of 1 or more")
    return int(text or 0)


def prepare(threads: int = 0) -> None:
    """Set the variables that libraries read when they are imported.

    threads: the value of --threads, or 0 for the default. It has no effect once Numba is loaded (engine/jit.py).
    Raises ConfigError for an invalid value.
    """
    if threads and "minidl.engine.jit" not in sys.modules:
        os.environ["MINIDL_THREADS"] = str(threads)
    if threads := number("MINIDL_THREADS"):
        os.environ.setdefault("NUMBA_NUM_THREADS", str(min(threads, os.cpu_count() or 1)))
    # A thread that waits for work spins briefly, then sleeps: machines are shared (measured in shared/prototypes).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Kernels split their work themselves; a BLAS with its own threads would compete with them for the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isa() and platform.machine() in ("x86_64", "AMD64"):
        os.environ.update(NUMBA_CPU_NAME=CPU_NAMES[isa()], NUMBA_CPU_FEATURES="")
