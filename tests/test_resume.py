"""A run that is stopped at any step and resumed is bit-identical to a run that is never stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import data, nn
from minidl.data import Dataset
from minidl.engine.tensor import Tensor
from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.run.config import Config
from minidl.run.signals import Signals, Stopped
from minidl.train import main
from minidl.training.resume import make_checkpoint, restore
from minidl.training.trainer import Trainer

DATA = "synthetic:44x4x4x1:3"
CLOCK = ("seconds", "timed_images", "timed_seconds")  # fields of Progress that differ from run to run
MEASURED = {"images_per_second": 0, "seconds": 0}  # values of an entry that differ from run to run
SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--quiet", "--lr", "0.01"]


class Model(nn.Module):
    """A model with every kind of state: weights, batch norm's running statistics, and dropout's random numbers."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.3)
        self.flatten_ = nn.Flatten()
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.flatten_(self.norm(self.conv(x)))))


CONFIG = Config(model="lenet", data=DATA, epochs=3, batch_size=8, lr=0.05, schedule="one-cycle", warmup=2, clip=1.0,
                augment=("pad-crop", "flip"), label_smoothing=0.1, validation=0.25, seed=5)  # fmt: skip


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return data.load(DATA, validation=0.25, seed=5)


def trainer(dataset: Dataset, config: Config, **more: Any) -> Trainer:
    nn.seed(config.seed)
    return Trainer(Model(), dataset, config, **more)


def bits(of: Trainer) -> dict[str, Any]:
    """Return everything that must agree: weights, statistics, optimizer, dropout, and progress except the clock."""
    checkpoint = make_checkpoint(of)
    arrays = {**checkpoint.weights, **{"vector " + name: v for name, v in checkpoint.vectors.items()}}
    progress = {name: value for name, value in asdict(of.progress).items() if name not in CLOCK}
    return {**{name: array.tobytes() for name, array in arrays.items()}, **progress, **checkpoint.state["random"]}


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw", "lars", "muon"])
def test_stopped_at_every_step(dataset: Dataset, tmp_path: Path, optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer, steps=0 if optimizer == "adamw" else 13)
    if optimizer == "muon":
        config = replace(config, lookahead=3, normalise=True, augment=("translate", "alternating-flip"))
    whole = trainer(dataset, config)
    entries = [dict(entry, **MEASURED) for entry in whole.run()]
    expected = bits(whole)
    first = trainer(dataset, config)
    files.save(tmp_path, 0, make_checkpoint(first))
    for stop, _ in enumerate(first.run(), 1):
        files.save(tmp_path, stop, make_checkpoint(first))
    assert bits(first) == expected, "a checkpoint changes nothing"
    for stop in range(len(entries) + 1):
        second = trainer(dataset, config)
        nn.seed(99)  # another process has another random state
        restore(second, files.load(files.folder_of(tmp_path, stop)))
        after = [dict(entry, **MEASURED) for entry in second.run()]
        assert after == entries[stop:], f"stopped after entry {stop}"
        assert bits(second) == expected, f"stopped after entry {stop}"


def test_stopped_while_validating(dataset: Dataset) -> None:
    whole = trainer(dataset, CONFIG)
    entries = [entry["step"] for entry in whole.run()]
    calls = iter(range(10**6))
    steps = len(whole.sampler)

    def check() -> None:
        if next(calls) == steps:  # `check` is called before each step, then for each validation batch
            raise Stopped(signal.SIGINT)

    first = trainer(dataset, CONFIG, check=check)
    with pytest.raises(Stopped):
        list(first.run())
    assert first.progress.batch == steps and first.progress.epoch == 0
    checkpoint = make_checkpoint(first)
    second = trainer(dataset, CONFIG)
    restore(second, checkpoint)
    assert [entry["step"] for entry in second.run()] == entries[steps:]
    assert bits(second) == bits(whole)


