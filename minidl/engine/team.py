"""The threads of parallel loops, each on a core of its own while a recorded step runs.

    bind(cores, short)      before the step: the calling thread stays on its own core
    release(cores)          after it: the calling thread may run on all of its cores again
    renew()                 if `bind` says so: the other threads get a core each, until the process has other cores

`bind` and `release` are compiled, and the compiled loop over the calls of a step (program/call.py) contains them. As
Python code they would take 25 us between two predictions, whose data has evicted the interpreter from the caches. The
three system calls alone take up to 14 us.

Threads that wait for the next loop sleep, and Linux decides on which core they wake up. In a virtual machine it does
not count a core as idle if the hypervisor has taken the processor away meanwhile. Then it may wake a thread on the core
of the thread that wakes it. Both share this core, in turns, for several milliseconds, while another core is idle. On
two cores of a Zen 4, predictions after a pause of 0.1 s took, in us (medians; as they are, bound):

    MLP, batch 8: 240, 80      MLP, batch 32: 650, 250      LeNet, batch 1: 410, 150      VGG, batch 1: 2100, 850

Threads are bound only if there are as many as the process has cores: only then does each core have one thread to run,
and processes that divide the cores of a machine among themselves keep the choice. The other threads of a team stay
bound. The calling thread is bound only during a step, because threads and processes that it starts inherit its cores.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import numpy as np
from numba import types

from minidl.engine.jit import jit, parallel_jit, prange, threads

NOTHING, RELEASE, RENEW = range(3)  # results of `bind`
WORDS = 16  # in C a set of cores is a vector of bits, here of 16 * 64
_gettid = types.ExternalFunction("gettid", types.int32())  # of the C library, as are the next three
_set = types.int32(types.int32, types.uint64, types.intp)  # thread (0: the calling one), bytes, set -> -1: error
_getaffinity = types.ExternalFunction("sched_getaffinity", _set)
_setaffinity = types.ExternalFunction("sched_setaffinity", _set)
_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
thread_count = types.ExternalFunction("get_num_threads", types.int32())  # of Numba, whose threads _Team starts


class _Team(threading.local):
    """The threads of the parallel loops that one thread calls.

    cores: a vector of three parts: the number of threads; the set of all cores of the calling thread; the set that
        contains only the core to bind it to. The last set is empty if the team is not bound: if there are more or fewer
        threads than cores, or only one.
    """

    def __init__(self) -> None:
        threads()  # starts them
        self.cores = np.zeros(1 + 2 * WORDS, np.uint64)


_team = _Team()


def cores() -> np.ndarray:
    """Return what `bind` and `release` need to know of the calling thread's team."""
    return _team.cores


@jit
def bind(cores: np.ndarray, short: bool) -> int:
    """Bind the calling thread to its own core, if the team is bound. Return what is to be done later.

    short: do nothing if the thread is on its own core by chance, because it will hardly leave it before the step ends.
    RELEASE: call `release`. NOTHING: not even that. RENEW: `cores` is not true any more, and nothing has been done.
    """
    core = _getcpu()
    if short and 0 <= core < 64 * WORDS and cores[1 + WORDS + core // 64] >> np.uint64(core % 64) & np.uint64(1):
        return NOTHING
    now = np.empty(WORDS, np.uint64)
    if cores[0] != thread_count() or _getaffinity(0, 8 * WORDS, now.ctypes.data) < 0:
        return RENEW
    own = np.uint64(0)
    for i in range(WORDS):
        if now[i] != cores[1 + i]:
            return RENEW
        own |= cores[1 + WORDS + i]
    if own == 0:
        return NOTHING
    _setaffinity(0, 8 * WORDS, cores[1 + WORDS :].ctypes.data)
    return RELEASE


@jit
def release(cores: np.ndarray) -> None:
    """Let the calling thread run on all of its cores again."""
    _setaffinity(0, 8 * WORDS, cores[1:].ctypes.data)


def renew() -> None:
    """Bind the team's other threads to one core each, if there are as many threads as cores."""
    found = sorted(os.sched_getaffinity(0))
    _team.cores[0] = threads()
    _team.cores[1:] = 0
    if found[-1] < 64 * WORDS:
        _add(found, _team.cores[1 : 1 + WORDS])
        if 1 < len(found) == threads() and _bind_others(found):
            _add(found[:1], _team.cores[1 + WORDS :])


def _add(numbers: list[int], words: np.ndarray) -> None:
    """Add the cores to a set."""
    for number in numbers:
        words[number // 64] |= np.uint64(1 << number % 64)


@parallel_jit
def _fill_with_threads(found: np.ndarray) -> None:
    for i in prange(found.size):
        found[i] = _gettid()


def _bind_others(cores: list[int]) -> bool:
    """Bind the team's other threads to all cores but the first. Return whether this was possible."""
    found = np.zeros(len(cores), np.int32)
    _fill_with_threads(found)
    others = set(found.tolist()) - {threading.get_native_id()}
    if len(others) == len(cores) - 1:  # each has computed a part of the loop
        with suppress(OSError):  # a core is no longer available
            for thread, core in zip(sorted(others), cores[1:], strict=True):
                os.sched_setaffinity(thread, {core})
            return True
    return False
