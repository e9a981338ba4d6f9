"""The threads of parallel loops, each on a core of its own while a recorded step runs.

    cores = team.bind()      before the step: the calling thread stays on its own core
    team.release(cores)      after it: the calling thread may run on all of its cores again

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

from minidl.engine.jit import parallel_jit, prange, threads

_gettid = types.ExternalFunction("gettid", types.int32())  # of the C library


class _Team(threading.local):
    """The threads of the parallel loops that one thread calls. cores: those it had when the team was bound."""

    cores: frozenset[int] = frozenset()
    own: tuple[int, ...] = ()  # the core of the calling thread, or () if the team could not be bound


_team = _Team()


@parallel_jit
def _fill_with_threads(found: np.ndarray) -> None:
    for i in prange(found.size):
        found[i] = _gettid()


def bind() -> set[int] | None:
    """Bind the calling thread and the other threads of its parallel loops to one core each.

    Return the cores of the calling thread, for `release`, or None if it is not bound: if there are more or fewer
    threads than cores, or only one.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2 or len(cores) != threads():
        return None
    if cores != _team.cores:
        _team.cores, _team.own = frozenset(cores), _bind_others(sorted(cores))
    if not _team.own:
        return None
    os.sched_setaffinity(0, _team.own)
    return cores


def release(cores: set[int] | None) -> None:
    """Let the calling thread run on these cores again: the result of `bind`."""
    if cores is not None:
        os.sched_setaffinity(0, cores)


def _bind_others(cores: list[int]) -> tuple[int, ...]:
    """Bind the team's other threads to all cores but the first. Return the first, or () if this is not possible."""
    found = np.zeros(len(cores), np.int32)
    _fill_with_threads(found)
    others = set(found.tolist()) - {threading.get_native_id()}
    if len(others) == len(cores) - 1:  # each has computed a part of the loop
        with suppress(OSError):  # a core is no longer available
            for thread, core in zip(sorted(others), cores[1:], strict=True):
                os.sched_setaffinity(thread, {core})
            return (cores[0],)
    return ()
