"""The command line: which files it writes, and how it reports bad input."""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import data, schedules
from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.run import folder as run
from minidl.run.evaluation import evaluate
from minidl.run.trained import load
from minidl.train import main

SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--lr", "0.01"]
RESULT = {"test_accuracy", "test_loss", "train_loss", "epochs", "steps", "images_per_second", "seconds", "parameters",
          "out"}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIDL_DATA", raising=False)


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# The files of a run.


def test_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--epochs", "3", "--keep", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and set(json.loads(captured.out)) == RESULT
    assert captured.err.count("\nepoch ") == 3
    folder = tmp_path / "runs" / "synthetic_96x4x4x1_4-mlp-1"
    assert json.loads(captured.out) == json.loads((folder / "summary.json").read_text())
    assert json.loads(captured.out)["out"] == "runs/synthetic_96x4x4x1_4-mlp-1"
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "checkpoints", "config.toml", "history.jsonl", "metrics.jsonl", "model.safetensors",
        "summary.json"]  # fmt: skip
    assert files.steps(folder / "checkpoints") == [12, 18]
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["optimizer"]["sgd"] == {"momentum": 0.9} and config["training"]["epochs"] == 3
    assert "command" not in config and "gossip" not in config["method"]
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [6, 12, 18]
    assert entries[-1]["loss"] < entries[0]["loss"] and entries[-1]["accuracy"] > entries[0]["accuracy"]
    assert main([*SMALL, "--epochs", "1", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "mlp-2" in captured.out and captured.err == ""


def test_a_run_continues_if_minidl_data_is_set_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--epochs", "2", "--out", "run", "--quiet"]) == 0
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path))
    assert main(["--resume", "run", "--epochs", "3", "--json", "--quiet"]) == 0
    assert result(capsys)["epochs"] == 3
    assert main(["--evaluate", "run", "--json", "--quiet"]) == 0


def train_into(output: int) -> subprocess.CompletedProcess[bytes]:
    """Train in another process, whose standard output is this file."""
    options = [*SMALL, "--workers", "1", "--epochs", "1", "--quiet", "--no-report"]
    return subprocess.run([sys.executable, "-m", "minidl.train", *options], stdout=output, stderr=subprocess.PIPE)


def test_a_result_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = train_into(writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_result_that_cannot_be_printed_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = train_into(full.fileno())
    assert (done.returncode, done.stderr) == (2, b"minidl: error: cannot print the result: No space left on device\n")


def write_data(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.integers(256, size=(120, 4, 4, 1)).astype(np.uint8), np.arange(120) % 4
    np.savez(path, x_train=x[:96], y_train=y[:96], x_test=x[96:], y_test=y[96:])


def test_a_resume_notices_other_data_and_takes_a_file_that_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "mlp", "--batch-size", "16", "--out", "run", "--quiet"]
    write_data(tmp_path / "data.npz", 0)
    assert main(["--data", "data.npz", "--epochs", "1", *options]) == 0
    write_data(tmp_path / "data.npz", 1)
    assert main(["--resume", "run", "--epochs", "2"]) == 2
    assert re.search(r"the data set has changed: its mean was \[0\.\d+\], and is \[0\.", capsys.readouterr().err)
    (tmp_path / "data.npz").unlink()
    assert main(["--resume", "run", "--epochs", "2"]) == 2
    assert "/data.npz, the run's data set; if it has moved, give --data FILE.npz" in capsys.readouterr().err
    (tmp_path / "moved").mkdir()
    write_data(tmp_path / "moved" / "other.npz", 0)
    assert main(["--resume", "run", "--data", "moved/other.npz", "--epochs", "2", "--quiet"]) == 0
    assert main(["--resume", "run", "--epochs", "3", "--quiet"]) == 0  # config.toml names the new place
    options[-2] = "whole"
    assert main(["--data", "moved/other.npz", "--epochs", "3", *options]) == 0
    one, other = (tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in ("run", "whole"))
    assert one == other
    assert main(["--resume", "run", "--data", "digits", "--epochs", "4"]) == 2
    assert "--data cannot be given with --resume: the run keeps its data" in capsys.readouterr().err


def test_steps_instead_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "8", "--json"]) == 0
    told = result(capsys)
    assert told["steps"] == 8 and told["epochs"] == 2 and files.steps(Path(told["out"]) / "checkpoints") == [6, 8]


