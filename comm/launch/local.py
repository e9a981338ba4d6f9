"""The launcher, a small mpiexec: starts the ranks of a run on one machine, and monitors them until all have ended.

    launcher    creates the memory (memory.py), starts the ranks, then sleeps until a signal comes or a rank ends.
                A few times per second it looks for frozen ranks (monitor.py)
    rank r      runs the same command line in a separate process; the environment contains r

Events, and what happens then:

    Ctrl-C, SIGTERM, SIGHUP     the launcher sets a word in shared memory, and the ranks complete a step, save and end.
                                The launcher kills those that do not notice the signal. It kills all after a second
                                signal, or if none has begun a step
    a rank is killed            the launcher sets the rank's state in the status table to DEAD. Depending on the method,
                                the others continue, or stop with a checkpoint
    a rank is frozen            the launcher marks it as suspected. The method determines what happens then
    a rank ends with an error   the rank has reported the error; the launcher sets another word, and the others end
    SIGUSR1                     the launcher starts the newcomers that `--join` wants (join.py), if places are free
    the launcher is killed      Linux kills the ranks (PR_SET_PDEATHSIG), and frees the memory after the last one

This file does not import NumPy, so the launcher needs little memory and starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minidl import errors, resources
from minidl.comm import memory
from minidl.comm.launch.cores import neighbours, share
from minidl.comm.launch.monitor import Monitor, tell
from minidl.engine.environment import number
from minidl.errors import ConfigError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
JOIN = signal.SIGUSR1  # from `--join`
TRAIN = ("-m", "minidl.train")
ROOT = str(Path(errors.__file__).parents[1])  # the folder that contains the package minidl
PR_SET_PDEATHSIG = 1
PER_CORE = 8  # more ranks on a core are refused, unless the variable OVERSUBSCRIBE is set
OVERSUBSCRIBE = "MINIDL_OVERSUBSCRIBE"
ENDING = 1.5  # seconds that ranks have to end by themselves if there is nothing to save
RANK_MEMORY = 100_000_000  # bytes that a rank does not share with others, measured with a small model


def run(
    argv: Sequence[str],
    ranks: int,
    threads: int | Sequence[int] = 0,
    quiet: bool = False,
    grace: float = 5.0,
    program: Sequence[str] = TRAIN,
    places: Places | None = None,
) -> int:
    """Run `python PROGRAM ARGV` as this number of ranks; return the exit code of the whole run.

    threads: of each rank; 0: MINIDL_THREADS, or else cores / ranks, rounded down, at least 1. A container's CPU limit
    counts as its cores. A list has the threads of each; further ranks have one.
    grace: seconds after an error until the launcher kills the other ranks. program: Python's arguments before ARGV.
    places: for newcomers; the default is none.
    Raises ConfigError if there are too many ranks for this machine, or if a rank cannot be started.
    """
    require_room(ranks)
    cores = neighbours(os.sched_getaffinity(0))
    if isinstance(threads, int):
        each = [threads or number("MINIDL_THREADS") or max(1, resources.cores() // ranks)] * ranks
    else:
        each = [*threads, *[1] * (ranks - len(threads))]
    if sum(each) > len(cores) and not quiet:
        what = f"of {each[0]} thread{'s' * (each[0] > 1)}" if len({*each}) == 1 else f"with {sum(each)} threads"
        tell(f"{ranks} processes {what} on {len(cores)} cores: they will compete for cores")

    def places_of(rank: int) -> tuple[int, Sequence[int]]:
        """Return the threads and the cores of a rank."""
        if rank >= ranks:
            return each[0], cores
        if len({*each}) == 1 or sum(each) > len(cores):
            return each[rank], share(cores, rank, ranks)
        begin = sum(each[:rank])
        return each[rank], cores[begin : begin + each[rank]]

    with ProcessGroup(ranks, places) as job:

        def start(rank: int) -> None:
            job.start(rank, [*program, *argv], *places_of(rank))

        for rank in range(ranks):
            start(rank)
        return job.watch(grace, quiet, start)


def require_room(ranks: int) -> None:
    """Raise ConfigError if the machine has too few cores or too little memory for this number of ranks."""
    cores = resources.cores()
    if ranks > PER_CORE * cores and not os.environ.get(OVERSUBSCRIBE):
        raise ConfigError(f"{ranks} workers on {cores} cores: expected at most {PER_CORE * cores}, {PER_CORE} per "
                          f"core; to start them anyway, set {OVERSUBSCRIBE}=1")  # fmt: skip
    needed, free = ranks * RANK_MEMORY, resources.available()
    if needed > free:
        raise ConfigError(f"{ranks} workers need about {resources.size(needed)} of memory, "
                          f"and {resources.size(free)} are free: use fewer --workers")  # fmt: skip


class Places(NamedTuple):
    """The places of a job: as many as `number`, of which newcomers may fill those that are free and no `servers`."""

    number: int
    servers: Sequence[int] = ()


class ProcessGroup:
    """The ranks of a run. As a context manager, it kills the ranks that still run at the end of the block."""

    def __init__(self, ranks: int, places: Places | None = None) -> None:
        self.places = places or Places(ranks)
        size = memory.control_size(self.places.number)
        self.segment = memory.Segment.create(size)
        control = memoryview(self.segment.map(size))
        self.words, self.numbers = control.cast("q"), control.cast("d")
        self.monitor = Monitor(self.words, self.numbers)
        self.life, self._ours = os.pipe()  # a pipe: ranks that read it get end-of-file when the launcher ends
        self.ranks = ranks
        for rank in range(ranks, self.places.number):
            self.numbers[memory.at(rank, memory.STATE)] = memory.DEAD
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0  # the exit code: of the first error, or of the signal that stopped the run
        self.killed = 0  # the last signal that killed a rank
        self.frozen: set[int] = set()  # ranks that this process killed because they were frozen
        self.finished = False  # whether a rank has ended without an error
        self._previous: dict[signal.Signals, Any] = {}  # the handlers of signals before this run

    def __enter__(self) -> ProcessGroup:
        # A parent process may have set SIGCHLD to be ignored. Then Linux reports neither the end nor the exit code of a
        # rank. Python allows only the main thread to change this.
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._previous[JOIN] = signal.signal(JOIN, lambda *_: None)  # one that comes before `watch` has no effect
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        for signum, handler in self._previous.items():
            if handler is not None:
                signal.signal(signum, handler)
        for fd in (self.life, self._ours):
            os.close(fd)
        self.segment.close()

    def start(self, rank: int, arguments: Sequence[str], threads: int, cores: Sequence[int]) -> None:
        """Start a rank, which trains on these cores. Raises ConfigError if that fails.

        The rank runs in a separate session, so that only the launcher receives a terminal's Ctrl-C.
        """
        descriptors = (self.segment.fd, self.life)
        newcomer = int(self._read(rank, memory.INCARNATION))
        place = Place(rank, self.places.number, self.segment.fd, self.life, os.getpid(), self.ranks, newcomer)
        environment = os.environ | {
            "MINIDL_RANK": " ".join(map(str, place)),
            "MINIDL_CORES": " ".join(map(str, cores)),
            "MINIDL_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])),
            "PYTHONSAFEPATH": "1",  # so that a user's file queue.py does not hide the standard library's
        }
        try:
            self.running[rank] = subprocess.Popen(
                [sys.executable, *arguments], env=environment, stdin=subprocess.DEVNULL,
                pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"cannot start replica {rank} of {self.ranks}: {error.strerror}") from None

    def watch(self, grace: float, quiet: bool, start: Callable[[int], None]) -> int:
        """Wait until all ranks have ended; return the exit code. start(rank): starts a newcomer."""
        stops = [s for s in STOPS if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP
        awaited = {signal.SIGCHLD, JOIN, *stops}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        deadline = None
        try:
            while self._look():
                if self.words[memory.ABORT] and deadline is None:
                    deadline = time.monotonic() + grace
                left = self.monitor.pause(self._processes())
                if deadline is not None:
                    left = min(left, max(0.0, deadline - time.monotonic()))
                came = signal.sigtimedwait(awaited, left)
                if came is not None and came.si_signo == JOIN:
                    self._admit(start)
                if came is not None and came.si_signo in stops and self._stop(came.si_signo, quiet):
                    return self.code
                if deadline is not None and time.monotonic() >= deadline:
                    self.kill()
                for rank in self.monitor.look(self._processes(), self.finished):
                    self.frozen.add(rank)
                    self.running[rank].kill()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        failed = 2 * bool(self.words[memory.ABORT])  # the rank that has reported an error may have been killed since
        return self.code or failed or (0 if self.finished else 128 + self.killed)

    def _look(self) -> bool:
        """Handle ranks that have ended. Returns whether any rank still runs."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[rank]
                self.monitor.forget(rank)
                self._ended(rank, code)
        if all(self._is_newcomer(rank) for rank in self.running):
            self.kill()  # the run is over, and they are no members yet
            self.running.clear()
        return bool(self.running)

    def _processes(self) -> dict[int, int]:
        """Return the process of each rank that runs and was not killed."""
        return {rank: process.pid for rank, process in self.running.items() if rank not in self.frozen}

    def _admit(self, start: Callable[[int], None]) -> None:
        """Start the newcomers that --join wants, in the first free places. If there are too few, start none."""
        words, wanted = self.words, self.words[memory.WANTED]
        free = [rank for rank in range(self.places.number) if rank not in self.running
                and rank not in self.places.servers and self._read(rank, memory.STATE) == memory.DEAD]  # fmt: skip
        words[memory.WANTED] = len(free)
        if 0 < wanted <= len(free) and not words[memory.STOP] and not words[memory.ABORT]:
            for rank in free[:wanted]:
                for word in range(memory.ROW):
                    # STATE is DEAD until the newcomer has dropped what a dead rank has left. JOINED tells the others
                    # whether the dead rank took in a newcomer, of which they may not know (training/regroup.py).
                    if word not in (memory.STATE, memory.JOINED):
                        words[memory.at(rank, word)] = 0
                words[memory.NEWCOMERS] += 1
                self.numbers[memory.at(rank, memory.INCARNATION)] = words[memory.NEWCOMERS]
                self.frozen.discard(rank)
                try:
                    start(rank)
                except ConfigError as error:
                    self.numbers[memory.at(rank, memory.INCARNATION)] = 0
                    tell(str(error))
        words[memory.ANSWERED] += 1

    def _is_newcomer(self, rank: int) -> bool:
        """Return whether a rank was started by `_admit`, and is no member yet."""
        state = self._read(rank, memory.STATE)
        return not memory.is_member(state) and self._read(rank, memory.INCARNATION) > 0

    def _ended(self, rank: int, code: int) -> None:
        """Handle the end of a rank: set the exit code, and inform the other ranks in shared memory."""
        if self._is_newcomer(rank):
            self.numbers[memory.at(rank, memory.STATE)] = memory.DEAD
            self.numbers[memory.at(rank, memory.INCARNATION)] = 0
            if code < 0:
                tell(f"replica {rank} was killed by {_name(-code)} before it had joined")
            return
        if code < 0:
            self.killed = -code
            if not self.words[memory.ABORT] and rank not in self.frozen:
                tell(f"replica {rank} was killed by {_name(-code)}")
        elif code == 0:
            self.finished = True
        else:  # if the rank stopped on request, report the launcher's signal instead of the rank's
            stopped = self.words[memory.STOP] and code >= 128
            self.code = self.code or (128 + self.words[memory.STOP] if stopped else code)
        if 0 < code < 128:  # after an error do not set DEAD: the others must end without reporting a lost peer
            self.words[memory.ABORT] = 1
        elif code < 0 or self._read(rank, memory.STATE) <= memory.PAUSED:
            self.numbers[memory.at(rank, memory.ENDED)] = code == 0
            self.numbers[memory.at(rank, memory.STATE)] = memory.DEAD

    def _stop(self, signum: int, quiet: bool) -> bool:
        """Handle a signal. Returns True if the launcher must end immediately."""
        if self.words[memory.STOP]:
            tell("stopped at once")
            self.code = 128 + signum
            self.kill()
            return True
        if not any(self._has_something_to_save(rank) for rank in self.running):
            tell("stopped; there was nothing to save yet")
            self.code = 128 + signum
            self._end()
            return True
        self.words[memory.STOP] = signum
        if not quiet:
            tell("stopping after this step; a second signal stops at once")
        return False

    def _end(self) -> None:
        """Let all ranks end. The first one removes the folder of a run that has not begun."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + ENDING
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _has_something_to_save(self, rank: int) -> bool:
        """Return False if a rank has not begun its first step, or if its script is between two trainings or over."""
        idle = (memory.JOINING, memory.FINISHED, memory.LEFT, memory.DEAD)
        return self._read(rank, memory.STEP) > 0 and self._read(rank, memory.STATE) not in idle

    def _read(self, rank: int, column: int) -> float:
        """Return an entry of the status table."""
        return self.numbers[memory.at(rank, column)]

    def kill(self) -> None:
        """Kill all ranks that still run, and wait until they have ended."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


