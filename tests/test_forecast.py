"""The memory of a run of several replicas is predicted, and a run that does not fit is refused with one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from launching import Launched

from minidl import resources
from minidl.comm.fabric.base import BufferSpec
from minidl.errors import ConfigError
from minidl.training import forecast

SHORT = """
import sys
from minidl import resources
from minidl.train import main
resources.available = lambda: 5_000_000
sys.exit(main())
"""
SMALL = ["--data", "synthetic:240x4x4x1:4", "--model", "mlp", "--method", "gossip", "--quiet"]


def fabric(rank: int, nodes: list[int]) -> Any:
    ranks = len(nodes)
    return SimpleNamespace(rank=rank, began=ranks, size=ranks, nodes=nodes, servers=(), replicas=tuple(range(ranks)))


def test_64_replicas_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    large, buffers = 100_000_000, BufferSpec(nbytes=400_000_000, mail=2)
    monkeypatch.setattr(resources, "available", lambda: 10**11)
    words = r"64 replicas with 100,000,000 parameters each need about 128 GB of memory, 51\.5 GB of it for messages, "
    with pytest.raises(ConfigError, match=words + r"and 100 GB are free: use fewer --workers or a smaller model"):
        forecast.require_room(fabric(0, [0] * 64), large, "adam", buffers)
    forecast.require_room(fabric(0, [0] * 32 + [1] * 32), large, "adam", buffers)  # 64 GB on each machine
    with pytest.raises(ConfigError, match=r"32 replicas .* about 167 GB"):  # four parts need eight vectors
        forecast.require_room(fabric(0, [0] * 32 + [1] * 32), large, "adam", buffers, parts=4)
    forecast.require_room(fabric(1, [0] * 64), large, "adam", buffers)  # only the first rank of a machine checks
    forecast.require_room(fabric(0, [0]), 10**12, "adam", buffers)


def test_a_run_that_does_not_fit_is_refused() -> None:
    with Launched(2, *SMALL, program=("-c", SHORT)) as launched:
        code, lines, errors = launched.finish()
    assert code == 2 and not lines and errors.count("\n") == 1
    assert errors.startswith("minidl: error: 2 replicas with 27") and "and 5 MB are free" in errors
