"""Shared by all test files: the folder of the real data sets, the settings of Hypothesis, threads, and bytecode."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from minidl.engine.jit import set_threads, threads
from minidl.ops.conv import winograd

ROOT = Path(__file__).parent.parent
ROOM = 4 << 30  # bytes in memory for the folders of tests that fail; those of others are removed at once
os.environ.setdefault("MINIDL_REPORT", "0")  # tests of reports set 1
os.environ.setdefault("MINIDL_WORKERS", "1")  # tests that need more replicas set another number

# No deadline for an example: the first call of a kernel compiles it. CI draws the same examples in every run.
settings.register_profile("minidl", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("minidl"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "minidl")


def pytest_configure() -> None:
    """Put the folders of tests into memory, if there is room: on a disk, tests with many files take a fifth longer."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC and (
            shutil.disk_usage(memory).free > ROOM):  # fmt: skip
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))  # read by pytest


def pytest_report_header() -> str | None:
    """Say that tests are missing if their packages are."""
    if find_spec("numba_cuda") is None:
        return "tests/cuda is skipped: it needs pip install -e '.[cuda13]' nvidia-cuda-nvdisasm"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn Python's garbage collector off while tests are collected, and let it leave out what exists then.

    It would traverse half a million objects again and again: 4 of 14 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


STARTERS = {"Command", "Launched", "job", "jobs", "mpiexec", "results", "subprocess"}  # in modules that start processes


@pytest.hookimpl(trylast=True)  # after the slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start processes in the middle, so that the second of two test processes begins with them.

    Meanwhile, the first one compiles kernels. If both began with kernels, both would compile the same ones.
    """
    starting = [isinstance(item, pytest.Function) and not STARTERS.isdisjoint(vars(item.module)) for item in items]
    others = [item for item, starts in zip(items, starting) if not starts]
    half = len(items) // 2
    items[:] = [*others[:half], *(item for item, starts in zip(items, starting) if starts), *others[half:]]


OPS = {folder.parent.name for folder in ROOT.glob("kernels/*/cpu.py")}
SEVERAL = {"depthwise", "kernels", "ladders", "program", "tile", "winograd", "winograd_large"}
ALL_THREADS = {f"test_{name}" for name in OPS | SEVERAL}


@pytest.fixture(scope="module", autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limit kernels to one thread, except in the tests of kernels.

    Two test processes with two threads each share two cores. So a thread would wait for the other one in each parallel
    kernel, until the system runs it: a test with small kernels would take ten times as long.
    """
    before = threads()
    set_threads(before if request.module.__name__.rpartition(".")[2] in ALL_THREADS else 1)
    yield
    set_threads(before)


@pytest.fixture(scope="module", autouse=True)
def default_convolution() -> Iterator[None]:
    """Allow Winograd's method again after a module. A job that a test runs in this process may have forbidden it."""
    yield
    winograd(True)


@pytest.fixture(scope="session", autouse=True)
def variables_of_children(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the processes that tests start one thread, and a folder for bytecode if they may write none elsewhere.

    Without bytecode, each of about a thousand processes would parse all modules of minidl again (0.3 s).
    """
    os.environ.setdefault("MINIDL_THREADS", "1")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        folder = tmp_path_factory.getbasetemp()
        shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        os.environ["PYTHONPYCACHEPREFIX"] = str(shared / "bytecode")


@pytest.fixture(scope="session", autouse=True)
def signals_of_children() -> None:
    """Let signals reach the processes that tests start, even if the shell ignores them (`nohup python -m pytest &`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def root() -> Path:
    """Return the root folder of the repository."""
    return ROOT


@pytest.fixture
def data_dir() -> Path:
    """Return the folder of the real data sets (`mnist/`, `fashion-mnist/`, `cifar10/`), or skip the test."""
    folder = Path(os.environ.get("MINIDL_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets: {folder} is not a folder (set MINIDL_DATA)")
    return folder
