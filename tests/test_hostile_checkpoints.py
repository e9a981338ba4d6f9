"""Checkpoints with right checksums whose state does not fit the run, and files of a run that are of the wrong size."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minidl
from minidl.errors import CheckpointError, MinidlError
from minidl.run import checkpoint as files
from minidl.run.folder import RunFolder, result_of
from minidl.run.signals import Stopped
from minidl.train import main

SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--quiet", "--lr", "0.01"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 3 epochs that was stopped at the end of the second: 5 batches of 16 in each."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    assert main([*SMALL, "--epochs", "3", "--validation", "0.17", "--out", str(out)]) == 0
    shutil.rmtree(files.folder_of(out / "checkpoints", 15))
    (out / "summary.json").unlink()
    return out


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def change(run: Path, edit: Callable[[dict[str, Any]], Any], step: int = 10) -> None:
    """Edit the state of the last checkpoint, and save it with valid checksums. step: for the name of the new folder."""
    checkpoint = files.load(files.folder_of(run / "checkpoints", 10))
    state = copy.deepcopy(checkpoint.state)
    edit(state)
    checkpoint.state = state
    shutil.rmtree(files.folder_of(run / "checkpoints", 10))
    files.save(run / "checkpoints", step, checkpoint)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line that must be refused within 10 s. Return its error, which must be one line."""
    began = time.monotonic()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert time.monotonic() - began < 10 and out == "" and err.startswith("minidl: error: ") and err.count("\n") == 1
    return err


PROGRESS = [
    ({"step": 9}, "is damaged: it contains the state of step 9"),
    ({"epoch": 10**15}, "progress.epoch is 1000000000000000; expected a whole number from 0 to"),
    ({"epoch": 1}, "progress counts 10 steps, but 1 epochs of 5 batches and 0 more batches"),
    ({"batch": 3}, "progress counts 10 steps, but 2 epochs of 5 batches and 3 more"),
    ({"shift": 5}, "progress counts 5 steps, but"),
    ({"shift": -(2**53)}, "progress.shift is -9007199254740992"),
    ({"images": 10**9}, "progress.batch is 0, with 1000000000 images"),
    ({"seconds": 1e308}, "progress.seconds is 1e+308"),
    ({"seconds": 2.0**50}, "progress.seconds is 1125899906842624.0; expected a finite number from 0 to"),
    ({"timed_seconds": 1e-320}, "progress.timed_images is"),
    ({"timed_images": 2**53 - 1}, "progress.timed_images is"),
    ({"train_loss": 1e308}, "progress.train_loss is 1e+308"),
    ({"loss_sum": 1e300}, "progress.loss_sum is 1e+300 over 0 images"),
    ({"best_step": 2**53}, "progress.best_step is 9007199254740992"),
]


@pytest.mark.parametrize(("values", "words"), PROGRESS)
def test_a_progress_that_does_not_fit_the_run(
    run: Path, values: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, lambda state: state["progress"].update(values))
    error = refused(["--resume", str(run)], capsys)
    assert words in error and error.count(str(run)) == 1


@pytest.mark.parametrize(("name", "value", "words"), [
    ("optimizer", {"steps": 2**53}, "optimizer.steps is 9007199254740992; expected a whole number from 0 to"),
    ("random", {"seed": 0, "offset": 2**53 - 1}, "random.offset is 9007199254740991"),
    ("batches", 1, "progress counts 10 steps, but 2 epochs of 1 batches"),
])  # fmt: skip
def test_counters_that_the_rest_of_the_run_would_exceed(
    run: Path, name: str, value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, lambda state: state.update({name: value}))
    assert words in refused(["--resume", str(run)], capsys)


def test_another_number_of_batches_means_other_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["batches"] = 4
        state["progress"]["epoch"], state["progress"]["batch"] = 2, 2
        state["progress"]["images"] = 32

    change(run, edit)
    assert "an epoch had 4 batches, and now has 5" in refused(["--resume", str(run)], capsys)


def test_a_folder_with_the_name_of_another_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, lambda state: None, step=12)
    assert "step-00000012 is damaged: it contains the state of step 10" in refused(["--resume", str(run)], capsys)


def test_the_best_checkpoint_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, lambda state: state["progress"].update(best_step=4, best_accuracy=1.0))
    assert "step-00000004, is missing: name another one" in refused(["--evaluate", str(run)], capsys)
    command = ["--resume", str(run), "--threads", "1"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "the best checkpoint, of step 4, is missing: later ones replace it" in err
    assert "weights of step 15, the best on the validation images" in out


@pytest.mark.parametrize("name", ["step-99999999999999999999", "step-000000012", "step-٠٠٠٠٠٠٠٠", "step-٩٩٩٩٩٩٩٩"])
def test_other_names_are_no_checkpoints(run: Path, name: str) -> None:
    shutil.copytree(files.folder_of(run / "checkpoints", 10), run / "checkpoints" / name)
    (run / "checkpoints" / "step-99999999").touch()  # a file, not a folder
    assert files.steps(run / "checkpoints")[-1] == 10


def test_checkpoints_that_are_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    assert "run/checkpoints: it is not a folder" in refused(["--resume", str(run)], capsys)


# Sizes.


def test_the_size_is_checked_before_the_checksum(run: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    last = files.folder_of(run / "checkpoints", 10)
    os.truncate(last / files.MODEL, 40 << 30)
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *_: pytest.fail("40 GB are hashed"))
    error = refused(["--resume", str(run)], capsys)
    assert "model.safetensors: it is damaged, or not a safetensors file: its arrays take" in error


def test_a_journal_has_a_limit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "metrics.jsonl", 30 << 30)
    assert "metrics.jsonl: it has 32,212,254,720 bytes; expected at most" in refused(["--resume", str(run)], capsys)
    assert (run / "metrics.jsonl").stat().st_size == 30 << 30


