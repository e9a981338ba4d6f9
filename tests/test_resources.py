"""The cores that a process may use: the CPU limit of a container, and the shares of the ranks of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401

from minidl import resources
from minidl.comm.launch.job import local_ranks
from minidl.engine import environment as settings

CASES = {
    "version 2": ("0::/a/b", {"a/b/cpu.max": "300000 100000"}, 3),
    "a part of a core": ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 2),
    "less than a core": ("0::/a", {"a/cpu.max": "5000 100000"}, 1),
    "no limit": ("0::/a", {"a/cpu.max": "max 100000"}, 8),
    "the limit of a parent": ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, 2),
    "in a container": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "version 1": ("4:memory:/a\n5:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
                                                    "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 4),
    "version 1 without a limit": ("5:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1",
                                                      "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
    "nothing that is valid": ("0::/a", {"a/cpu.max": "x"}, 8),
}  # fmt: skip


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 8 cores. Return the folder of its cgroups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(resources, "CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_limit_of_a_container(eight_cores: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, contents, expected = CASES[name]
    (eight_cores / "own").write_text(own + "\n")
    for path, content in contents.items():
        (eight_cores / path).parent.mkdir(parents=True, exist_ok=True)
        (eight_cores / path).write_text(content + "\n")
    assert resources.cores() == expected
    assert resources.share(2) == max(1, expected // 2)
    for variable in ("MINIDL_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    settings.prepare()
    assert os.environ.get("NUMBA_NUM_THREADS", "8") == str(expected)


@pytest.mark.parametrize(("own", "parent", "ranks", "share"), [
    (8, 8, 1, 8), (8, 8, 3, 2), (8, 8, 20, 1),
    (2, 8, 4, 2),  # the launcher has bound each rank to two cores
    (4, 8, 4, 2),  # it has bound two ranks to each half
])  # fmt: skip
def test_the_ranks_of_a_machine_divide_its_cores(
    eight_cores: Path, monkeypatch: pytest.MonkeyPatch, own: int, parent: int, ranks: int, share: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(parent if pid else own)))
    assert resources.share(ranks) == share


def test_the_number_of_ranks_on_this_machine() -> None:
    assert local_ranks({}) == local_ranks({"MPI_LOCALNRANKS": "x"}) == 1
    assert local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == local_ranks({"MPI_LOCALNRANKS": "3"}) == 3


PRINTED = """
import os, sys
from minidl import train
def prepare(threads):
    os.write(1, f"{threads}\\n".encode())
    os._exit(0)
train.prepare = prepare
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("ranks", "options", "given", "expected"), [
    (1, [], {}, resources.cores()),
    (2, [], {}, max(1, resources.cores() // 2)),
    (2, ["--threads", "3"], {}, 3),
    (2, [], {"MINIDL_THREADS": "5"}, 0),  # 0: `prepare` reads the variable
])  # fmt: skip
def test_threads_under_mpiexec(ranks: int, options: list[str], given: dict[str, str], expected: int) -> None:
    command = [*mpiexec(), "-n", str(ranks), sys.executable, "-c", PRINTED, *options]
    clean = {name: value for name, value in environment().items() if not name.endswith("_THREADS")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean | given)
    assert done.stdout.split() == [str(expected)] * ranks, done.stderr
