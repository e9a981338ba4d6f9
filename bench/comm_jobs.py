"""How bench/comm.py starts jobs of several ranks, and what it learns of them.

    found = launched(2, "handoff", {...})                   ranks of one node, by minidl's launcher
    found = mpi(4, "train", {...}, mpiexec=MPICH)           by an mpiexec
    found = two_hosts(4, 2, "train", {...}, rate)           two on each of two hosts with a thin link between them
    found = simulated(4, options)                           all in this process, on a virtual clock

Each rank runs a scenario of comm_rank.py; found[rank] is what that returned.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
TOOL = ROOT.parent / "shared" / "tools" / "two-hosts"
START = """
import json, sys
from minidl.comm import launch
ranks, threads, arguments = map(json.loads, sys.argv[1:])
sys.exit(launch.run(arguments, ranks, threads, quiet=True, program=("-m", "bench.comm_rank")))
"""
Found = dict[int, Any]


def environment(threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return {**kept, "PYTHONPATH": path, "MINIDL_THREADS": str(threads), "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip


def _results(command: Sequence[str], scenario: str, options: Mapping[str, Any], threads: int, timeout: float) -> Found:
    """Run it; each rank leaves a file."""
    with tempfile.TemporaryDirectory() as folder:
        words = [scenario, json.dumps({**options, "results": folder})]
        done = subprocess.run(
            [*command, *([json.dumps(words)] if START in command else words)], env=environment(threads), cwd=folder,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{scenario} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return {int(file.stem): json.loads(file.read_text()) for file in Path(folder).glob("*.json")}


def launched(
    ranks: int, scenario: str, options: Mapping[str, Any], threads: int = 1, timeout: float = 600
) -> Found:  # fmt: skip
    """Ranks of this node."""
    command = [sys.executable, "-c", START, str(ranks), str(threads)]
    return _results(command, scenario, options, threads, timeout)


def alone(scenario: str, options: Mapping[str, Any], threads: int = 1, timeout: float = 600) -> Found:
    """One process, of no job."""
    return _results([sys.executable, "-m", "bench.comm_rank"], scenario, options, threads, timeout)


def mpiexec() -> list[str] | None:
    """The command beside this Python, or on the PATH, with what it needs as root and for more ranks than cores."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment(1)).stdout
    return [path, "--oversubscribe"] if "Open" in version else [path]


def mpi(ranks: int, scenario: str, options: Mapping[str, Any], threads: int = 1, timeout: float = 600) -> Found:
    """Ranks of an MPI job on this machine. There must be an `mpiexec`."""
    command = [*(mpiexec() or []), "-n", str(ranks), sys.executable, "-m", "bench.comm_rank"]
    return _results(command, scenario, options, threads, timeout)


class Crossed(NamedTuple):
    """bytes: with 66 of headers (Ethernet, IP, TCP) in each of the packets."""

    bytes: int
    packets: int

    @property
    def payload(self) -> int:
        return self.bytes - 66 * self.packets


class TwoHosts:
    """Two network namespaces with a link of some rate between them, while a `with` lasts.

    Needs root, and MPICH beside the Python at `python`, which runs the ranks.
    """

    def __init__(self, rate: str, python: str) -> None:
        self.rate, self.python = rate, python

    def __enter__(self) -> TwoHosts:
        self._tool("up", self.rate)
        return self

    def __exit__(self, *exception: object) -> None:
        self._tool("down")

    def _tool(self, *words: str) -> str:
        return subprocess.run([str(TOOL), *words], check=True, capture_output=True, text=True).stdout

    def run(self, ranks: int, scenario: str, options: Mapping[str, Any], timeout: float = 600) -> tuple[Found, Crossed]:
        """(what the ranks returned, what crossed the link, both ways, as the interface counts)"""
        before = self.crossed()
        path = f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}"
        command = ["env", f"PATH={path}", str(TOOL), "run", str(ranks), str(-(-ranks // 2)), self.python, "-m",
                   "bench.comm_rank"]  # fmt: skip
        found = _results(command, scenario, options, 1, timeout)
        after = self.crossed()
        return found, Crossed(*(b - a for a, b in zip(before, after)))

    def crossed(self) -> Crossed:
        files = [f"/sys/class/net/mdl-a/statistics/{way}_packets" for way in ("tx", "rx")]
        inside = ["ip", "netns", "exec", "minidl-a", "cat", *files]
        packets = subprocess.run(inside, check=True, capture_output=True, text=True).stdout
        return Crossed(sum(map(int, self._tool("bytes").split())), sum(map(int, packets.split())))


def simulated(ranks: int, argv: Sequence[str]) -> Found:
    """The losses of a run in this process on a virtual clock, as `train` of comm_rank.py has them."""
    from bench.comm_rank import Steps
    from minidl.comm.cluster import load
    from minidl.run.config import Config, resolve
    from minidl.run.folder import RunFolder
    from minidl.run.options import parse
    from minidl.run.signals import Signals
    from minidl.training.simulated import SimulatedRun

    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
        config = resolve(parse(Config, [*argv, "--quiet", "--out", f"{folder}/run"], "bench"))
        session = SimulatedRun(config, load("uniform"), ranks, signals)
        watched = [Steps(trainer) for trainer in session.trainers]
        with RunFolder.create(session.config) as run:
            session.train(run)
        return {rank: {"losses": steps.losses} for rank, steps in enumerate(watched)}


def losses(found: Found) -> list[list[str]]:
    """Of each rank, each step's, every bit of them."""
    return [found[rank]["losses"] for rank in sorted(found)]
