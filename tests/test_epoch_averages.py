"""Asynchronous methods: the average of each epoch is validated during the run, and the best is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sessions import Sessions

from minidl.run import checkpoint as files
from minidl.training import epoch_averages
from minidl.training.epoch_averages import EpochAverages

OPTIONS: dict[str, Any] = dict(method="gossip", data="synthetic:120x2x2x1:2", epochs=8, validation=0.25, lr=0.001,
                               schedule="constant")  # fmt: skip


def averages(folder: Path) -> dict[int, tuple[float, float]]:
    """Return {step: (validation accuracy, -loss)} of all averages in metrics.jsonl. Each epoch has one."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    found = [entry for entry in entries if entry["event"] == "average"]
    assert [entry["epoch"] for entry in found] == sorted({entry["epoch"] for entry in found})
    return {entry["step"]: (entry["validation_accuracy"], -entry["validation_loss"]) for entry in found}


def check(run: Sessions) -> None:
    """Check that the result is the best of all averages."""
    scores = averages(run.folder)
    assert run.summary and run.summary["best_step"] == max(scores, key=lambda step: scores[step])
    best = files.load(files.folder_of(run.folder / "checkpoints", run.summary["best_step"]))
    assert best.state["progress"]["step"] == run.summary["best_step"]
    assert not (run.folder / "checkpoints" / epoch_averages.FOLDER).exists()


def test_few_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    take = EpochAverages.take
    monkeypatch.setattr(EpochAverages, "take", lambda self: (take(self), kept.append(len(self._pending()))))
    run = Sessions(tmp_path, 3, {}, **OPTIONS | {"epochs": 20})
    check(run)
    assert len(averages(tmp_path)) == 20 and len(kept) == 60 and 0 < max(kept) <= 4


@pytest.mark.parametrize("ranks", [3, 2])
def test_a_stop_keeps_the_best(tmp_path: Path, ranks: int) -> None:
    time = Sessions(tmp_path / "whole", 3, {}, **OPTIONS).simulation.time
    Sessions(tmp_path / "run", 3, {}, stop=0.6 * time, **OPTIONS)
    before = averages(tmp_path / "run")
    assert before
    check(Sessions(tmp_path / "run", ranks, {}))
    assert before.items() <= averages(tmp_path / "run").items()
    assert len(averages(tmp_path / "run")) == 8 or ranks == 2


def test_the_next_leader_knows_the_best(tmp_path: Path) -> None:
    time = Sessions(tmp_path / "whole", 3, {}, **OPTIONS).simulation.time
    run = Sessions(tmp_path / "run", 3, {0: 0.7 * time}, **OPTIONS)
    check(run)
    assert len(averages(tmp_path / "run")) == 8


def test_all_are_killed(tmp_path: Path) -> None:
    time = Sessions(tmp_path / "whole", 3, {}, **OPTIONS).simulation.time
    Sessions(tmp_path / "run", 3, dict.fromkeys(range(3), 0.7 * time), **OPTIONS)
    assert averages(tmp_path / "run")
    check(Sessions(tmp_path / "run", 3, {}))


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_damaged_file(tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str],
                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The epoch is left out, with one line."""
    take = EpochAverages.take

    def damage(self: EpochAverages) -> None:
        take(self)
        if self.trainer.progress.epoch == 2:
            file = self.folder / "2" / f"{self.trainer.fabric.rank}.safetensors"
            file.write_bytes(file.read_bytes()[:-4] if content is None else content)

    monkeypatch.setattr(EpochAverages, "take", damage)
    check(Sessions(tmp_path, 2, {}, **OPTIONS))
    errors = capsys.readouterr().err
    assert errors.startswith("minidl: the average of epoch 2 is not validated: ") and errors.count("\n") == 1
    assert len(averages(tmp_path)) == 7
