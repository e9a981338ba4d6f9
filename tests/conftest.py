"""Shared by all test files: the folder of the real data sets and the settings of Hypothesis."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
os.environ.setdefault("MINIDL_WORKERS", "1")  # a test that needs several replicas sets it

# The first call of a kernel compiles it, so no example has a deadline. CI draws the same examples in every run.
settings.register_profile("minidl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("minidl"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "minidl")


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def data_dir() -> Path:
    """The folder of the real data sets (`mnist/`, `fashion-mnist/`, `cifar10/`); skips the test if there is none."""
    folder = Path(os.environ.get("MINIDL_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets: {folder} is not a folder (set MINIDL_DATA)")
    return folder
