"""Replicas that die while the others load, join and compile, and Ctrl-C at that time. Real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import Launched

KILLED = str(Path(__file__).parent / "replicas" / "killed.py")
SMALL = ["--data", "synthetic:240x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "2", "--quiet"]


def killed(folder: Path, victim: int, where: str, *options: str) -> tuple[int, list[Any], str]:
    """Run a job of 3 ranks, one of which is killed by SIGKILL when it calls the function `where`."""
    arguments = [str(victim), where, *SMALL, "--out", str(folder), "--json", *options]
    with Launched(3, *arguments, program=[KILLED]) as launched:
        return launched.finish()


@pytest.mark.parametrize(("victim", "where"), [
    pytest.param(0, "training.session:prepare", marks=pytest.mark.slow),
    pytest.param(1, "training.session:agree_at_start", marks=pytest.mark.slow),
    (0, "training.agreement:led"),
    pytest.param(0, "training.session:RunOutput", marks=pytest.mark.slow),
    pytest.param(2, "training.session:begin_together", marks=pytest.mark.slow),
    pytest.param(0, "training.trainer:Trainer.prepare", marks=pytest.mark.slow),
])  # fmt: skip
def test_gossip_begins_without_a_replica_that_dies(tmp_path: Path, victim: int, where: str) -> None:
    code, lines, errors = killed(tmp_path / "run", victim, where, "--method", "gossip")
    assert (code, errors) == (0, f"minidl: replica {victim} was killed by SIGKILL\n")
    [result] = lines
    assert result["replicas_alive"] == 2 and result["epochs"] == 2


@pytest.mark.parametrize(("method", "victim", "where"), [
    ("dpsgd", 0, "training.session:agree_at_start"),
    pytest.param("allreduce", 2, "training.session:begin_together", marks=pytest.mark.slow),
    pytest.param("ps", 2, "training.session:agree_at_start", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_line_if_the_others_need_the_dead(tmp_path: Path, method: str, victim: int, where: str) -> None:
    code, lines, errors = killed(tmp_path / "run", victim, where, "--method", method)
    assert code == 2 and not lines
    first, second = errors.splitlines()
    assert first == f"minidl: replica {victim} was killed by SIGKILL"
    assert second.startswith("minidl: error: ") and f"replica {victim} died while others waited for" in second
    assert not (tmp_path / "run").exists(), "a run that has not begun leaves no folder"
