"""Ask the launcher of a running job on this machine for more ranks.

    the run's leader    `invite` writes RUN/job.json: where the launcher and its memory are
    --join RUN          `connected` opens that memory as /proc/PID/fd/N, which Linux allows to the same user only
                        `RunningJob.request` writes a number into it, and sends SIGUSR1
    the launcher        starts newcomers in free places, and counts the answered requests (local.py)

The newcomers are processes of the launcher. So they run on if the command that asked for them is killed.
Nothing that another user could have written is trusted. This file does not import NumPy.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from minidl import schema
from minidl.comm import memory
from minidl.comm.launch import local
from minidl.errors import ConfigError
from minidl.reading import Unreadable, blaming, json_value
from minidl.resources import MOST_RANKS

FILE = "job.json"
LONGEST = 4096  # bytes of the file
PATIENCE = 10.0  # seconds to wait for the launcher's answer, or for another --join
LOOK = 0.02  # seconds between two looks
SEGMENT = "/memfd:minidl"  # the beginning of what /proc/PID/fd/N is a link to
INVITATION = schema.record({"host": schema.text(), "pid": schema.whole(1, 2**31 - 1), "started": schema.whole(),
                            "fd": schema.whole(0, 2**31 - 1), "places": schema.whole(1, MOST_RANKS)})  # fmt: skip


class Invitation(NamedTuple):
    """Where a job is. started: when the launcher started, in clock ticks since the machine started."""

    host: str
    pid: int
    started: int
    fd: int
    places: int


def invite(folder: Path) -> None:
    """Let others join the job of this process, whose run has this folder. Without effect if there is no launcher."""
    place = local.place()
    started = place and _started(place.launcher)
    if place is None or started is None:
        return
    invitation = Invitation(socket.gethostname(), place.launcher, started, place.fd, place.ranks)
    beside = folder / f".{FILE}.new"
    with suppress(OSError):  # without the file no replica can join, and the run goes on
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(json.dumps(invitation._asdict()) + "\n")
        os.replace(beside, folder / FILE)


def uninvite(folder: Path) -> None:
    """Undo `invite`."""
    for path in (folder / FILE, folder / f".{FILE}.new"):
        with suppress(OSError):
            path.unlink()


def read(path: Path) -> Invitation:
    """Read the file of a job. Raises ConfigError unless it is a valid file that only this user can have written."""
    with blaming(str(path), ConfigError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                raise Unreadable("expected a regular file of this user, which nobody else can write to")
            content = os.read(descriptor, LONGEST + 1)
        finally:
            os.close(descriptor)
        if len(content) > LONGEST:
            raise Unreadable(f"it has more than {LONGEST} bytes")
        found = json_value(content.decode("utf-8", "replace"))
        INVITATION(found)
        return Invitation(**found)


@contextmanager
def connected(folder: Path) -> Iterator[RunningJob]:
    """Yield the running job of a run. Raises ConfigError if this process cannot join it."""
    found = read(folder / FILE)
    if found.host != socket.gethostname():
        raise ConfigError(f"{folder} is trained on host {schema.shown(found.host)}: run this command there")
    with ExitStack() as stack:
        try:
            launcher = os.pidfd_open(found.pid)
            stack.callback(os.close, launcher)
            path = f"/proc/{found.pid}/fd/{found.fd}"
            own = _started(found.pid) == found.started and os.stat(f"/proc/{found.pid}").st_uid == os.geteuid()
            if not own or not os.readlink(path).startswith(SEGMENT):
                raise ProcessLookupError
            segment = memory.Segment.open(path)
            stack.callback(segment.close)
            size = memory.control_size(found.places)
            if os.fstat(segment.fd).st_size < size:
                raise ProcessLookupError
        except (OSError, ConfigError):
            raise ConfigError(f"{folder} is not being trained any more") from None
        yield RunningJob(launcher, segment, memoryview(segment.map(size)), found.places)


class RunningJob:
    """A running job, as a process outside sees it. launcher: a descriptor of the launcher's process."""

    def __init__(self, launcher: int, segment: memory.Segment, control: memoryview, places: int) -> None:
        self.launcher, self.segment, self.places = launcher, segment, places
        self.words, self.numbers = control.cast("q"), control.cast("d")

    def request(self, count: int) -> dict[int, int]:
        """Ask for `count` newcomers. Return their ranks with their incarnations. Raises ConfigError if that fails."""
        words = self.words
        with self._locked():
            if words[memory.STOP] or words[memory.ABORT]:
                raise ConfigError("the job is about to end")
            before, answered = words[memory.NEWCOMERS], words[memory.ANSWERED]
            words[memory.WANTED] = count
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.launcher, local.JOIN)
            self._wait(lambda: words[memory.ANSWERED] != answered or self.over(), "the launcher does not answer")
            if words[memory.NEWCOMERS] == before:
                free = words[memory.WANTED]
                raise ConfigError("the job is about to end" if self.over() or free >= count else
                                  f"the job is full: {free} of its {self.places} places are free, and {count} are "
                                  "wanted. --max-workers reserves more when a run begins")  # fmt: skip
            came = {rank: int(self._number(rank, memory.INCARNATION)) for rank in range(self.places)}
        return {rank: number for rank, number in came.items() if before < number <= before + count}

    def over(self) -> bool:
        """Return whether the launcher has ended."""
        return bool(select.select([self.launcher], [], [], 0)[0])

    def left(self, rank: int, incarnation: int) -> bool:
        """Return whether a newcomer has ended before it became a member."""
        return self._number(rank, memory.INCARNATION) != incarnation

    def steps(self, rank: int) -> int:
        """Return the number of the step that a rank has begun last; 0: none, or it is no member yet."""
        state = self._number(rank, memory.STATE)
        training = state >= memory.TRAINING and memory.is_member(state)
        return int(self._number(rank, memory.STEP)) if training else 0

    def stopped(self, rank: int) -> bool:
        """Return whether a rank does not train any more."""
        state = self._number(rank, memory.STATE)
        return state >= memory.PAUSED and memory.is_member(state)

    def _number(self, rank: int, column: int) -> float:
        return float(self.numbers[memory.at(rank, column)])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes that ask at the same time. The system unlocks the memory of a killed process."""

        def lock() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        self._wait(lock, "another process asks the job for newcomers, and does not end")
        try:
            yield
        finally:
            fcntl.flock(self.segment.fd, fcntl.LOCK_UN)

    def _wait(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if time.monotonic() > deadline:
                raise ConfigError(f"{problem}: tried for {PATIENCE:.0f} s")
            time.sleep(LOOK)


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine started; None if there is no such process."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None
