"""Helpers for tests of several processes: start a job, wait until it ends, find processes and memory that it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPLICA = str(Path(__file__).parent / "replicas" / "shm.py")
START = """
import json, sys
from minidl.comm.launch import local
from minidl.errors import MinidlError
options, program, arguments = map(json.loads, sys.argv[1:])
try:
    sys.exit(local.run(arguments, program=program, **options))
except MinidlError as error:
    sys.exit(f"minidl: error: {error}")
"""
PATIENCE = 300  # seconds after which a test that still waits fails


class Launched:
    """A launcher in a separate process. Its ranks run `program` with `arguments`. The default is replicas/shm.py."""

    def __init__(self, ranks: int, *arguments: str, program: Sequence[str] = (REPLICA,), **options: Any) -> None:
        options = {"ranks": ranks, "quiet": True, **options}
        words = [json.dumps(word) for word in (options, list(program), list(arguments))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> Any:
        """Return the next line that a rank prints, decoded from JSON."""
        assert self.process.stdout
        text = self.process.stdout.readline()
        assert text, self.process.communicate()[1]
        return json.loads(text)

    def finish(self) -> tuple[int, list[Any], str]:
        """Wait until the launcher ends. Return (exit code, remaining lines of stdout decoded from JSON, stderr)."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], errors


def job(ranks: int, *arguments: str, **options: Any) -> tuple[int, dict[int, Any], str]:
    """Run a job until it ends. Return (exit code, {rank: result}, stderr)."""
    with Launched(ranks, *arguments, **options) as launched:
        code, lines, errors = launched.finish()
    return code, {line["rank"]: line["result"] for line in lines}, errors


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie has ended: only its exit code has not been collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def memory_of(pid: int) -> int:
    """Return the inode of the shared memory that a launcher created."""
    return next(os.stat(fd).st_ino for fd in Path(f"/proc/{pid}/fd").iterdir() if "memfd:minidl" in os.readlink(fd))


def holders(inode: int) -> set[int]:
    """Return the ids of the processes that have this memory open as a file or mapped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(
                "memfd:minidl" in os.readlink(fd) and os.stat(fd).st_ino == inode for fd in (folder / "fd").iterdir()
            ):
                found.add(int(folder.name))
            lines = [line.split() for line in (folder / "maps").read_text().splitlines() if "memfd:minidl" in line]
            if any(int(line[4]) == inode for line in lines):
                found.add(int(folder.name))
        except OSError:  # another user's process, or it has ended
            continue
    return found


def eventually(condition: Callable[[], bool], what: str) -> float:
    """Wait until `condition` is true and return the seconds. Fail with the message `what` after PATIENCE seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE, what
        time.sleep(0.01)
    return time.monotonic() - began