def test_every_hundredth_step_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--batch-size", "1", "--steps", "110", "--json"]) == 0
    lines = (Path(result(capsys)["out"]) / "metrics.jsonl").read_text().splitlines()
    assert [(entry["event"], entry["step"]) for entry in map(json.loads, lines)] == [
        ("epoch", 96), ("step", 100), ("epoch", 110)]  # fmt: skip


def test_best_is_chosen_on_validation_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--lr", "0.1", "--epochs", "6", "--keep", "1", "--validation", "0.3", "--json"]) == 0
    told = result(capsys)
    out = Path(told["out"])
    epochs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    best = max(epochs, key=lambda entry: (entry["validation_accuracy"], -entry["validation_loss"]))
    assert told["best_step"] == best["step"] and told["validation_accuracy"] == best["validation_accuracy"]
    assert files.steps(out / "checkpoints") == sorted({best["step"], epochs[-1]["step"]})
    for path in (out, out / "model.safetensors", out / "checkpoints" / f"step-{best['step']:08d}",
                 out / "checkpoints" / f"step-{best['step']:08d}" / "model.safetensors"):  # fmt: skip
        assert main(["--evaluate", str(path), "--json"]) == 0
        tested = result(capsys)
        assert (tested["test_accuracy"], tested["test_loss"]) == (told["test_accuracy"], told["test_loss"])


def test_results_do_not_depend_on_threads(capsys: pytest.CaptureFixture[str]) -> None:
    for threads in ("1", "2"):
        argv = ["--data", "synthetic:128x16x16x1:4", "--batch-size", "64", "--steps", "2", "--quiet"]
        assert main([*argv, "--threads", threads, "--out", threads]) == 0
    one, two = (next(Path(out).glob("checkpoints/*/model.safetensors")).read_bytes() for out in "12")
    assert one == two


def test_torch_and_minidl_load_each_others_weights(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert main([*SMALL, "--steps", "3", "--json"]) == 0
    told = result(capsys)
    relu, linear = torch.nn.ReLU(), torch.nn.Linear
    model = torch.nn.Sequential(torch.nn.Flatten(), linear(16, 512), relu, linear(512, 512), relu, linear(512, 4))
    model.load_state_dict(load_file(Path(told["out"]) / "checkpoints" / "step-00000003" / "model.safetensors"))
    dataset = data.load("synthetic:96x4x4x1:4")
    logits = model(torch.from_numpy(dataset.x_test.transpose(0, 3, 1, 2).copy()))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(dataset.y_test)).item()
    assert loss == pytest.approx(told["test_loss"], rel=1e-5)
    torch_file = Path("theirs.safetensors")
    pytest.importorskip("safetensors.torch").save_file(model.state_dict(), torch_file)
    assert main(["--evaluate", str(torch_file), *SMALL[:4], "--json"]) == 0
    assert result(capsys)["test_loss"] == pytest.approx(told["test_loss"], rel=1e-6)


# Bad input: one line, exit code 2, no data lost.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main([*SMALL, "--steps", "1", "--quiet", "--out", str(out)]) == 0
    return out


@pytest.fixture
def a_run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "bad.toml").write_text("modle = 'mlp'")
    (tmp_path / "bad.safetensors").write_bytes(bytes(100))
    (tmp_path / "bad.npz").write_bytes(b"PK")
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").touch()
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return tmp_path / "run"


