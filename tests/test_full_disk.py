"""A full disk of one replica: the others train on without its snapshots. A full disk of the leader stops the run."""

from __future__ import annotations

from pathlib import Path

from launching import Launched

FULL = str(Path(__file__).parent / "replicas" / "full.py")
SMALL = ["--data", "synthetic:240x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "4", "--quiet",
         "--method", "gossip", "--json"]  # fmt: skip


def test_the_disk_of_one_replica_is_full(tmp_path: Path) -> None:
    with Launched(3, "1", *SMALL, "--out", str(tmp_path / "run"), program=(FULL,)) as launched:
        code, [result], errors = launched.finish()
    assert code == 0 and result["replicas_alive"] == 3 and result["epochs"] == 4
    parts = tmp_path / "run" / "checkpoints" / "parts" / "1" / "step-00000005"
    expected = f"cannot write checkpoint {parts}: No space left on device"
    assert errors == f"minidl: replica 1 writes no local snapshots, and trains on: {expected}\n"


def test_the_disk_of_the_leader_is_full(tmp_path: Path) -> None:
    with Launched(3, "0", *SMALL, "--out", str(tmp_path / "run"), program=(FULL,)) as launched:
        code, lines, errors = launched.finish()
    assert code == 2 and not lines and errors.count("\n") == 1
    assert errors.startswith("minidl: error: cannot write checkpoint") and "No space left on device" in errors
    assert not [file for file in (tmp_path / "run" / "checkpoints").iterdir() if file.name.startswith(".new-")]
