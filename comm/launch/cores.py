"""The cores of a rank, and their division among the parts of a replica (--parts).

    machine    socket 0: cores 0 1 2 3           socket 1: cores 4 5 6 7
    ranks      rank 0                            rank 1
    parts      part 0: 0 1    part 1: 2 3        part 0: 4 5    part 1: 6 7

Cores of one NUMA node are neighbours in this order. So a rank or a part is on as few nodes as possible. Linux describes
the cores in /sys. This file does not import NumPy, because the launcher does not load NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from minidl import resources
from minidl.comm.launch import job

CPUS = Path("/sys/devices/system/cpu")


def neighbours(cpus: Iterable[int]) -> list[int]:
    """Sort CPUs so that those which share a core, caches or the memory of a NUMA node become neighbours."""
    return sorted(cpus, key=_where)


def share(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Return the cores for one rank. Ranks share no cores, unless there are fewer cores than ranks."""
    if ranks > len(cores):
        return cores
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def own() -> Sequence[int]:
    """Return the cores of this process: all that it may run on, or its share of them if it is a rank of a job.

    The launcher has chosen the cores of its ranks. Under mpiexec, the ranks that may run on the same cores divide them.
    """
    if given := os.environ.get("MINIDL_CORES", "").split():
        return [int(cpu) for cpu in given]
    cores = neighbours(os.sched_getaffinity(0))
    if job.recognise() is None:
        return cores
    ranks = max(1, len(cores) // resources.share(job.local_ranks()))  # that may run on these cores
    return share(cores, job.local_rank() % ranks, ranks)


def _where(cpu: int) -> tuple[int, ...]:
    """Return the sort key of a CPU: socket, NUMA node, core, number."""
    folder = CPUS / f"cpu{cpu}"
    try:
        socket, core = (int((folder / "topology" / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, 0, cpu, cpu
    nodes = [int(entry.name.removeprefix("node")) for entry in folder.glob("node[0-9]*")]  # none without NUMA
    return socket, min(nodes, default=0), core, cpu
