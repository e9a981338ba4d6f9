"""Threads and forks: what they may do depends on Numba's threading layer, the library that runs parallel kernels.

    layer       several threads run kernels       a fork of a process that has run kernels
    tbb         works                             works
    omp         works                             Numba ends the fork, because GNU OpenMP does not survive it
    workqueue   Numba aborts the process          works

With workqueue, kernels therefore run one at a time, under a lock that all threads share. With omp, a fork that cannot
run kernels raises MinidlError before Numba ends it (`check_fork`). $NUMBA_THREADING_LAYER selects a layer.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakSet

from minidl.engine.changes import count_change
from minidl.errors import MinidlError

Lock = AbstractContextManager[Any]

_locks: WeakSet[Any] = WeakSet()
_unusable = False  # whether this process is a fork that cannot run kernels


def new_lock() -> Lock:
    """Return a lock that its holder may enter again.

    In a fork the lock is free, even if another thread of the parent process held it.
    """
    lock: Any = threading.RLock()
    _locks.add(lock)
    return lock


_kernels = new_lock()  # held while a kernel runs, if kernels must run one at a time


@functools.cache
def one_at_a_time() -> bool:
    """Return whether only one thread at a time may run kernels: True if Numba uses workqueue, or may choose it."""
    import numba
    from numba.core.compiler_lock import global_compiler_lock as compiler

    # A fork waits until no thread compiles. Otherwise the compiler would remain locked in the new process.
    os.register_at_fork(before=compiler.acquire, after_in_parent=compiler.release, after_in_child=compiler.release)
    with suppress(ValueError):  # raised before Numba has loaded a layer
        return bool(numba.threading_layer() == "workqueue")
    chosen = str(numba.config.THREADING_LAYER).lower()
    if chosen == "default":  # Numba takes the first layer of its list that it can load; tbb may be missing
        chosen = next(layer for layer in numba.config.THREADING_LAYER_PRIORITY if layer != "tbb")
        chosen = "workqueue" if chosen == "omp" and not _has_openmp() else chosen
    return chosen not in ("tbb", "omp", "safe", "threadsafe")


def _has_openmp() -> bool:
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:  # no libgomp on this machine
        return False
    return True


def kernel_lock() -> Lock:
    """Return a lock for memory that kernels use. If kernels must run one at a time, all memory has the same lock."""
    return _kernels if one_at_a_time() else new_lock()


def check_fork() -> None:
    """Raise MinidlError if this process is a fork that cannot run kernels."""
    if _unusable:
        raise MinidlError(
            "this process is a fork of one that had already computed with minidl, and GNU OpenMP does not survive a "
            "fork: start processes with multiprocessing's method 'spawn', or set NUMBA_THREADING_LAYER=workqueue"
        )


def _after_fork() -> None:
    global _unusable
    count_change()  # what was checked before the fork is checked again
    for lock in _locks:
        lock._at_fork_reinit()
    numba: Any = sys.modules.get("numba")
    openmp: Any = sys.modules.get("numba.np.ufunc.omppool")
    with suppress(ValueError):  # Numba has not loaded a layer: nothing has been computed
        _unusable = bool(openmp and numba.threading_layer() == "omp" and openmp.openmp_vendor == "GNU")


os.register_at_fork(after_in_child=_after_fork)
