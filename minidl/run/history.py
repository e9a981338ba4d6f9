"""history.jsonl in the folder of a run: what happened to the run. The page of a run (minidl/report) shows it.

    {"event": "begin", ...}      training begins or continues: versions, machine, number of replicas
    {"event": "members", ...}    the replicas that train from now on, if these have changed
    {"event": "speeds", ...}     the speed of each replica, after an epoch
    {"event": "finished"}        or "stopped", or "failed" with the error

Each line has "when" (Unix time), and "seconds", "step" and "epoch" of the run. No line is ever removed: after a resume,
the file still says what happened before. The run does not depend on this file: if it cannot be written, the run goes
on without it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minidl import resources

NAME = "history.jsonl"
LIBRARIES = ("numpy", "numba", "mpi4py")
LONGEST = 1 << 16  # bytes of a line


def note(folder: Path, event: str, **facts: Any) -> None:
    """Append a line, unless the folder is no run any more or the line is too long. Raises no OSError."""
    line = (json.dumps({"event": event, "when": round(time.time(), 3), **facts}) + "\n").encode()
    with suppress(OSError):
        if len(line) <= LONGEST and (folder / "config.toml").exists():
            handle = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                os.write(handle, line)  # at once: other ranks may append, too
            finally:
                os.close(handle)


def surroundings() -> dict[str, Any]:
    """Return the versions and the machine with which this process trains."""
    versions = {"minidl": sys.modules["minidl"].__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"versions": versions, "machine": _processor(), "system": f"{platform.system()} {platform.release()}",
            "cores": resources.cores(), "memory_available": resources.available()}  # fmt: skip


def _processor() -> str:
    with suppress(OSError, KeyError):
        return resources.processor()["model name"]
    return platform.processor() or platform.machine()
