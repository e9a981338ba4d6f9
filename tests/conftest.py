"""Shared by all test files: the folder of the real data sets and the settings of Hypothesis."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
os.environ.setdefault("MINIDL_WORKERS", "1")  # tests that need more replicas set another number

# No deadline for an example: the first call of a kernel compiles it. CI draws the same examples in every run.
settings.register_profile("minidl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("minidl"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "minidl")


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
