"""Settings from environment variables, and variables that libraries read when they are imported.

    MINIDL_THREADS=n     number of threads, unless --threads is given; default: one per core, within the CPU limit of a
                         container. Under mpiexec, the ranks of a machine divide its cores. Replicas that minidl starts
                         ignore the variable: each gets an equal share of the cores.
    MINIDL_WORKERS=n     number of replicas, unless --workers is given; default: two, or one if there is only one core
    MINIDL_REPORT=0      write no report.html at the end of a run, as with --no-report
    MINIDL_ISA=avx2      (or portable) compile for an older CPU than this one
    GOMP_SPINCOUNT=n     how often a waiting thread looks before it sleeps (spin_count); read by GNU OpenMP
    MINIDL_L2=n          KiB of a core's second-level cache, from which block sizes follow; default: as Linux reports
"""

from __future__ import annotations

import os
import platform
import sys

from minidl.errors import ConfigError
from minidl.resources import caches, cores, processor

USUAL_L2, LEAST_L2, MOST_L2 = 1 << 20, 1 << 18, 1 << 21  # bytes; virtual machines may report caches that are not there
SPIN_SECONDS = 65e-6
PAUSE, INTEL_PAUSE = 13e-9, 45e-9  # seconds of x86's `pause`: about 40 cycles on AMD, 140 on Intel since Skylake
CPU_NAMES = {"avx2": "x86-64-v3", "portable": "x86-64-v2"}  # LLVM's names


def isa() -> str:
    """Return the instruction set to compile for (MINIDL_ISA), or "" if there is no limit. Raises ConfigError."""
    chosen = os.environ.get("MINIDL_ISA", "")
    if chosen and chosen not in CPU_NAMES:
        raise ConfigError(f"MINIDL_ISA is {chosen!r}: expected {' or '.join(CPU_NAMES)}, or unset for no limit")
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


def spin_count() -> int:
    """Return how often a thread that waits for others looks again before it sleeps: for about SPIN_SECONDS.

    To wake a sleeping thread takes 20 to 60 us in a virtual machine. If threads slept sooner than that, each parallel
    loop could find the other threads asleep: they sleep while they wait for one that wakes up. A prediction of the MLP
    with batch 8 took 240 us then, not 70 (measured: Zen 4, two threads, bench/predict.py). Threads that spin for long
    take the cores from other processes. To spin as long as it takes to wake up costs at most twice the best choice
    (Karlin, Li, Manasse, Owicki 1991, "Empirical studies of competitive spinning for a shared-memory multiprocessor").
    """
    try:
        vendor = processor().get("vendor_id", "")
    except OSError:
        vendor = ""
    return round(SPIN_SECONDS / (INTEL_PAUSE if vendor == "GenuineIntel" else PAUSE))


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
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))
    # Kernels split their work themselves. The threads of a BLAS would compete with them for the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isa() and platform.machine() in ("x86_64", "AMD64"):
        os.environ.update(NUMBA_CPU_NAME=CPU_NAMES[isa()], NUMBA_CPU_FEATURES="")