@pytest.mark.parametrize(("argv", "message"), [
    ("--model lene", "Did you mean 'lenet'?"),
    ("--lrr 1", "Did you mean '--lr'?"),
    ("--config bad.toml", "Did you mean 'model'?"),
    ("--config none.toml", "'none.toml' does not exist"),
    ("--data bad.npz", "bad.npz"),
    ("--data none.npz", "none.npz"),
    ("--data synthetic:3", "synthetic:COUNT"),
    ("--data digits --warmup 99999", "warm-up of 99999 steps"),
    ("--data synthetic:96x2x2x1:4 --model vgg", "vgg"),
    ("--data synthetic:96x4x4x1:4 --model mlp --out run", "holds another run: --resume"),
    ("--data synthetic:96x4x4x1:4 --model mlp --out file", "--out file is a file: expected a folder"),
    ("--data synthetic:96x4x4x1:4 --model mlp --out file/run", "Not a directory"),
    ("--resume none", "the folder none does not exist"),
    ("--resume folder", "folder is not the folder of a run"),
    ("--resume run --lr 1", "--lr cannot be given with --resume"),
    ("--resume run --evaluate run", "give only one of"),
    ("--evaluate none", "none does not exist"),
    ("--evaluate folder", "incomplete"),
    ("--evaluate bad.safetensors", "not a safetensors file"),
    ("--evaluate run --model lenet", "--model cannot be given with --evaluate of a run"),
    ("--evaluate run/model.safetensors --seed 1", "--seed cannot be given with --evaluate of a run"),
    ("--evaluate run --config run/config.toml", "--config cannot be given with --evaluate of a run"),
    ("--evaluate run/checkpoints/step-00000001/model.safetensors --validation 0.1", "--validation cannot be given"),
    ("--evaluate file --model lenet", "not a safetensors file"),
    ("--resume empty", "empty/config.toml is incomplete: it lacks model, data"),
    ("--evaluate empty/model.safetensors", "empty/config.toml is incomplete"),
    ("--data synthetic:96x4x4x1:4 --model mlp --out folder", "folder/checkpoints exists, but folder is not the folder"),
    ("--evaluate run --data synthetic:96x5x5x1:4", "trained on data with input_shape [4 4 1]"),
])  # fmt: skip
def test_bad_input(a_run: Path, argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("minidl: error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert sorted(Path().rglob("*")) == before, "bad input leaves nothing behind"


def test_bad_input_of_a_real_process(root: Path) -> None:
    argv = [sys.executable, "-m", "minidl.train", "--model", "lene"]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("minidl: error: unknown model 'lene'") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_divergence_names_step_and_layer(model: str, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(schedules, "build", lambda *options: lambda step: 1.0 if step < 8 else 1e35)
    argv = [*SMALL, "--data", "synthetic:96x8x8x1:4", "--model", model, "--epochs", "5", "--out", "run", "--quiet"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidl: error: diverged in step 10: ") and error.count("\n") == 1
    assert "of layer '" in error and "--lr" in error and "--clip 1" in error
    assert files.steps(Path("run/checkpoints")) == [6]
    kept = files.load(Path("run/checkpoints/step-00000006"))
    assert all(np.isfinite(values).all() for values in kept.weights.values())


def test_weights_that_are_not_finite_are_never_saved(monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(schedules, "build", lambda *options: lambda step: 1.0 if step < 11 else float("inf"))
    assert main([*SMALL, "--epochs", "2", "--out", "run", "--quiet"]) == 2
    assert "not finite" in capsys.readouterr().err
    assert files.steps(Path("run/checkpoints")) == [6]


@pytest.mark.parametrize("refused", ["metrics.jsonl", "state.safetensors"])
def test_full_disk(refused: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import builtins

    real, times = builtins.open, iter(range(100))

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith(refused) and next(times) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", opened)
        assert main([*SMALL, "--epochs", "4", "--out", "run", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidl: error: ") and "No space left on device" in error and error.count("\n") == 1
    assert ("metrics.jsonl" if refused == "metrics.jsonl" else "checkpoints/step-") in error
    assert "--resume" in error
    # The third epoch is lost only if its checkpoint is the file that cannot be written.
    assert files.steps(Path("run/checkpoints")) == ([12, 18] if refused == "metrics.jsonl" else [6, 12])
    assert main(["--resume", "run", "--json"]) == 0
    assert result(capsys)["steps"] == 24


def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Simulate a full disk: writing a new version of a file writes three bytes and fails."""
    real = builtins.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if Path(str(path)).name == f".{name}.new" and mode == "wb":
            with real(path, mode) as file:
                file.write(b"abc")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, mode, *arguments, **named)

    monkeypatch.setattr(builtins, "open", opened)


@pytest.mark.parametrize("out", [["--out", "new"], ["--out", "folder"], []])
def test_full_disk_at_the_beginning_leaves_no_run(out: list[str], monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    Path("folder").mkdir()
    Path("runs").mkdir()
    before = sorted(Path().rglob("*"))
    with monkeypatch.context() as patch:
        refusing(patch, "config.toml")
        assert main([*SMALL, *out, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "config.toml: No space left on device" in error and error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    assert main([*SMALL, *out, "--steps", "1", "--quiet"]) == 0, "the folder is free for the next run"


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json"])
def test_full_disk_at_the_end(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        refusing(patch, name)
        assert main([*SMALL, "--steps", "3", "--out", "run", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert f"cannot write run/{name}: No space left on device" in error and "--resume run" in error
    assert not [path for path in Path("run").iterdir() if path.name.startswith(".")]
    assert main(["--resume", "run", "--json"]) == 0 and result(capsys)["steps"] == 3


def test_the_name_of_a_folder_does_not_change_its_config() -> None:
    assert main([*SMALL, "--steps", "1", "--quiet", "--out", "a\nlr = 1 b"]) == 0
    assert main(["--config", "a\nlr = 1 b/config.toml", "--quiet"]) == 0


def test_more_threads_than_cores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "1", "--threads", "4096"]) == 0
    assert "minidl: --threads 4096 is more than there are cores: using " in capsys.readouterr().err
    assert main([*SMALL, "--steps", "1", "--threads", "1"]) == 0
    assert "--threads" not in capsys.readouterr().err


def test_weights_are_checked_against_their_checksums(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_run / "checkpoints" / "step-00000001" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert main(["--evaluate", str(file)]) == 2
    assert "is damaged: sha256sums.txt" in capsys.readouterr().err


def test_folders_of_runs_are_never_shared(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from minidl.run.config import Config

    def create(number: int) -> Path:
        with run.RunFolder.create(Config()) as created:
            return created.folder

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(24)))) == 24


# Later use of the weights.


def test_weights_for_new_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--epochs", "3", "--out", "run", "--json"]) == 0
    told = result(capsys)
    last = files.last(Path("run/checkpoints"))
    assert last and (last / files.MODEL).read_bytes() == Path("run/model.safetensors").read_bytes()
    model, standardise = load("run/model.safetensors")
    dataset = data.load("synthetic:96x4x4x1:4")
    images = dataset.x_test.astype(np.float64) * dataset.std + dataset.mean  # as stored in the data set's file
    np.testing.assert_allclose(standardise(images), dataset.x_test, atol=1e-5)
    assert not model.training
    assert evaluate(model, standardise(images), dataset.y_test).accuracy == told["test_accuracy"]
    metadata = files.header(Path("run/model.safetensors")).metadata
    assert metadata["format"] == "pt" and metadata["model"] == "mlp" and metadata["input_shape"] == "[4, 4, 1]"
    files.save(Path(), 1, files.Checkpoint(model.state_dict(), {}, {}))
    with pytest.raises(CheckpointError, match="does not name its model"):
        load(f"step-00000001/{files.MODEL}")
