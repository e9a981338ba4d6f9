"""Jobs whose ranks differ in their weights, data or options are refused. A script's weights become those of rank 0."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launched, job
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401

ODD = str(Path(__file__).parent / "replicas" / "odd.py")
SMALL = ["--data", "synthetic:96x2x2x1:2", "--model", "mlp", "--batch-size", "8", "--epochs", "1", "--quiet"]
MESSAGES = {
    "weights": r"other initial weights than replica 0: [0-9a-f]{12} against [0-9a-f]{12}",
    "labels": r"other training labels than replica 0: [0-9a-f]{12} against [0-9a-f]{12}",
    "rate": r"other --lr than replica 0: 0\.5 against 0\.01",
}
WHOLE = r"minidl: error: (?:replica 1: )?replica 1 has {}; start all ranks with the same program, options and data\n"


def options(folder: Path, method: str) -> list[str]:
    return [*SMALL, "--lr", "0.01", "--method", method, "--out", str(folder / "run")]


@pytest.mark.parametrize(("what", "method"), list(zip(MESSAGES, ["allreduce", "gossip", "gossip"], strict=True)))
def test_a_rank_that_differs_is_refused(tmp_path: Path, what: str, method: str) -> None:
    with Launched(3, what, *options(tmp_path, method), program=(ODD,)) as launched:
        code, lines, errors = launched.finish()
    assert code == 2 and not lines and not (tmp_path / "run").exists()
    assert re.fullmatch(WHOLE.format(MESSAGES[what]), errors), errors


def test_a_server_that_differs_is_refused(tmp_path: Path) -> None:
    with Launched(2, "weights", *options(tmp_path, "ps"), program=(ODD,)) as launched:
        code, _, errors = launched.finish()
    expected = r"other options, data or initial weights than replica 0: [0-9a-f]{12} against [0-9a-f]{12}"
    assert code == 2 and re.fullmatch(WHOLE.format(expected), errors), errors


def test_equal_ranks_train(tmp_path: Path) -> None:
    with Launched(3, "nothing", *options(tmp_path, "gossip"), "--json", program=(ODD,)) as launched:
        code, [result], errors = launched.finish()
    assert (code, errors, result["replicas_alive"]) == (0, "", 3)


@pytest.mark.parametrize("mode", [{}, {"MINIDL_MPI_ONLY": "1"}])
def test_a_rank_of_an_mpi_job_that_differs(tmp_path: Path, mode: dict[str, str]) -> None:
    command = [*mpiexec(), "-n", "3", sys.executable, ODD, "weights", *options(tmp_path, "gossip")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**mode))
    assert done.returncode == 2 and done.stderr.count("minidl: error:") == 1
    assert re.search(WHOLE.format(MESSAGES["weights"]), done.stderr), done.stderr


AGREE = """
import json, os
from minidl.comm.fabric.base import BufferSpec
from minidl.comm.stats import Stats
from minidl.comm.transport.shm import ShmTransport
from minidl.nn import Linear
from minidl.training.agreement import agree_on_weights
fabric = ShmTransport.from_environment(Stats())
model = Linear(400, 300)  # more than one chunk of a collective operation
arena = model.flatten()
arena.theta[:] = fabric.rank
version = arena.version
fabric.join(BufferSpec(), arena.layout_hash)
agree_on_weights(fabric, arena)
result = [float(arena.theta.min()), float(model.weight.data.max()), arena.version > version]
os.write(1, json.dumps({"rank": fabric.rank, "result": result}).encode() + b"\\n")
fabric.barrier()
fabric.close()
"""


def test_all_ranks_get_the_weights_of_rank_0() -> None:
    code, results, errors = job(3, program=("-c", AGREE))
    assert (code, errors) == (0, "")
    assert results == {rank: [0.0, 0.0, True] for rank in range(3)}
