"""The cores of ranks and of the parts of a replica, on machines that exist only as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from minidl.comm.launch import cores
from minidl.comm.launch.job import local_rank


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two sockets of two NUMA nodes of two cores: CPU c is on socket c % 2 and on node c % 4."""
    monkeypatch.setattr(cores, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name in ("MINIDL_CORES", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "core_id").write_text(f"{7 - cpu}\n")
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 4}").mkdir()
    return tmp_path


def test_cores_of_one_node_are_neighbours(machine: Path) -> None:
    assert cores.neighbours(range(8)) == [4, 0, 6, 2, 5, 1, 7, 3]
    assert [{cpu % 4 for cpu in cores.share(cores.own(), part, 4)} for part in range(4)] == [{0}, {2}, {1}, {3}]
    assert [{cpu % 2 for cpu in cores.share(cores.own(), part, 2)} for part in range(2)] == [{0}, {1}]


def test_without_numa_and_without_a_description(machine: Path) -> None:
    for cpu in range(8):
        (machine / f"cpu{cpu}" / f"node{cpu % 4}").rmdir()
    assert cores.neighbours(range(8)) == [6, 4, 2, 0, 7, 5, 3, 1]
    for cpu in range(8):
        (machine / f"cpu{cpu}" / "topology" / "core_id").unlink()
    assert cores.neighbours(range(8)) == list(range(8))


def test_parts_share_no_cores_unless_there_are_fewer_cores() -> None:
    assert [cores.share([3, 4, 5, 6], part, 2) for part in range(2)] == [[3, 4], [5, 6]]
    assert [cores.share([3, 4], part, 3) for part in range(3)] == [[3, 4]] * 3


@pytest.mark.parametrize(("size", "rank", "allowed", "expected"), [
    (2, 0, range(8), [4, 0, 6, 2]), (2, 1, range(8), [5, 1, 7, 3]),
    (4, 3, range(8), [7, 3]),
    (2, 1, (1, 2, 3), [2, 1, 3]),  # mpiexec has bound each rank to cores of its own
    (16, 9, range(8), [0]),  # more ranks than cores
])  # fmt: skip
def test_ranks_under_mpiexec_divide_the_cores(
    machine: Path, monkeypatch: pytest.MonkeyPatch, size: int, rank: int, allowed: Sequence[int], expected: list[int]
) -> None:
    for name, value in (("PMI_RANK", rank), ("PMI_SIZE", size), ("MPI_LOCALRANKID", rank), ("MPI_LOCALNRANKS", size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8) if process else allowed))
    assert cores.own() == expected


def test_the_launcher_has_chosen_the_cores_of_its_ranks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_CORES", "5 1")
    assert cores.own() == [5, 1]


def test_the_number_of_a_rank_on_its_machine() -> None:
    assert local_rank({}) == local_rank({"MPI_LOCALRANKID": "x"}) == 0
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}) == local_rank({"SLURM_LOCALID": "2"}) == 2
