"""The memory and the cores that this process may use, and the limit of ranks. Work that needs more is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_RANKS = 65_536  # replicas and servers of a topology or a simulation
LIMIT_AND_USE = ("memory.max", "memory.current")  # files of a cgroup (version 2)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available() -> int:
    """Return the number of bytes that can be allocated, within the machine's memory and the limits of all cgroups."""
    return min([_machine(), *_cgroups()])


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
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = Path("/sys/fs/cgroup") / controllers
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else LIMIT_AND_USE
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # a container may lack the files; "max" means no limit
                    limit, used = (int((group / name).read_text()) for name in names)
                    yield max(0, limit - used + _reclaimable(group))
                if group == root:
                    break


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files that were not used recently: the kernel drops them if memory is needed."""
    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))  # in version 1, in version 2
