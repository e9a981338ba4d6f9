"""Models from a user's file: `--model my_net.py:build`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401  # a fixture that cleans up after mpiexec

import minidl
from minidl import data, simulate
from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.run.config import resolve
from minidl.train import main

DATA = ["--data", "synthetic:96x4x4x1:4"]
SMALL = [*DATA, "--batch-size", "16", "--quiet"]
FILE = """
from minidl import nn

def build(input_shape, classes):
    height, width, channels = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, 8), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(8, classes))

def more(input_shape, classes):
    return build(input_shape, classes + 1)

def smaller(input_shape, classes):
    return build((2, 2, 1), classes)

def nothing(input_shape, classes):
    print("built", end="")

def empty(input_shape, classes):
    return nn.Flatten()

def double(input_shape, classes):
    return build(input_shape, classes).astype("float64")

def one(input_shape):
    return build(input_shape, 4)

def leaves(input_shape, classes):
    raise SystemExit("no GPU found")

def pair(input_shape, classes):
    class Pair(nn.Sequential):
        def forward(self, x):
            return super().forward(x), x
    return Pair(build(input_shape, classes))

number = 3
"""
OTHER = """
import json
from dataclasses import dataclass
from minidl import nn
from my_own_layers import layer

@dataclass
class Size:
    n: int

def f(input_shape, classes):
    return nn.Sequential(nn.Flatten(), layer(Size(16).n, classes))
