"""Files of a run with valid checksums and hostile content, and what is refused before it begins."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minidl
from minidl import data, nn, resources
from minidl.comm.launch import local
from minidl.errors import CheckpointError, ConfigError, MinidlError
from minidl.run import checkpoint as files
from minidl.run.config import Config
from minidl.run.folder import RunFolder, result_of
from minidl.train import main
from minidl.training import forecast, local_snapshots
from minidl.training.replica_state import own_state
from minidl.training.resume import make_checkpoint, restore
from minidl.training.trainer import Trainer

CONFIG = Config(data="synthetic:44x2x2x1:3", model="mlp", batch_size=16, epochs=2, workers=1)
SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--quiet", "--lr", "0.01"]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    return Trainer(model, data.load(CONFIG.data), CONFIG)


def of_replicas(trainer: Trainer) -> files.Checkpoint:
    """Return a checkpoint like that of a run with several replicas, but with the state of only one."""
    return make_checkpoint(trainer, [replace(own_state(trainer), stats=trainer.fabric.stats.vector())])


def of_method(state: dict[str, Any], numbers: Any) -> None:
    """Give the state one replica, whose method has these numbers."""
    state["members"] = {"0": {"progress": state["progress"], "optimizer_steps": 0, "random": state["random"],
                              "images": 0, "steps": 0, "method": numbers}}  # fmt: skip


Change = Callable[[dict[str, Any]], Any]
STATES: dict[str, tuple[Change, str]] = {
    "a negative step": (lambda s: s["progress"].update(step=-1), "progress.step is -1"),
    "a huge step": (lambda s: s["progress"].update(step=2**63), "progress.step is 9223372036854775808"),
    "a huge shift": (lambda s: s["progress"].update(shift=2**50), "progress.shift is"),
    "more correct answers than images": (lambda s: s["progress"].update(correct=5), "progress.correct is 5, but"),
    "a loss that is text": (lambda s: s["progress"].update(loss_sum="x"), "progress.loss_sum is 'x'"),
    "a missing key": (lambda s: s["progress"].pop("epoch"), "progress has no 'epoch'"),
    "an unknown key": (lambda s: s["progress"].update(more=1), "progress has an unknown key 'more'"),
    "an accuracy of 2": (lambda s: s["progress"].update(best_accuracy=2), "progress.best_accuracy is 2"),
    "no progress": (lambda s: s.pop("progress"), "there is no 'progress'"),
    "a list as progress": (lambda s: s.update(progress=[[[1]]]), "progress is a list of 1"),
    "no batches": (lambda s: s.update(batches=0), "batches is 0"),
    "batches that are true": (lambda s: s.update(batches=True), "batches is True"),
    "a huge offset of random numbers": (lambda s: s["random"].update(offset=2**64), "random.offset is"),
    "a negative seed": (lambda s: s["random"].update(seed=-5), "random.seed is -5"),
    "random as a number": (lambda s: s.update(random=0.5), "random is 0.5; expected a table"),
    "steps of the optimizer as text": (lambda s: s["optimizer"].update(steps="9"), "optimizer.steps is '9'"),
    "a layout that is a list": (lambda s: s.update(layout=[1]), "layout is a list of 1"),
    "options that are a table": (lambda s: s.update(config={}), "config is a table of 0"),
    "replicas without a rank": (lambda s: s.update(members={"x": {}}), "members key is 'x'; expected a rank"),
    "a counter below 0": (lambda s: of_method(s, {"begun": -1}), "members.0.method.begun is -1; expected a whole"),
    "a huge counter": (lambda s: of_method(s, {"begun": 2**60}), "members.0.method.begun is 11529"),
    "a number that is text": (lambda s: of_method(s, {"begun": "1"}), "members.0.method.begun is '1'"),
    "the vectors of an old version": (lambda s: of_method(s, [{"mass": [1.0]}, {}]), "method is a list of 2"),
    "a replica that is empty": (lambda s: s.update(members={"0": {}}), "members.0 has no 'progress'"),
    "nested lists": (lambda s: s.update(layout=json.loads("[" * 50 + "]" * 50)), "nested deeper than 32 levels"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_with_a_hostile_state(trainer: Trainer, tmp_path: Path, name: str) -> None:
    change, words = STATES[name]
    checkpoint = make_checkpoint(trainer)
    checkpoint.state = copy.deepcopy(checkpoint.state)
    change(checkpoint.state)
    files.save(tmp_path, 1, checkpoint)
    with pytest.raises(CheckpointError, match=words) as caught:
        files.load(files.folder_of(tmp_path, 1))
    assert "\n" not in str(caught.value)


def test_a_state_that_is_not_finite(trainer: Trainer, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(trainer)
    checkpoint.state["progress"]["seconds"] = float("nan")
    files.save(tmp_path, 1, checkpoint)
    with pytest.raises(CheckpointError, match="it contains NaN"):
        files.load(files.folder_of(tmp_path, 1))


@pytest.mark.parametrize(("change", "words"), [
    (lambda v: v.update(velocity=v["velocity"].astype(np.float64)), r"velocity is float64 \(32,\); expected float32"),
    (lambda v: v.update(velocity=v["velocity"][:3]), r"velocity is float32 \(3,\); expected float32 \(32,\)"),
    (lambda v: v.update(velocity=v["velocity"] + np.nan), "velocity holds values that are not finite"),
    (lambda v: v.update(other=v["velocity"]), "other: unknown to SGD"),
])  # fmt: skip
def test_a_checkpoint_with_hostile_vectors(trainer: Trainer, change: Change, words: str) -> None:
    checkpoint = make_checkpoint(trainer)
    checkpoint.vectors["velocity"] = np.zeros_like(trainer.engine.arena.theta)
    change(checkpoint.vectors)
    with pytest.raises(CheckpointError, match=words):
        restore(trainer, checkpoint)


@pytest.mark.parametrize(("change", "words"), [
    (lambda v: v.pop("0/theta"), "no vector 0/theta"),
    (lambda v: v.pop("0/communication"), "no vector 0/communication"),
    (lambda v: v.update({"0/communication": np.zeros(3)}), r"0/communication: statistics: 3 numbers"),
    (lambda v: v.update({"0/communication": v["0/communication"].astype(np.float32)}), "0/communication: float32"),
    (lambda v: v["0/communication"].fill(1e30), "0/communication: float64 .* of 0 to"),
    (lambda v: v["0/communication"].fill(-2), "0/communication: float64 .* of 0 to"),
    (lambda v: v["0/communication"].put(0, 99), "expected the statistics of this rank, found those of rank 99"),
    (lambda v: v["0/communication"].fill(np.nan), "0/communication holds values that are not finite"),
    (lambda v: v.update({"0/theta": v["0/theta"].reshape(1, -1)}), r"0/theta is float32 \(1, 32\)"),
])  # fmt: skip
def test_replicas_with_hostile_vectors(trainer: Trainer, change: Change, words: str) -> None:
    checkpoint = of_replicas(trainer)
    change(checkpoint.vectors)
    with pytest.raises(CheckpointError, match=words):
        restore(trainer, checkpoint)


@pytest.mark.parametrize("batch", [3, 4])
def test_a_batch_beyond_the_epoch(trainer: Trainer, batch: int) -> None:
    checkpoint = make_checkpoint(trainer)
    checkpoint.state["progress"]["batch"] = batch  # an epoch has 3
    with pytest.raises(CheckpointError, match=f"batch is {batch}, with 0 images; an epoch has 3 batches of 16"):
        restore(trainer, checkpoint)


def test_weights_and_options_that_are_not_valid(trainer: Trainer) -> None:
    checkpoint = make_checkpoint(trainer)
    next(iter(checkpoint.weights.values()))[:] = np.inf
    with pytest.raises(CheckpointError, match="holds values that are not finite"):
        restore(trainer, checkpoint)
    checkpoint = make_checkpoint(trainer)
    checkpoint.weights = {name: values.astype(float) + 1e300 for name, values in checkpoint.weights.items()}  # float64
    with pytest.raises(CheckpointError, match="holds values that are not finite"):
        restore(trainer, checkpoint)
    checkpoint = make_checkpoint(trainer)
    checkpoint.state["config"] = "a = ["
    with pytest.raises(CheckpointError, match="the options in the checkpoint are not valid"):
        restore(trainer, checkpoint)


def test_a_local_snapshot_of_another_replica(trainer: Trainer, tmp_path: Path) -> None:
    files.save(tmp_path, 1, make_checkpoint(trainer))
    checkpoint = files.load(files.folder_of(tmp_path, 1))
    folder = tmp_path / local_snapshots.FOLDER / "3"
    folder.mkdir(parents=True)
    files.save(folder, 0, of_replicas(trainer))  # a state of replica 0 in the folder of replica 3
    with pytest.raises(CheckpointError, match="expected the state of replica 3"):
        local_snapshots.add(tmp_path, checkpoint)


@pytest.mark.parametrize("content", [
    "[" * 100_000, '{"test_accuracy": "x"}', "9" * 5000, '{"test_accuracy": NaN}', '"\\ud800"',
    '{"test_accuracy": 0.5, "test_loss": 1, "epochs": 1, "steps": 1, "seconds": 1, "images_per_second": 1, "out": 3}',
    '{"test_accuracy": 0.5, "test_loss": 1, "epochs": 1, "steps": 1, "seconds": 1, "images_per_second": 1, "out": "x",'
    ' "workers": 2}',
])  # fmt: skip
def test_a_hostile_summary_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    assert result_of(tmp_path) is None


def test_hostile_lines_of_metrics_are_removed(tmp_path: Path) -> None:
    good = [json.dumps({"event": "step", "step": step, "epoch": 1, "loss": 0.5}) for step in (1, 2)]
    later = json.dumps({"event": "epoch", "step": 3, "epoch": 2})
    bad = ["[" * 100_000, "9" * 5000, '{"event": "step", "step": "1", "epoch": 1}', "[1]", "x" * 200_000, later]
    (tmp_path / "metrics.jsonl").write_text("\n".join([good[0], *bad, good[1]]))
    with RunFolder(tmp_path) as run:
        run.rewind(2, 1)
    assert run.metrics.read_text().splitlines() == good


# The ways to name a run, and runs that are too large for the machine.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*SMALL, "--epochs", "2", "--seed", "3", "--validation", "0.25", "--out", str(out)]) == 0
    return out


def test_load_takes_a_run_a_checkpoint_or_a_file(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "model.safetensors", tmp_path / "copied.safetensors")
    last = files.last(finished / "checkpoints")
    assert last
    for path in (finished, str(finished), last, tmp_path / "copied.safetensors"):
        model, standardise = minidl.load(path)
        assert standardise(np.zeros((2, 4, 4, 1))).shape == (2, 4, 4, 1) and not model.training
    with pytest.raises(CheckpointError, match=r"nothing does not exist; expected a run folder, a checkpoint or"):
        minidl.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty is incomplete: sha256sums.txt does not exist"):
        minidl.load(tmp_path / "empty")


def test_load_draws_nothing_from_the_generator(finished: Path) -> None:
    drawn = []
    for path in (None, finished):
        nn.seed(0)
        if path:
            minidl.load(path)
        drawn.append(nn.Linear(2, 2).weight.numpy().copy())
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_a_copied_file_is_evaluated_on_the_data_that_it_names(finished: Path, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    shutil.copy(finished / "model.safetensors", tmp_path / "copied.safetensors")
    expected = json.loads((finished / "summary.json").read_text())["test_accuracy"]
    assert main(["--evaluate", str(tmp_path / "copied.safetensors"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["test_accuracy"] == expected and result["model"] == "mlp"


def test_a_copied_file_that_was_trained_on_the_users_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.dumps({"__metadata__": {"model": "mlp", "data": "mine"}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    assert main(["--evaluate", str(tmp_path / "a.safetensors")]) == 2
    assert "was trained on a file 'mine': give --data with the path of this file" in capsys.readouterr().err


def test_too_many_workers_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(local, "ProcessGroup", lambda ranks: pytest.fail("processes were started"))
    cores = resources.cores()
    assert main([*SMALL, "--workers", "5000"]) == 2
    assert f"5000 workers on {cores} cores: expected at most {8 * cores}" in capsys.readouterr().err
    monkeypatch.setenv(local.OVERSUBSCRIBE, "1")
    monkeypatch.setattr(resources, "available", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"5000 workers need about 500 GB of memory, and 1 GB are free"):
        local.require_room(5000)
    local.require_room(10)


def test_a_simulation_that_does_not_fit_is_refused_before_it_begins(root: Path) -> None:
    for ranks, words in ((10**12, "expected a whole number between 1 and 65536"), (60_000, "need about")):
        command = [sys.executable, "-m", "minidl.simulate", *SMALL, "--ranks", str(ranks)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_the_time_of_a_simulation_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 2)
    assert forecast.duration(8, 100, 1e9) == ""
    assert forecast.duration(8, 1000, 2e9) == ", about 13 real minutes"
    assert forecast.duration(1000, 1000, 2e9) == ", about 28 real hours"


@pytest.mark.parametrize("size", [
    "9" * 5000 + "x1x1x1:1", "99999999x999x999x3:10", "١x1x1x1:1", "2x99999999999x99999x1:2",
])  # fmt: skip
def test_synthetic_images_that_do_not_fit(size: str) -> None:
    with pytest.raises(ConfigError, match=r"must read|does not fit into memory"):
        data.load(f"synthetic:{size}")


def test_features_need_an_mlp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    y = np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x_train=np.zeros((12, 5)), y_train=y, x_test=np.zeros((12, 5)), y_test=y)
    for model in ("lenet", "vgg", "resnet20"):
        with pytest.raises(MinidlError, match=f"model '{model}' needs images, .* 5 features .*use --model mlp"):
            minidl.models.build(model, data.load(tmp_path / "a.npz").input_shape, 3)


def test_progress_of_a_new_run_is_valid() -> None:
    from minidl.run.progress import Progress, progress
    from minidl.schema import LARGEST

    progress(LARGEST)(asdict(Progress()))