def _name(signum: int) -> str:
    """Return the name of a signal. Python has no names for most of the real-time signals."""
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


# -- in a rank ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The data that the launcher passes to a rank."""

    rank: int
    ranks: int  # the number of places
    fd: int  # descriptor of the shared memory
    life: int  # descriptor of a pipe that ends with the launcher
    launcher: int  # process id of the launcher
    began: int  # the number of ranks with which the job began
    incarnation: int  # 0: this process began with the job; n: it is the n-th newcomer


def place() -> Place | None:
    """Return this process's Place, or None if the launcher did not start it.

    Raises ConfigError if MINIDL_RANK is not valid, for example because a process of a rank has inherited it.
    """
    text = os.environ.get("MINIDL_RANK", "")
    if not text:
        return None
    with suppress(ValueError, TypeError, OverflowError, OSError):
        found = Place(*map(int, text.split()))
        for descriptor in (found.fd, found.life):
            os.fstat(descriptor)
        if 0 <= found.rank < found.ranks:
            return found
    raise ConfigError(f"MINIDL_RANK is {text!r}, and this process is not a rank that minidl's launcher has started: "
                      "unset the variable, which only the launcher sets")  # fmt: skip


_following = False


def follow() -> None:
    """Make this process end when the launcher ends, for any reason. Call this early; a second call does nothing."""
    global _following
    at = place()
    if at is None or _following:
        return
    _following = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, JOIN, *STOPS})  # a newcomer has the launcher's mask
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_outlive, args=[at.life], name="launcher", daemon=True).start()  # in case prctl fails
    if os.getppid() != at.launcher:
        os._exit(1)  # the launcher ended before prctl was called, so no signal comes


def _outlive(pipe: int) -> None:
    """Wait for the end of the launcher, then end this process."""
    os.read(pipe, 1)
    os._exit(1)


def settle() -> None:
    """Bind all threads of this rank to its cores. Until then, the rank that compiles the kernels may use all cores."""
    cores = [int(word) for word in os.environ.get("MINIDL_CORES", "").split()]
    for thread in os.listdir("/proc/self/task") if cores else ():
        with suppress(OSError):  # the thread has just ended, or a core is no longer available
            os.sched_setaffinity(int(thread), cores)
