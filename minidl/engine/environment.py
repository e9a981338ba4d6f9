"""Settings from environment variables, and variables that libraries read when they are imported.

    MINIDL_THREADS=n     number of threads, unless --threads is given; default: one per core, within the CPU limit of a
                         container. Under mpiexec, the ranks of a machine divide its cores. Replicas that minidl starts
                         ignore the variable: each gets an equal share of the cores.
    MINIDL_WORKERS=n     number of replicas, unless --workers is given; default: two, or one if there is only one core
    MINIDL_REPORT=0      write no report.html at the end of a run, as with --no-report
    MINIDL_ISA=avx2      (or avx512, or portable) compile for an older CPU than this one; avx512: without AMX
    MINIDL_L2=n          KiB of a core's second-level cache, from which block sizes follow; default: as Linux reports
"""

from __future__ import annotations

import os
import platform
import sys

from minidl.errors import ConfigError
from minidl.resources import caches, cores

USUAL_L2, LEAST_L2, MOST_L2 = 1 << 20, 1 << 18, 1 << 21  # bytes; virtual machines may report caches that are not there
CPU_NAMES = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "portable": "x86-64-v2"}  # LLVM's names
WHOLE_VECTORS = "-prefer-256-bit"  # the feature of LLVM that lets it use 512-bit vectors in plain loops


def isa() -> str:
    """Return the instruction set to compile for (MINIDL_ISA), or "" if there is no limit. Raises ConfigError."""
    chosen = os.environ.get("MINIDL_ISA", "")
    if chosen and chosen not in CPU_NAMES:
        raise ConfigError(f"MINIDL_ISA is {chosen!r}: expected {', '.join(CPU_NAMES)}, or unset for no limit")
    return chosen


def number(name: str) -> int:
    """Return the value of an environment variable as an integer, or 0 if it is not set.

    Raises ConfigError if the value is not an integer of at least 1.
    """
    text = os.environ.get(name, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"{name} is {text!r}: expected a whole number of 1 or more")
    return int(text or 0)


def second_level_cache() -> int:
    """Return the bytes of a core's second-level cache: MINIDL_L2, or what Linux reports, within what CPUs have."""
    found = number("MINIDL_L2") << 10 or caches().get(2, USUAL_L2)
    return max(LEAST_L2, min(found, MOST_L2))


def prepare(threads: int = 0) -> None:
    """Set the variables that libraries read when they are imported.

    threads: the value of --threads, or 0 for the default. The value has no effect once engine/jit.py is imported.
    Raises ConfigError for an invalid value.
    """
    if threads and "minidl.engine.jit" not in sys.modules:
        os.environ["MINIDL_THREADS"] = str(threads)
    if threads := number("MINIDL_THREADS"):
        if "numba" not in sys.modules:  # else it refuses another number
            os.environ.setdefault("NUMBA_NUM_THREADS", str(min(threads, os.cpu_count() or 1)))
    elif (limit := cores()) < len(os.sched_getaffinity(0)):  # Numba does not know the limit of a container
        os.environ.setdefault("NUMBA_NUM_THREADS", str(limit))
    # Waiting threads of GNU OpenMP spin for about 0.3 ms, then sleep: other processes, such as other replicas, need the
    # cores. Waking a thread takes 0.06 ms (Intel Xeon, virtual machine), and Python needs 0.02 to 0.1 ms between two
    # runs of a program. So threads stay awake from call to call.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # Kernels split their work themselves. The threads of a BLAS would compete with them for the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isa() and platform.machine() in ("x86_64", "AMD64"):
        os.environ.update(NUMBA_CPU_NAME=CPU_NAMES[isa()], NUMBA_CPU_FEATURES=WHOLE_VECTORS)
