"""Ranks of an MPI job are frozen, alone on their node or beside others. Other nodes learn of it by messages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_mpi as jobs
from replicas.deaths import PIECES
from test_mpi import nothing_left  # noqa: F401 (a fixture)
from test_mpi_deaths import open_mpi, ours


def freezes(nodes: str, victim: int, wakes: str) -> tuple[dict[int, Any], list[str], int]:
    """Run the scenario. Return the results by rank, the lines that say what happens to the victim, the exit code."""
    ranks = str(len(nodes.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        environment = jobs.environment(RESULTS=folder, RANKS=ranks, GROUPING=nodes)
        command = [*jobs.mpiexec(), "-n", ranks, sys.executable, str(jobs.HELPER), "freezes", str(victim), wakes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        found = {int(file.name): json.loads(file.read_text()) for file in Path(folder).iterdir()}
    assert found, done.stderr
    lines = [line for line in ours(done.stderr) if line.startswith(f"minidl: replica {victim} ")]
    return found, [line.rpartition(": ")[2] for line in lines if "waited" not in line], done.returncode


@pytest.mark.parametrize(("nodes", "victim"), [
    ("0,0,1,1", 0),
    pytest.param("0,1,2", 1, marks=pytest.mark.slow),
    pytest.param("0,0,1,1", 3, marks=pytest.mark.slow),
    pytest.param("0,0,0", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_others_go_on_without_a_frozen_rank_until_it_wakes(nodes: str, victim: int) -> None:
    """Also without rank 0, which receives rows of the status table for its node and answers for the ledger of work."""
    found, lines, code = freezes(nodes, victim, "yes")
    assert code == 0 and "it is left out until it wakes" in lines
    ranks = list(range(len(found)))
    settled = Counter(piece for result in found.values() for piece in result["settled"])
    assert all(result["alive"] == ranks for result in found.values())
    assert settled == Counter(range(PIECES)), "the begun piece of the victim is trained by another"


def test_a_job_ends_whose_frozen_rank_is_alone_on_its_node() -> None:
    """The others cannot kill it."""
    found, lines, code = freezes("0,1,2", 1, "no")
    assert sorted(found) == [0, 2] and all(result["alive"] == [0, 2] for result in found.values())
    assert "it is left out until it wakes" in lines and "counts as dead" in lines[-1]
    # After MPI_Abort(0), Open MPI's mpiexec exits with 0 or 1, MPICH's with 0, or 9 if it has killed the frozen rank.
    assert code in ((0, 1) if open_mpi() else (0, 9))
    settled = Counter(piece for result in found.values() for piece in result["settled"])
    assert set(settled.values()) == {1} and PIECES - 4 <= len(settled) < PIECES, "the victim has settled the others"
