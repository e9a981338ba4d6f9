"""A job of real processes that is hurt at random moments, and what must be true of it (for faults.py).

    Job             starts `python -m minidl.train` (noted.py), kills, freezes and wakes its ranks, and lets others join
    Job.hurt        one random fault
    wrong, untidy   what must be true of a job that has ended
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from minidl.comm import memory
from minidl.comm.launch.join import RunningJob, connected
from minidl.errors import MinidlError

ROOT = Path(__file__).parent.parent
NOTED = str(Path(__file__).parent / "noted.py")
MARK = "MINIDL_FAULTS"  # environment variable that identifies the processes of a job
BATCH, STALL = 16, 3.0
RUN = ["--model", "mlp", "--batch-size", str(BATCH), "--lr", "0.02", "--validation", "0.1", "--threads", "1",
       "--stall", str(STALL)]  # fmt: skip
LAUNCHER = -1  # instead of a rank
PLACES = 6  # of workers, in a job that others can join
LONGEST = 240.0  # seconds without a trained batch, and until a job ends, after which it hangs
OF_MPI = re.compile(r"vader|ompi|openmpi|mpich|prte|pmix|sm_segment|psm2|ucx", re.I)  # of other jobs in /dev/shm
REFUSALS = ("has ended before it had joined; the job has printed the reason", "is not being trained", "has finished",
            "the job is about to end", "the job is full", "has ended before replica")  # fmt: skip


class Kind(NamedTuple):
    """A kind of job. words: its options. joins: whether others can join. survives: whether it goes on after a death.

    images: training images of an epoch, which takes some seconds. pieces: batches of it.
    """

    words: str
    joins: bool = True
    survives: bool = True
    images: int = 14400

    @property
    def name(self) -> str:
        return self.words.split()[0]

    @property
    def claims(self) -> bool:
        return self.name in ("gossip", "ps")

    @property
    def pieces(self) -> int:
        return -(-self.images // BATCH)


KINDS = [Kind("gossip"), Kind("gossip --exchange pull"), Kind("gossip --exchange push-pull --mix mass"), Kind("ps"),
         Kind("local", joins=False), Kind("allreduce --on-death continue", images=3600),
         Kind("dpsgd --on-death continue", images=3600), Kind("local-sgd --period 3 --on-death continue", images=3600),
         Kind("dpsgd", survives=False, images=3600)]  # fmt: skip


class Fault(NamedTuple):
    """What was done to a job. moment: of the monotonic clock. what: kill, freeze, long freeze, join, ..."""

    moment: float
    what: str
    rank: int


class Job:
    """A job in a folder. chance: draws the faults."""

    def __init__(self, kind: Kind, workers: int, epochs: int, folder: Path, chance: random.Random) -> None:
        self.kind, self.workers, self.epochs, self.folder, self.chance = kind, workers, epochs, folder, chance
        self.run, self.notes = folder / "run", folder / "notes"
        self.mark = f"{os.getpid()}-{folder.name}"
        self.servers = {workers} if kind.name == "ps" else set()
        self.faults: list[Fault] = []
        self.frozen: dict[int, tuple[float, int, int]] = {}  # by rank: when it is woken, its process, a descriptor
        self.joiners: list[subprocess.Popen[str]] = []
        self.joins: list[float] = []  # seconds until the first step of each newcomer
        self.problems: list[str] = []
        self.starts = 0
        self.members: RunningJob | None = None
        self._stack = ExitStack()
        self._alive = time.monotonic()
        self._noted = 0
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary),
                                         "MINIDL_NAP": "0.06" if kind.claims else "0"}  # fmt: skip
        self.shared = set(os.listdir("/dev/shm"))

    # -- the processes -----------------------------------------------------------------------------------

    def begin(self) -> None:
        data = ["--data", f"synthetic:{self.kind.images * 10 // 9}x4x4x1:4", "--epochs", str(self.epochs)]
        joins = ["--max-workers", str(PLACES)] * self.kind.joins
        self.start(*RUN, *data, "--method", *self.kind.words.split(), "--workers", str(self.workers), *joins,
                   "--out", "run")  # fmt: skip

    def start(self, *words: str) -> None:
        """Start the launcher, and wait until a replica has trained a batch."""
        self.starts += 1
        self.out, self.errors = (self.folder / f"{name}-{self.starts}" for name in ("out", "errors"))
        with self.out.open("w") as out, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, NOTED, str(self.folder), *words, "--quiet", "--json"], cwd=self.folder,
                env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self._alive, begun = time.monotonic(), self._size()
        while self._size() == begun and self.process.poll() is None and not self.problems:
            self.look()
            time.sleep(0.02)
        with suppress(MinidlError):
            self.members = self._stack.enter_context(connected(self.run))

    def ranks(self) -> dict[int, int]:
        """Return the processes of the running ranks."""
        with suppress(OSError):  # the launcher has ended
            return ranks_of(self.process.pid)
        return {}

    def able(self) -> set[int]:
        """Return the replicas that train, and are not frozen."""
        found, running = set(), self.ranks()
        for rank in running:
            state = self.members.numbers[memory.at(rank, memory.STATE)] if self.members else 0
            if state == memory.TRAINING and rank not in self.frozen and rank not in self.servers:
                found.add(rank)
        return found

    def of_mark(self) -> list[int]:
        """Return all live processes of the job."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if f"{MARK}={self.mark}".encode() in words and state not in "ZX":
                    found.append(int(path.name))
        return found

    def _size(self) -> int:
        return self.notes.stat().st_size if self.notes.exists() else 0

    # -- faults ------------------------------------------------------------------------------------------

    def hurt(self) -> None:
        """Do one random fault, if any is possible now."""
        running, able, seldom = self.ranks(), self.able(), self.chance.random() < 0.15
        what = self.chance.choices(["kill", "freeze", "long freeze", "join"], [5, 4, 2, 6 * self.kind.joins])[0]
        wanted = 1 + (self.chance.random() < 0.3)
        free = PLACES + len(self.servers) - len(running)
        if what == "join" and (free < wanted or len(self.joiners) > 1):
            what = "freeze"
        if what == "join":
            self.join(wanted)
            return
        if what == "kill" and len(able) < 3 and not seldom:
            what = "freeze"
        victims = [rank for rank in sorted(running) if able - {rank}]  # one must be left that trains
        if what != "kill":
            victims = [rank for rank in victims if rank not in self.frozen]
        if what != "freeze":
            victims = [rank for rank in victims if rank not in self.servers]  # the others cannot go on without a server
        if not seldom:  # spare newcomers
            victims = [rank for rank in victims if rank in {*able, *self.frozen, *self.servers}]
        elif what == "freeze" and LAUNCHER not in self.frozen:
            victims, running = [LAUNCHER], {LAUNCHER: self.process.pid}
        if victims:
            rank = self.chance.choice(victims)
            seconds = {"kill": 0.0, "freeze": self.chance.uniform(0.01, 0.7 * STALL),
                       "long freeze": self.chance.uniform(1.2, 3) * STALL}[what]  # fmt: skip
            self.strike(what, rank, running[rank], seconds)

    def strike(self, what: str, rank: int, process: int, seconds: float) -> None:
        """Kill a rank, or freeze it for some seconds."""
        with suppress(OSError):
            descriptor = os.pidfd_open(process)
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP if seconds else signal.SIGKILL)
            now = time.monotonic()
            self.did(what, rank)
            if seconds:
                self.frozen[rank] = now + seconds, process, descriptor
            else:
                os.close(descriptor)
                self.frozen.pop(rank, None)

    def wake(self, everything: bool = False) -> None:
        """Wake the frozen ranks whose time has come, or all."""
        for rank, (moment, _, descriptor) in list(self.frozen.items()):
            if everything or time.monotonic() >= moment:
                with suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                os.close(descriptor)
                del self.frozen[rank]

    def join(self, count: int) -> None:
        self.joiners.append(subprocess.Popen(
            [sys.executable, "-m", "minidl.train", "--join", "run", "--workers", str(count)], cwd=self.folder,
            env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ))  # fmt: skip
        for _ in range(count):
            self.did("join")

    def did(self, what: str, rank: int = -2) -> None:
        """Note a fault, also in FOLDER/faults."""
        self.faults.append(Fault(time.monotonic(), what, rank))
        with (self.folder / "faults").open("a") as file:
            file.write(f"{self.faults[-1].moment:.3f} {what} {rank} {self.states()}\n")

    def look(self) -> None:
        """Wake what must wake, handle commands that have ended, and note a job that makes no progress."""
        self.wake()
        for joiner in [one for one in self.joiners if one.poll() is not None]:
            self.joiners.remove(joiner)
            said = joiner.communicate()[0]
            self.joins += map(float, re.findall(r"its first step was done after ([\d.]+) s", said))
            lines = [line for line in said.splitlines() if "first step was done" not in line]
            if joiner.returncode not in (0, 2) or any(not any(one in line for one in REFUSALS) for line in lines):
                self.problems.append(f"--join ended with {joiner.returncode}: {said}")
        size = self._size()
        if size != self._noted:
            self._noted, self._alive = size, time.monotonic()
        if time.monotonic() - self._alive > LONGEST and self.process.poll() is None:
            self.problems.append(f"no batch was trained for {LONGEST:.0f} s; states {self.states()}")
            self._stacks()
            self.destroy()

    def play(self, faults: int, pause: tuple[float, float]) -> None:
        """Do this number of faults, with random pauses, unless the job ends before."""
        goal = len(self.faults) + faults
        due = time.monotonic() + self.chance.uniform(*pause)
        while len(self.faults) < goal and self.process.poll() is None and not self.problems:
            self.look()
            if time.monotonic() >= due:
                self.hurt()
                due = time.monotonic() + self.chance.uniform(*pause)
            time.sleep(0.01)

    def hurt_the_end(self) -> None:
        """Kill or freeze ranks, with short pauses, when the first one has made its last step. One of them is left."""
        left = self.chance.randint(1, 4)
        while self.process.poll() is None and not self.problems and left:
            self.look()
            states = self.states()
            members = sorted(rank for rank, state in states.items() if memory.is_member(state))
            if any(states[rank] >= memory.PAUSED for rank in members):
                left -= 1
                time.sleep(self.chance.uniform(0, 0.2))
                rank, what = self.chance.choice(members), self.chance.choice(["kill", "kill", "freeze", "long freeze"])
                able = [one for one in members if one != rank and one not in self.frozen and one not in self.servers]
                if (process := self.ranks().get(rank)) and able and rank not in self.frozen:
                    self.strike(what, rank, process, {"kill": 0.0, "freeze": 0.5, "long freeze": 2 * STALL}[what])
            time.sleep(0.002)

    def states(self) -> dict[int, int]:
        return {rank: int(self.members.numbers[memory.at(rank, memory.STATE)]) if self.members else -1
                for rank in self.ranks()}  # fmt: skip

    # -- the end -----------------------------------------------------------------------------------------

    def hasten(self) -> None:
        (self.folder / "go").touch()

    def wait(self) -> int:
        """Wait until the job and the commands that join it have ended. Returns its exit code."""
        while self.process.poll() is None or self.joiners:
            self.look()
            time.sleep(0.02)
        self._stack.close()
        self.members = None
        return self.process.returncode

    def _stacks(self) -> None:
        """Let all ranks print the stacks of their threads."""
        self.wake(everything=True)
        for process in self.ranks().values():
            with suppress(OSError):
                os.kill(process, signal.SIGUSR2)
        time.sleep(2)

    def destroy(self) -> None:
        """Kill all processes of the job."""
        for process in self.of_mark():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.wake(everything=True)
        self.destroy()
        for joiner in self.joiners:
            joiner.communicate()
        self._stack.close()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


