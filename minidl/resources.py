"""The memory and the cores that this process may use, and the limit of ranks. Work that needs more is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_RANKS = 65_536  # replicas and servers of a topology or a simulation
LIMIT_AND_USE = ("memory.max", "memory.current")  # files of a cgroup (version 2)
QUOTA_AND_PERIOD = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # files of a cgroup (version 1)
OWN_CGROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cores() -> int:
    """Return the number of cores that this process may use: those it may run on, within the limits of its cgroups."""
    return min([len(os.sched_getaffinity(0)), *_cpu_limits()])


def share(ranks: int) -> int:
    """Return the number of cores for one of the ranks that a launcher, the parent process, started on this machine.

    A launcher may bind each rank to cores of its own. Then this process may run on fewer cores than its parent.
    """
    own = cores()
    try:
        every = max(own, len(os.sched_getaffinity(os.getppid())))
    except OSError:  # the parent belongs to another container or has ended
        every = own
    return max(1, min(own, min([every, *_cpu_limits()]) // ranks))


def available() -> int:
    """Return the number of bytes that can be allocated, within the machine's memory and the limits of all cgroups."""
    return min([_machine(), *_cgroups()])


def processor() -> dict[str, str]:
    """Return what Linux tells about the first processor: {"model name": ..., "cpu family": ...}. Raises OSError."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def caches() -> dict[int, int]:
    """Return the bytes of the first core's data caches, {level: bytes}. The dict is empty if Linux does not tell."""
    found = {}
    for folder in CACHES.glob("index*"):
        with suppress(OSError, ValueError, KeyError):
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[int(level)] = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
    return dict(sorted(found.items()))


def size(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroups() -> Iterator[int]:
    """Yield the number of free bytes in each cgroup of this process that has a limit (cgroup versions 1 and 2)."""
    for group, first in _groups("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else LIMIT_AND_USE
        with suppress(OSError, ValueError):  # a container may lack the files; "max" means no limit
            limit, used = (int((group / name).read_text()) for name in names)
            yield max(0, limit - used + _reclaimable(group))


def _cpu_limits() -> Iterator[int]:
    """Yield the number of cores, rounded up, whose time each cgroup of this process may use, if it has a limit."""
    for group, first in _groups("cpu"):
        with suppress(OSError, ValueError):  # "max" and "-1" mean no limit
            if first:
                quota, period = (int((group / name).read_text()) for name in QUOTA_AND_PERIOD)
            else:
                quota, period = map(int, (group / "cpu.max").read_text().split())
            if quota > 0 and period > 0:
                yield -(-quota // period)


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's cgroups that may limit a resource, and whether they are of version 1."""
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CGROUPS / controllers
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                yield group, bool(controllers)
                if group == root:
                    break


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files that were not used recently: the kernel drops them if memory is needed."""
    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))  # in version 1, in version 2
