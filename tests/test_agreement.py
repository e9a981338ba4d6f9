"""Jobs whose ranks differ in their weights, data or options are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import Launched
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401

from minidl.data import from_arrays
from minidl.training.agreement import facts_of_data

ODD = str(Path(__file__).parent / "replicas" / "odd.py")
SMALL = ["--data", "synthetic:96x2x2x1:2", "--model", "mlp", "--batch-size", "8", "--epochs", "1", "--quiet"]
MESSAGES = {
    "weights": r"initial weights is checksum [0-9a-f]{8} on rank 1, and checksum [0-9a-f]{8} on rank 0",
    "labels": r"y_train is int64 \(96,\) with the checksum [0-9a-f]{8} on rank 1, and int64 .* on rank 0",
    "rate": r"lr is 0\.5 on rank 1, and 0\.01 on rank 0",
}
WHOLE = r"minidl: error: minidl.train: {}: give all ranks the same\n"


def options(folder: Path, method: str) -> list[str]:
    return [*SMALL, "--lr", "0.01", "--method", method, "--out", str(folder / "run")]


@pytest.mark.parametrize(("what", "method"), [
    ("weights", "allreduce"), pytest.param("labels", "gossip", marks=pytest.mark.slow),
    pytest.param("rate", "gossip", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_differs_is_refused(tmp_path: Path, what: str, method: str) -> None:
    with Launched(2, what, *options(tmp_path, method), program=(ODD,)) as launched:
        code, lines, errors = launched.finish()
    assert code == 2 and not lines and not (tmp_path / "run").exists()
    assert re.fullmatch(WHOLE.format(MESSAGES[what]), errors), errors


def test_a_server_that_differs_is_refused(tmp_path: Path) -> None:
    with Launched(2, "weights", *options(tmp_path, "ps"), program=(ODD,)) as launched:
        code, _, errors = launched.finish()
    assert code == 2 and re.fullmatch(WHOLE.format(MESSAGES["weights"]), errors), errors


def test_a_sample_of_the_images_and_all_labels_are_compared() -> None:
    """Other images, another order and one other label are noticed."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((1000, 2, 2, 1)).astype(np.float32), rng.integers(0, 4, 1000)
    order, labels = rng.permutation(1000), y.copy()
    labels[-1] += 1
    pairs = (x, y), (x + 1, y), (x[order], y), (x, labels), (x, y)
    found = [facts_of_data(from_arrays(pair, 0.0, 0)) for pair in pairs]
    assert found[0] == found[4] and found[0]["y_train"] == found[1]["y_train"] == found[2]["y_train"]
    assert len({facts["x_train"] for facts in found[:3]}) == 3 and found[3]["x_train"] == found[0]["x_train"]
    assert found[3]["y_train"] != found[0]["y_train"]


@pytest.mark.parametrize("mode", [pytest.param({}, marks=pytest.mark.slow), {"MINIDL_MPI_ONLY": "1"}])
def test_a_rank_of_an_mpi_job_that_differs(tmp_path: Path, mode: dict[str, str]) -> None:
    command = [*mpiexec(), "-n", "3", sys.executable, ODD, "weights", *options(tmp_path, "gossip")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(**mode))
    assert done.returncode == 2 and done.stderr.count("minidl: error:") == 1
    assert re.search(WHOLE.format(MESSAGES["weights"]), done.stderr), done.stderr