"""
PLANTED = "from pathlib import Path\nPath({marker!r}).touch()\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # minidl adds the folder of the file
    Path("my_net.py").write_text(FILE)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Path:
    assert main([*SMALL, "--model", "my_net.py:build", "--epochs", "2", "--out", "run", "--workers", "1"]) == 0
    capsys.readouterr()
    return Path("run")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], program: Any = main) -> str:
    assert program(argv) == 2
    out, error = capsys.readouterr()
    assert error.startswith("minidl: error: ") and error.count("\n") == 1 and not out.replace("built", "")
    return error


def weights(folder: str | Path) -> bytes:
    return b"".join(values.tobytes() for values in files.header(Path(folder) / files.MODEL).values().values())


# Errors.


@pytest.mark.parametrize(("model", "words"), [
    ("no.py:build", "no.py' does not exist"),
    (".py:build", "'.py:build' is not of the form FILE.py:FUNCTION"),
    ("my_net.py", "'my_net.py' is not of the form FILE.py:FUNCTION, such as my_net.py:build\n"),
    ("my_net.py:", "'my_net.py:' is not of the form FILE.py:FUNCTION"),
    ("my_net.py:1", "'my_net.py:1' is not of the form FILE.py:FUNCTION"),
    ("folder.py:build", "folder.py': it is a folder"),
    ("my_net.py:bild", "my_net.py has no function 'bild'; expected bild(input_shape, classes), which returns an "
                       "nn.Module. Did you mean 'build'?"),
    ("my_net.py:zzz", "It has build, more,"),
    ("my_net.py:number", "my_net.py: number is 3; expected a function of (input_shape, classes)"),
    ("my_net.py:nothing", "nothing((4, 4, 1), 4) returned None; expected an nn.Module"),
    ("my_net.py:more", "returned a model whose output for 2 images is (2, 5); expected (2, 4), a value for each class"),
    ("my_net.py:pair", "whose output for 2 images is a tuple; expected (2, 4)"),
    ("my_net.py:smaller", "returned a model that refuses its images: layer 1, Linear(4, 8): linear: input (2, 16)"),
    ("my_net.py:empty", "returned a model with no parameters; expected float32 parameters"),
    ("my_net.py:double", "returned a model with float64 parameters; expected float32 parameters"),
    ("my_net.py:one", "one((4, 4, 1), 4): TypeError: one() takes 1 positional argument but 2 were given"),
    ("my_net.py:leaves", "leaves((4, 4, 1), 4): line 28: SystemExit: no GPU found"),
    ("broken.py:build", "broken.py cannot be imported: line 2: ModuleNotFoundError: No module named 'torchvision_'"),
    ("typo.py:build", "typo.py cannot be imported: line 1: SyntaxError: "),
    ("bytes.py:build", "bytes.py cannot be imported: SyntaxError: "),
])  # fmt: skip
def test_a_model_that_cannot_be_built(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.py").mkdir()
    Path("broken.py").write_text("\nimport torchvision_\n")
    Path("typo.py").write_text("def build(:\n")
    Path("bytes.py").write_bytes(b"\xff\x00")
    assert words in refused([*SMALL, "--model", model, "--out", "run", "--workers", "1"], capsys)
    assert not Path("run").exists() and not list(Path().rglob("__pycache__"))


def test_a_hash_is_only_for_files(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused([*SMALL, "--model", "mlp", "--model-hash", "0" * 8], capsys)
    assert "model-hash has an effect only with model FILE.py:FUNCTION, and model is 'mlp'" in error
    error = refused([*SMALL, "--model", "my_net.py:build", "--model-hash", "abc"], capsys)
    assert "unknown model-hash 'abc'. Known: any, HASH" in error
    error = refused([*SMALL, "--model", "my_net.py:build", "--model-hash", "0" * 8], capsys)
    assert "--model-hash 00000000: " in error and "my_net.py has another SHA-256" in error


# What works.


def test_a_run_records_the_file(run: Path, tmp_path: Path) -> None:
    table = tomllib.loads((run / "config.toml").read_text())["model"]
    about = files.header(run / files.MODEL).metadata
    assert table["model"] == about["model"] == f"{tmp_path}/my_net.py:build"
    assert table["model_hash"] == about["model_hash"] and len(table["model_hash"]) == 64
    assert table["own"] == {"conv": "auto"}
    assert main([*SMALL, "--model", "my_net.py:build", "--steps", "1", "--workers", "1"]) == 0
    assert (tmp_path / "runs" / "synthetic_96x4x4x1_4-my_net-1").is_dir()


def test_an_unknown_model_has_the_default_options() -> None:
    own, lenet = resolve({"model": "a/my_net.py:build"}), resolve({"model": "lenet"})
    assert (own.lr, own.schedule, own.epochs, own.conv) == (lenet.lr, lenet.schedule, lenet.epochs, "auto")
    file = {"model": "a.py:f", "lr": 0.3, "model_hash": "0" * 64}
    assert resolve(file, {"model": "b.py:f"}).lr == 0.3, "the options of one file also suit another"
    assert resolve(file, {"model": "b.py:f"}).model_hash == "any"
    assert resolve({"model": "vgg", "lr": 0.3}, {"model": "b.py:f"}).lr != 0.3


def test_files_next_to_the_file_can_be_imported() -> None:
    Path("my_own_layers.py").write_text("from minidl import nn\nlayer = nn.Linear\n")
    Path("json.py").write_text("raise ImportError('a file next to it hides a module of Python')\n")
    Path("other.py").write_text(OTHER)
    assert main([*SMALL, "--model", "other.py:f", "--steps", "2", "--workers", "1"]) == 0
    sys.modules.pop("my_own_layers")


def test_a_stopped_run_is_resumed_with_the_same_bits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, "stopped")
    for name in ("summary.json", "model.safetensors", "checkpoints/step-00000012"):
        path = Path("stopped") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("elsewhere").mkdir()
    Path("my_net.py").rename("elsewhere/my_net.py")  # the file may be moved
    assert main(["--resume", "stopped", "--model", "elsewhere/my_net.py:build", "--quiet"]) == 0
    assert weights("stopped") == weights(run)
    assert "elsewhere/my_net.py" in Path("stopped/config.toml").read_text()
    assert main(["--evaluate", "stopped", "--model", "elsewhere/my_net.py:build", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["test_accuracy"] == json.loads((run / "summary.json").read_text())["test_accuracy"]


def test_a_signal_tells_the_command_that_continues(run: Path) -> None:
    from minidl.run.folder import resuming

    assert resuming("a b", "/x y/my_net.py:build").endswith("--resume 'a b' --model '/x y/my_net.py:build'")
    assert resuming("a", "lenet") == "python -m minidl.train --resume a"


def test_a_changed_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_net.py").write_text(FILE + "# a comment\n")
    for option in ("--evaluate", "--resume"):
        argv = [option, "run", "--model", "my_net.py:build", "--quiet"]
        error = refused(argv, capsys)
        assert "my_net.py has changed since the run began: its SHA-256 begins with " in error
        new = error.split("--model-hash ")[1].split()[0]
        assert "has another SHA-256" in refused([*argv, "--model-hash", "12345678"], capsys)
        assert main([*argv, "--model-hash", new, *(["--epochs", "3"] if option == "--resume" else [])]) == 0
        capsys.readouterr()
    assert new in (run / "config.toml").read_text(), "the run has recorded the new hash"


def test_another_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.py").write_text(FILE + "# a comment\n")
    error = refused(["--resume", "run", "--model", "other.py:build"], capsys)
    assert "the run was begun with 'my_net.py', and " in error and "/other.py is another file: give --model" in error


def test_minidl_load_fills_a_model_of_a_file(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"from a file, 'my_net.py:build': build the model, and give it to"):
        minidl.load(run)
    model = minidl.nn.Sequential(*(minidl.nn.Flatten(), minidl.nn.Linear(16, 8), minidl.nn.ReLU(),
                                   minidl.nn.Dropout(0.2), minidl.nn.Linear(8, 4)))  # fmt: skip
    filled, standardise = minidl.load(run, model)
    loaded = data.load(DATA[1])
    images = loaded.x_test * loaded.std + loaded.mean
    score = minidl.evaluate(model, standardise(images), loaded.y_test)
    assert filled is model and model.training
    assert score.accuracy == json.loads((run / "summary.json").read_text())["test_accuracy"]


# Nothing that a file names is imported.


def test_files_that_a_run_folder_names_are_not_imported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = Path("imported").absolute()
    Path("my_net.py").write_text(PLANTED.format(marker=str(marker)) + FILE)
    shutil.copy(run / files.MODEL, "copied.safetensors")
    config = str(run / "config.toml")
    for argv in (["--resume", "run"], ["--evaluate", "run"], ["--evaluate", "copied.safetensors", *DATA],
                 ["--config", config], ["--resume", "run", "--epochs", "5"],
                 ["--evaluate", "run/checkpoints/step-00000012"]):  # fmt: skip
        error = refused([*argv, "--quiet"], capsys)
        assert "from a file, 'my_net.py:build', and a file is imported only if the command line names it" in error
        assert "--model FOLDER/my_net.py:build" in error
    refused(["--config", config, "--quiet"], capsys, simulate.main)
    refused(["--config", config, "--quiet", "--measure", "--cluster", "uniform"], capsys, simulate.main)
    for path in ("run", "copied.safetensors"):
        with pytest.raises(CheckpointError):
            minidl.load(path)
    assert main([*SMALL, "--model", "mlp", "--steps", "1", "--out", "other", "--workers", "1"]) == 0
    capsys.readouterr()
    assert "another model?" in refused([*SMALL, "--model", "mlp", "--init", "run", "--workers", "1"], capsys)
    for option in ("--resume", "--evaluate"):  # the path on the command line counts, not the one in the run
        Path("good.py").write_text(FILE)
        assert main([option, "run", "--model", "good.py:build", "--quiet"]) == 0
    assert main(["--config", config, "--model", "good.py:build", "--out", "third", "--quiet"]) == 0
    assert main(["--config", config, "--model", "lenet", "--steps", "1", "--out", "fourth", "--quiet"]) == 0
    assert not marker.exists()


def test_a_run_of_a_named_model_takes_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--model", "mlp", "--steps", "1", "--out", "other", "--workers", "1"]) == 0
    capsys.readouterr()
    text = Path("other/config.toml").read_text().replace('"mlp"', '"my_net.py:build"')
    for command in ("--resume", "--evaluate of a run"):
        error = refused([command.split()[0], "other", "--model", "my_net.py:build"], capsys)
        assert f"--model cannot be given with {command}: the run keeps its model, 'mlp'" in error
    Path("other/config.toml").write_text(text)  # it lacks the hash
    error = refused(["--resume", "other", "--model", "my_net.py:build"], capsys)
    assert "config.toml is incomplete: it lacks model_hash" in error


# Several workers.


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "minidl.train", *argv]


def test_several_workers_train_it_and_continue(tmp_path: Path) -> None:
    def launched(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*argv), capture_output=True, text=True, timeout=300, env=environment())

    done = launched(*SMALL, "--model", "my_net.py:build", "--workers", "2", "--epochs", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    done = launched("--resume", "run", "--model", "my_net.py:build", "--epochs", "4", "--quiet", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["epochs"], told["workers"], told["consensus_distance"]) == (0, 4, 2, 0.0)
    done = launched(*SMALL, "--model", "my_net.py:more", "--workers", "2")
    assert done.returncode == 2 and "expected (2, 4), a value for each class" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_under_mpiexec_all_ranks_must_have_the_same_file() -> None:
    Path("same.py").write_text(FILE + "# a comment: the layout is the same\n")
    argv = [*SMALL, "--epochs", "2", "--out", "run"]

    def launched(*models: str) -> subprocess.CompletedProcess[str]:
        parts = [["-n", "1", *command(*argv, "--model", model)] for model in models]
        line = [*mpiexec(), *parts[0], *(word for part in parts[1:] for word in (":", *part))]
        return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment())

    done = launched("my_net.py:build", "same.py:build")
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl: error:")]
    assert done.returncode and len(lines) == 1 and not Path("run").exists(), done.stderr
    assert f"--model is {os.getcwd()}/same.py:build on rank 1, and {os.getcwd()}/my_net.py:build on" in lines[0]
    done = launched("my_net.py:build", "my_net.py:build")
    assert done.returncode == 0, done.stderr


def test_a_simulation_trains_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--model", "my_net.py:build", "--ranks", "3", "--steps", "4", "--json"]
    assert simulate.main([*options, "--out", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    error = refused([*options[:-1], "--model", "my_net.py:more"], capsys, simulate.main)
    assert "expected (2, 4), a value for each class" in error