def test_checkpoint_of_another_run(dataset: Dataset, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(trainer(dataset, CONFIG))
    with pytest.raises(CheckpointError, match=r"made with lr = 0\.05, not 0\.1"):
        restore(trainer(dataset, replace(CONFIG, lr=0.1)), checkpoint)
    restore(trainer(dataset, replace(CONFIG, keep=9, threads=1)), checkpoint)
    checkpoint.state["layout"] = "other"
    with pytest.raises(CheckpointError, match="another layout"):
        restore(trainer(dataset, CONFIG), checkpoint)
    del checkpoint.state["random"]
    files.save(tmp_path, 1, checkpoint)
    with pytest.raises(CheckpointError, match=r"another version.*'random'"):
        files.load(files.folder_of(tmp_path, 1))


# The command line.


def weights(run: Path) -> bytes:
    last = files.last(run / "checkpoints")
    assert last
    return (last / files.MODEL).read_bytes()


def entries(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | MEASURED for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*SMALL, "--epochs", "4", "--validation", "0.2", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("stop", [1, 2, 6, 8, 20, 21, 22, 25])  # check 0 comes before the run begins
def test_stopped_and_resumed(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int,
                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    calls = iter(range(10**6))

    def check(self: Signals) -> None:
        if next(calls) == stop:
            raise Stopped(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Signals, "check", check)
        assert main([*SMALL, "--epochs", "4", "--validation", "0.2", "--out", str(tmp_path / "run")]) == 143
    assert capsys.readouterr().err == f"minidl: saved; to continue: python -m minidl.train --resume {tmp_path}/run\n"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert main(["--resume", str(tmp_path / "run"), "--quiet", "--threads", "1", "--json"]) == 0
    assert weights(tmp_path / "run") == weights(whole)
    assert entries(tmp_path / "run") == entries(whole)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = json.loads((whole / "summary.json").read_text())
    for name in ("test_accuracy", "test_loss", "train_loss", "validation_accuracy", "best_step", "steps", "epochs"):
        assert result[name] == expected[name]


def test_a_run_from_config_toml_is_bit_identical(whole: Path, tmp_path: Path) -> None:
    assert main(["--config", str(whole / "config.toml"), "--quiet", "--out", str(tmp_path / "again")]) == 0
    assert weights(tmp_path / "again") == weights(whole)
    assert (tmp_path / "again" / "config.toml").read_text().splitlines()[1:] == (
        whole / "config.toml").read_text().splitlines()[1:]  # fmt: skip
    other = tmp_path / "other"
    assert main(["--config", str(whole / "config.toml"), "--seed", "1", "--quiet", "--out", str(other)]) == 0
    assert weights(other) != weights(whole)


def test_resuming_a_finished_run_prints_its_result(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--resume", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((whole / "summary.json").read_text())


@pytest.mark.parametrize("broken", ["", '{"test_accuracy": 0.', "[]", "{}"])
def test_damaged_records_of_a_run(whole: Path, tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").write_text(broken)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"ste\xff')
    assert main(["--resume", str(run), "--quiet"]) == 0
    again, expected = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole))
    assert {**again, "out": ""} == {**expected, "out": ""}
    assert entries(run) == entries(whole)


def test_damaged_checkpoint_and_the_one_before(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    (run / "checkpoints" / ".new-step-00000099").mkdir()
    last = files.last(run / "checkpoints")
    assert last
    content = bytearray((last / files.MODEL).read_bytes())
    content[-5] ^= 1
    (last / files.MODEL).write_bytes(content)
    assert main(["--resume", str(run), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidl: error:") and error.count("\n") == 1
    assert "delete this checkpoint to continue from the one before it" in error and error.count(str(last)) == 1
    shutil.rmtree(last)
    assert main(["--resume", str(run), "--quiet"]) == 0
    assert weights(run) == weights(whole) and entries(run) == entries(whole)
    assert not (run / "checkpoints" / ".new-step-00000099").exists()


def test_advice_to_delete_a_checkpoint_only_if_it_helps(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    config = run / "config.toml"
    text = config.read_text()
    changed = re.sub(r"(?m)^lr = .*", "lr = 0.0625", text)
    assert changed != text
    config.write_text(changed)
    assert main(["--resume", str(run), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "was made with lr = " in error and "delete this checkpoint" not in error
    config.write_text(text)
    *earlier, last = files.steps(run / "checkpoints")
    for step in earlier:
        shutil.rmtree(files.folder_of(run / "checkpoints", step))
    (files.folder_of(run / "checkpoints", last) / files.MODEL).unlink()
    assert main(["--resume", str(run), "--quiet"]) == 2
    assert "delete this checkpoint" not in capsys.readouterr().err


# Real processes and real signals.


def start(out: Path, root: Path, *more: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "minidl.train", *SMALL, "--epochs", "2000", "--out", str(out), *more]
    argv.remove("--quiet")
    return subprocess.Popen(argv, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Read standard error up to a line that contains `words`; return that line."""
    assert process.stderr
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"the process ended without printing {words!r}")


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),  # as in test_replicas.py
])  # fmt: skip
def test_signal_saves_and_says_how_to_resume(tmp_path: Path, root: Path, number: int, code: int) -> None:
    with start(tmp_path / "run", root) as process:
        wait_for(process, "epoch   2/")
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == code
    assert f"python -m minidl.train --resume {tmp_path / 'run'}" in errors and "Traceback" not in errors
    assert "minidl: stopping after this step; a second signal stops at once\n" in errors
    last = files.last(tmp_path / "run" / "checkpoints")
    assert last
    step = files.load(last).state["progress"]["step"]
    assert last.name == f"step-{step:08d}"
    assert all(entry["step"] <= step for entry in entries(tmp_path / "run"))


def test_signal_before_training(tmp_path: Path, root: Path) -> None:
    code = "import os, signal; from minidl import train; from minidl.cli import commands\n"
    code += "commands.begin = lambda *arguments: os.kill(os.getpid(), signal.SIGINT)\n"
    code += "raise SystemExit(train.main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "minidl: stopped; there was nothing to save yet\n"


def test_signal_in_the_middle_of_a_print(root: Path) -> None:
    """A signal handler that uses `print` would sometimes raise "reentrant call"."""
    code = "import os, signal, sys\nfrom minidl.run.signals import Signals\n"
    code += "sys.stderr = None\n"  # makes a handler that uses `print` fail
    code += "with Signals() as signals:\n    signals.defer()\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and "minidl: stopping after this step" in done.stderr


def test_nohup_is_respected(root: Path) -> None:
    code = "import os, signal\nfrom minidl.run.signals import Signals\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "with Signals() as signals:\n    os.kill(os.getpid(), signal.SIGHUP)\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "went on\n"


def test_terminal_that_closes(tmp_path: Path, root: Path) -> None:
    import pty

    screen, terminal = pty.openpty()
    argv = [sys.executable, "-m", "minidl.train", *SMALL, "--epochs", "2000", "--out", str(tmp_path / "run")]
    argv.remove("--quiet")
    with subprocess.Popen(argv, cwd=root, stdin=terminal, stdout=terminal, stderr=terminal,
                          start_new_session=True) as process:  # fmt: skip
        os.close(terminal)
        shown = b""
        while b"epoch   2/" not in shown:
            shown += os.read(screen, 4096)
        os.close(screen)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=300) == 129
    assert files.last(tmp_path / "run" / "checkpoints")


def test_second_signal_stops_at_once(root: Path) -> None:
    code = "import os, signal\nfrom minidl.run.signals import Signals\n"
    code += "with Signals() as signals:\n    signals.defer(quiet=True)\n"
    code += "    os.kill(os.getpid(), signal.SIGTERM)\n    print('saving', flush=True)\n"
    code += "    os.kill(os.getpid(), signal.SIGINT)\n    print('never')"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip() == "minidl: stopped at once"
    assert "saving" in done.stdout and "never" not in done.stdout


def test_a_killed_run_can_be_resumed(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with start(run, root) as process:
        wait_for(process, "epoch   3/")
        assert main(["--resume", str(run)]) == 2
        assert "another process is training" in capsys.readouterr().err
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    made = files.steps(run / "checkpoints")
    assert made and all(files.load(files.folder_of(run / "checkpoints", step)) for step in made)
    with subprocess.Popen([sys.executable, "-m", "minidl.train", "--resume", str(run)], cwd=root,
                          stderr=subprocess.PIPE, text=True) as again:  # fmt: skip
        wait_for(again, "epoch ")
        again.terminate()
        again.communicate(timeout=300)
    assert again.returncode == 143
    steps = [entry["step"] for entry in entries(run)]
    assert steps == sorted(set(steps)), "no line is written twice"
    assert not [entry for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


def test_floats_of_checkpoints_are_exact(dataset: Dataset, tmp_path: Path) -> None:
    of = trainer(dataset, CONFIG)
    of.progress.train_loss = float(np.nextafter(0.1, 1))
    files.save(tmp_path, 1, make_checkpoint(of))
    other = trainer(dataset, CONFIG)
    restore(other, files.load(files.folder_of(tmp_path, 1)))
    assert other.progress == of.progress
