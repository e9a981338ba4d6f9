"""A full disk of one replica: the others train on without its snapshots. A full disk of the leader stops the run.
So does a user who removes the run's folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import Launched
from sessions import Sessions

from minidl.training.trainer import Entry, Trainer

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
    with Launched(2, "0", *SMALL, "--out", str(tmp_path / "run"), program=(FULL,)) as launched:
        code, lines, errors = launched.finish()
    assert code == 2 and not lines and errors.count("\n") == 1
    assert errors.startswith("minidl: error: cannot write checkpoint") and "No space left on device" in errors
    assert not [file for file in (tmp_path / "run" / "checkpoints").iterdir() if file.name.startswith(".new-")]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("method", "ranks"), [("gossip", 3), ("dpsgd", 2), ("dpsgd", 1)])
def test_the_folder_of_the_run_is_removed(tmp_path: Path, method: str, ranks: int, again: bool,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The run ends with one line, and writes nothing into another folder of the same name."""
    folder = tmp_path / "run"
    finish = Trainer._finish_epoch

    def finish_epoch(self: Trainer) -> Entry:
        entry = finish(self)
        if self.progress.epoch == 2 and (folder / "config.toml").exists():
            shutil.rmtree(folder)
            if again:
                folder.mkdir()
        return entry

    monkeypatch.setattr(Trainer, "_finish_epoch", finish_epoch)
    run = Sessions(folder, ranks, {}, method=method, epochs=8, validation=0.25)
    expected = "was removed, moved or replaced while the run went on; the run ends, and writes nothing more"
    assert run.errors == [f"the run folder {folder} {expected}"]
    assert not any(folder.iterdir()) if again else not folder.exists()
