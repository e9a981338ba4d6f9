"""Communication statistics and traces of replicas, in a simulation where all times are known."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from minidl.comm import stats, trace
from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import BufferSpec, Fabric
from minidl.comm.transport.sim import Simulation


def test_an_allreduce_over_three_ranks(tmp_path: Path) -> None:
    simulation = Simulation(uniform(3, alpha=1e-3, beta=1e-6), 3)

    def replica(fabric: Fabric) -> tuple[np.ndarray, np.ndarray]:
        fabric.join(BufferSpec(nbytes=4000, mail=2), "layout")
        fabric.stats.trace = trace.Trace.for_ranks(3)
        fabric.stats.start()
        fabric.allreduce_start(np.ones(250, np.float32)).wait()
        fabric.stats.stop()
        return fabric.stats.vector(), fabric.stats.trace.vector(fabric.rank)

    fabrics = [Fabric(simulation.transport(rank)) for rank in range(3)]
    vectors = simulation.run({rank: partial(replica, fabric) for rank, fabric in enumerate(fabrics)})
    reports = [stats.from_vector(vectors[rank][0]) for rank in range(3)]
    timelines = [trace.from_vector(vectors[rank][1]) for rank in range(3)]
    assert [report["rank"] for report in reports] == [line.rank for line in timelines] == [0, 1, 2]
    total = stats.merge(reports)
    assert total["edges"] == [[0, 1, 1000, 1], [0, 2, 1000, 1], [1, 0, 1000, 1], [2, 0, 1000, 1]]
    assert total["bytes_sent"] == 4000
    # Replica 1 waits 4 ms for the sum: 2 ms up the tree and 2 ms down. Meanwhile the allreduce, a concurrent operation,
    # waits for messages. `Stats` counts this second kind of waiting separately, in "beside".
    assert reports[1]["seconds"]["waiting"] == pytest.approx(4e-3)
    assert total["beside"]["waiting"] > 0
    assert total["wait_fraction"] == 1.0
    trace.write(tmp_path / "trace.json", timelines)
    assert (tmp_path / "trace.json").read_text().count('"ph": "s"') == 4
