"""Ranks of an MPI job are frozen, on their own node or beside others, and wake. Other nodes learn of it by messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import test_mpi as jobs
from launching import eventually
from test_mpi import nothing_left  # noqa: F401 (a fixture)
from test_mpi_deaths import BATCHES, COUNTING, RUN, ULFM, open_mpi, settled

RANK = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
SUSPECTED = re.compile(r"minidl: replica (\d+) \(host .*, process (\d+)\) has shown no sign of life for \d+ s: (.*)")


class Running:
    """A job of three replicas of `train` that runs. nodes: the node of each rank. The first word names its signals."""

    def __init__(self, folder: Path, nodes: str, *words: str) -> None:
        self.log, self.errors, self.out = folder / "log", folder / "errors", folder / "out"
        node = f"export MINIDL_NODE=node$(echo {nodes} | cut -d, -f$(({RANK} + 1)))"
        program = ["sh", "-c", f'{node}; exec "$@"', "sh", sys.executable, COUNTING, str(self.log), *words, *RUN,
                   "--out", str(folder / "run")]  # fmt: skip
        options = ULFM if open_mpi() else []
        self.files: list[IO[str]] = [open(name, "w") for name in (self.out, self.errors)]  # noqa: SIM115
        self.log.touch()
        self.process = subprocess.Popen([*jobs.mpiexec(), *options, "-n", "3", *program], stdout=self.files[0],
                                        stderr=self.files[1], env=jobs.environment())  # fmt: skip

    def lines(self) -> list[str]:
        return [line for line in self.errors.read_text().splitlines() if line.startswith("minidl:")]

    def suspected(self) -> tuple[int, int, str]:
        """Wait until a replica is suspected. Return its rank, its process, and what happens to it."""
        eventually(lambda: any(map(SUSPECTED.match, self.lines())), "no replica is suspected")
        [rank, process, fate] = next(filter(None, map(SUSPECTED.match, self.lines()))).groups()
        return int(rank), int(process), fate

    def result(self) -> dict[str, object]:
        self.process.wait(60)
        found = [json.loads(line) for line in self.out.read_text().splitlines() if line.startswith("{")]
        assert len(found) == 1, self.errors.read_text()
        return dict(found[0])


@contextmanager
def running(folder: Path, nodes: str, *words: str) -> Iterator[Running]:
    job = Running(folder, nodes, *words)
    try:
        yield job
    finally:
        job.process.kill()
        for file in job.files:
            file.close()


GOSSIP = ["--method", "gossip", "--epochs", "3", "--stall", "1"]


@pytest.mark.parametrize("nodes", ["0,1,2", "0,1,0"])
def test_a_frozen_replica_that_is_alone_on_its_node_is_left_out(tmp_path: Path, nodes: str) -> None:
    """It cannot be killed from other nodes, so the job is ended when all others have left."""
    with running(tmp_path, nodes, "1:5:19,0:20:-1,2:20:-1", *GOSSIP) as job:
        assert job.suspected()[::2] == (1, "it is left out until it wakes")
        result = job.result()
        assert result["replicas_alive"] == 2 and result["samples"] == 3 * 450
        assert job.lines()[-1].endswith("still shows no sign of life: it counts as dead, so that the others can end")
        assert set(settled(job.log)) == set(range(3 * BATCHES))


@pytest.mark.parametrize(("nodes", "victim"), [("0,0,0", 1), ("0,1,2", 2), ("0,0,1", 1), ("0,0,1", 0)])
def test_a_replica_that_wakes_is_taken_back(tmp_path: Path, nodes: str, victim: int) -> None:
    """Also replica 0, which leads, receives messages for its node, and answers for the ledger of the work."""
    others = ",".join(f"{rank}:20:-1,{rank}:60:0" for rank in range(3) if rank != victim)
    with running(tmp_path, nodes, f"{victim}:5:19,{others}", *GOSSIP) as job:
        rank, process, _ = job.suspected()
        assert rank == victim
        eventually(lambda: settled(job.log).total() >= 2 * 59, "the others do not go on")
        os.kill(process, signal.SIGCONT)
        eventually(lambda: any(line.endswith(f"process {process}) is back") for line in job.lines()), "it is not back")
        Path(f"{job.log}.go").touch()
        result = job.result()
        assert job.process.returncode == 0 and result["replicas_alive"] == 3 and result["samples"] == 3 * 450
        # A replica on another node than the ledger learns late that others train the batches that it had claimed.
        twice = settled(job.log) - Counter(range(3 * BATCHES))
        assert set(settled(job.log)) == set(range(3 * BATCHES)) and twice.total() <= 4 * (nodes[victim] != nodes[0])