# -- what must be true of a job that has ended -------------------------------------------------------------------------


def untidy(job: Job, killed: bool = False) -> str:
    """Return what a job has left behind or printed that it must not, or "". killed: whether its launcher was killed."""
    time.sleep(0.1)
    deadline = time.monotonic() + 20
    while (left := job.of_mark()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        return f"left behind: processes {left}"
    lines = job.errors.read_text().splitlines()
    if odd := [line for line in lines if not line.startswith("minidl: ")]:
        return "on stderr: " + " / ".join(odd[:40])
    if found := os.listdir(job.folder / "tmp"):
        return f"left behind: temporary files {found}"
    new = set(os.listdir("/dev/shm")) - job.shared
    if found := [name for name in new if not OF_MPI.search(name) and Path("/dev/shm", name).is_file()]:
        return f"left behind in /dev/shm: {found}"
    hidden = [str(path.relative_to(job.run)) for path in job.run.rglob(".*") if path.is_file() or path.name != ".lock"]
    if not killed and (hidden or (job.run / "job.json").exists()):
        return f"left behind: {hidden or 'job.json'}"
    return ""


def wrong(job: Job, code: int, again: int = 0) -> str:
    """Return what is wrong with a job that has finished, or "". again: pieces that may be settled twice."""
    if code:
        return f"exit code {code}"
    results = [json.loads(line) for line in job.out.read_text().splitlines() if line.startswith("{")]
    if not results and any(fault.what == "kill" for fault in job.faults):  # of a leader that was about to print it
        results = [json.loads(path.read_text()) for path in job.run.glob("summary.json")]
    if len(results) != 1:
        return f"{len(results)} results"
    images, pieces = job.kind.images, job.epochs * job.kind.pieces
    result, hits = results[0], sum(fault.what in ("kill", "long freeze") for fault in job.faults)
    if job.kind.name == "allreduce" and result["consensus_distance"]:
        return f"the weights differ: consensus distance {result['consensus_distance']}"
    if not job.kind.claims:
        left = result["images_left_out"]
        if result["samples"] != job.epochs * (images - left):
            return f"{result['samples']} samples; expected {job.epochs} * ({images} - {left})"
        trained = Counter[int]()
        for words in noted(job, "trained"):
            trained[int(words[3])] += int(words[4])
        least = images - PLACES * (1 + hits) if job.kind.name != "local" else 0
        short = {epoch: trained[epoch] for epoch in range(job.epochs) if trained[epoch] < least}
        return f"images trained in epochs: {short}, and each has {images}" if short else ""
    if result["samples"] != job.epochs * images:
        return f"{result['samples']} samples; expected {job.epochs * images}"
    if result["batches_repeated"] > hits:
        return f"{result['batches_repeated']} batches repeated after {hits} kills and long freezes"
    settled = Counter(int(words[3]) for words in noted(job, "settled"))
    attempts = {int(words[3]) for words in noted(job, "settles")}
    missing = set(range(pieces)) - set(settled)
    if never := missing - attempts:
        return f"never trained: {sorted(never)[:20]} ({len(never)} pieces)"
    if len(missing) > hits:  # a replica may die when it has settled a piece, and not yet written it down
        return f"{len(missing)} pieces were never settled, after {hits} kills and long freezes"
    twice = sorted(piece for piece, count in settled.items() if count > 1)
    if len(twice) > again or set(settled) - set(range(pieces)):
        return f"settled twice: {twice[:20]} ({len(twice)} pieces, of which {again} may be)"
    return ""


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the processes of the running ranks of a launcher. Raises OSError if the launcher has ended."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"MINIDL_RANK="):
                    found[int(entry.split(b"=")[1].split()[0])] = int(pid)
    return found


def noted(job: Job, what: str) -> list[list[str]]:
    """Return the notes of this kind. A killed process may have written a part of its last line."""
    lines = job.notes.read_text().splitlines() if job.notes.exists() else []
    return [words for line in lines if len(words := line.split()) >= 4 and words[2] == what]