def test_a_header_is_parsed_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    real = files.safetensors_header
    monkeypatch.setattr(files, "safetensors_header", lambda file: parsed.append(file) or real(file))
    minidl.load(run / "model.safetensors")
    assert len(parsed) == 1
    parsed.clear()
    files.load(files.folder_of(run / "checkpoints", 10))
    assert len(parsed) == 2  # the model's and the state's


def test_arrays_that_the_model_does_not_have_are_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (run / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header |= {f"e{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(500)}
    text = json.dumps(header).encode()
    (run / "many.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    monkeypatch.setattr(files, "_array", lambda *_: pytest.fail("an array is read"))
    with pytest.raises(CheckpointError, match="e0 is unknown to this model"):
        minidl.load(run / "many.safetensors")


@pytest.mark.parametrize(("shape", "words"), [
    ([1] * 40, r"it is damaged.*: w has a shape of 40 axes"), ([0, 2**50], "w has the shape .* one axis is empty"),
])  # fmt: skip
def test_a_shape_that_numpy_cannot_represent(tmp_path: Path, shape: list[int], words: str) -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match=words):
        files.header(tmp_path / "w.safetensors")


# The summary of a run, and what is printed.


@pytest.mark.parametrize("change", [
    {"test_accuracy": 2}, {"test_accuracy": -0.1}, {"test_loss": 1e300}, {"seconds": 1e300}, {"images_per_second": -1},
    {"workers": 2, "replicas_alive": 2, "messages": 1, "accuracy_best": 3, "accuracy_worst": 0, "consensus_distance": 0,
     "bytes_sent": 0, "wait_fraction": 0, "method": "gossip"},
])  # fmt: skip
def test_a_summary_has_limits(tmp_path: Path, change: dict[str, Any]) -> None:
    good = {"test_accuracy": 0.5, "test_loss": 1, "epochs": 1, "steps": 1, "seconds": 1, "images_per_second": 1,
            "out": "x\x1b[31m"}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(good))
    assert result_of(tmp_path) == good | {"out": str(tmp_path)}  # `out` becomes the folder where the summary is now
    (tmp_path / "summary.json").write_text(json.dumps(good | change))
    assert result_of(tmp_path) is None


def test_control_characters_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a\x1b[31m\nb"
    assert main([*SMALL[:-3], "--epochs", "1", "--out", str(out)]) == 0
    assert main(["--resume", str(out)]) == 0
    out_text, err_text = capsys.readouterr()
    assert "\x1b" not in out_text + err_text
    assert out_text.count("\\x1b[31m\\nb") == 2 and "\\x1b[31m\\nb finished on" in err_text


def test_a_signal_while_a_run_is_read(run: Path) -> None:
    code = "import os, sys\nfrom minidl.run import folder\nfrom minidl.train import main\n"
    code += "folder.read_toml = lambda path: os.kill(os.getpid(), 15)\nmain(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, "--resume", str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == (f"minidl: stopped before the run continued; to continue: python -m minidl.train "
                           f"--resume {run}\n")  # fmt: skip
    assert Stopped(signal.SIGTERM).message == "stopped"


@pytest.mark.parametrize(("out", "words"), [
    ("/proc/x", "cannot create the run folder /proc/x: No such file or directory: give another --out"),
    ("a" * 300, "File name too long: give another --out"),
    ("file/x", "cannot create the run folder file/x: Not a directory"),
])  # fmt: skip
def test_a_folder_that_cannot_be_created(
    out: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert words in refused([*SMALL, "--out", out], capsys)


# Extreme inputs, options that do not fit the data, and the class of an error.


@pytest.mark.parametrize("scale", [1e38, 1e-38])
def test_a_model_that_was_trained_on_extreme_inputs_is_loaded(tmp_path: Path, scale: float) -> None:
    x = np.random.default_rng(0).random((20, 4, 4, 1)).astype(np.float32) * np.float32(scale)
    y = np.arange(20) % 4
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    argv = ["--data", str(tmp_path / "a.npz"), "--model", "mlp", "--epochs", "1", "--quiet"]
    assert main([*argv, "--workers", "1", "--out", str(tmp_path / "run")]) == 0
    model, standardise = minidl.load(tmp_path / "run")
    assert minidl.predict(model, standardise(x)).shape == (20, 4)


@pytest.mark.parametrize("name", ["augment", "layout"])
def test_options_of_images_with_features(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((20, 5), np.float32), np.arange(20) % 4
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    value = {"augment": "flip", "layout": "channels-first"}[name]
    error = refused(["--data", str(tmp_path / "a.npz"), "--model", "mlp", f"--{name}", value], capsys)
    assert f"{name} has an effect only on images" in error


def test_the_error_is_one_of_minidl(run: Path) -> None:
    with pytest.raises(MinidlError, match="it is a folder"), RunFolder(run) as opened:
        opened.metrics.unlink()
        opened.metrics.mkdir()
        opened.rewind(1, 1)
