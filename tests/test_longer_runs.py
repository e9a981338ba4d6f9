"""`--resume RUN --epochs N` trains a run longer, whether it has finished or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from sessions import Sessions

from minidl.run import checkpoint as files
from minidl.run import folder as folders
from minidl.train import main
from minidl.training.trainer import Trainer

SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--quiet", "--lr", "0.01",
         "--workers", "1"]  # fmt: skip
STEPS = 6  # of an epoch


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begin(*argv: str, out: str = "run") -> Path:
    assert main([*SMALL, *argv, "--out", out]) == 0
    return Path(out)


def longer(*argv: str, out: str = "run") -> int:
    return main(["--resume", out, "--quiet", *argv])


def summary(out: str | Path = "run") -> dict[str, Any]:
    return json.loads((Path(out) / "summary.json").read_text())


def state(out: str = "run") -> dict[str, bytes]:
    """Return all weights and vectors of the last checkpoint."""
    last = files.last(Path(out) / "checkpoints")
    assert last
    found = files.load(last)
    return {name: values.tobytes() for name, values in {**found.weights, **found.vectors}.items()}


def entries(out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").open()]


@pytest.mark.parametrize("length", ["--epochs", "--steps"])
def test_the_bits_are_those_of_a_run_that_was_longer_from_the_beginning(length: str) -> None:
    """With a constant learning rate, the schedule does not depend on the length."""
    short, long = ("2", "4") if length == "--epochs" else ("9", "20")
    begin("--schedule", "constant", length, short, "--validation", "0.25")
    begin("--schedule", "constant", length, long, "--validation", "0.25", out="whole")
    before = entries()
    assert longer(length, long) == 0
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    if length == "--epochs":  # with --steps, the shorter run has a line for the epoch that it interrupts
        assert state() == state("whole")
        kept = ("step", "epoch", "loss", "validation_loss", "lr")
        assert [[one[name] for name in kept] for one in entries()] == [
            [one[name] for name in kept] for one in entries("whole")]  # fmt: skip
        assert summary()["epochs"] == summary("whole")["epochs"]
    assert summary()["steps"] == summary("whole")["steps"] and "continues_to" not in summary()
    unchanged = len(before) - (length == "--steps")  # the interrupted epoch is completed, and has a new line
    assert entries()[:unchanged] == before[:unchanged]
    assert folders.read_run("run")[length.strip("-")] == int(long)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle", "steps"])
def test_a_finished_run_trains_usefully(schedule: str) -> None:
    """Its learning rate has fallen to almost 0. It rises to the value of the longer schedule at this position."""
    begin("--schedule", schedule, "--epochs", "4")
    trained = summary()["train_loss"]
    assert longer("--epochs", "8") == 0
    begin("--schedule", schedule, "--epochs", "8", out="whole")
    rates, whole = ([one["lr"] for one in entries(out) if one["epoch"] > 4] for out in ("run", "whole"))
    assert rates == whole and (schedule == "steps" or rates[0] > 0.003)
    assert summary()["train_loss"] < trained and summary()["epochs"] == 8


def test_a_stopped_run_becomes_longer_and_stops_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begin("--epochs", "4", "--schedule", "constant", out="whole")
    begin("--epochs", "2", "--schedule", "constant")
    step, made = Trainer.step, 0

    def killed(self: Trainer, x: Any, y: Any) -> Any:
        nonlocal made
        if (made := made + 1) > STEPS + 2:
            raise MemoryError("killed")
        return step(self, x, y)

    old, weights = summary(), (Path("run") / files.MODEL).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        assert longer("--epochs", "4") == 2
    assert summary() == old | {"continues_to": "4 epochs"}, "the old result is kept until there is a new one"
    assert (Path("run") / files.MODEL).read_bytes() == weights
    assert folders.result_of("run") is None and folders.read_run("run")["epochs"] == 4
    shutil.copytree("run", "again")
    assert longer() == 0, "the new length is that of the run: it need not be given again"
    assert longer("--epochs", "4", out="again") == 0
    assert state() == state("again") == state("whole") and "continues_to" not in summary()


def test_a_kill_before_the_first_new_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are written in two files. Whatever the moment of the kill, the run can be continued."""
    begin("--epochs", "2", "--schedule", "constant")
    begin("--epochs", "4", "--schedule", "constant", out="whole")
    shutil.copytree("run", "half")
    write = folders.write

    def killed(path: Path, content: bytes) -> None:
        if path.name == "config.toml":
            raise MemoryError("killed")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write", killed)
        assert longer("--epochs", "4", out="half") == 2
    assert folders.read_run("half")["epochs"] == 2 and summary("half")["continues_to"] == "4 epochs"
    shutil.copytree("half", "shorter")
    assert longer(out="shorter") == 0, "nothing is left to train: the result is written again"
    assert summary("shorter")["epochs"] == 2 and state("shorter") == state("run")
    assert longer("--epochs", "4", out="half") == 0 and state("half") == state("whole")


def test_other_options_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    begin("--epochs", "2", "--keep", "5", "--seed", "7")
    before = folders.read_run("run")
    assert longer("--epochs", "3", "--keep", "1") == 0
    assert folders.read_run("run") == before | {"epochs": 3}
    assert longer("--steps", "20") == 0
    now = folders.read_run("run")
    assert now == {**{name: value for name, value in before.items() if name != "epochs"}, "steps": 20}
    assert summary()["steps"] == 20
    capsys.readouterr()
    assert main(["--resume", "run"]) == 0
    assert "To train longer: python -m minidl.train --resume run --steps N" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "words"), [
    (["--epochs", "2"], "run has already been trained for 2 epochs: give a larger number to train it longer"),
    (["--steps", "12"], "run has already been trained for 12 steps: give a larger number"),
    (["--epochs", "1"], "the run has 2 epochs, and can only become longer: 1 epochs are fewer"),
    (["--steps", "11"], "the run has 2 epochs, and can only become longer: 11 steps are fewer"),
    (["--epochs", "3", "--steps", "40"], "steps and epochs exclude each other"),
    (["--epochs", "3", "--lr", "1"], "--lr cannot be given with --resume: the run keeps its options"),
    (["--init", "run"], "--init cannot be given with --resume"),
    (["--epochs", "0"], "expected a whole number of 1 or more"),
])  # fmt: skip
def test_a_length_that_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    begin("--epochs", "2")
    files_before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert longer(*argv) == 2
    out, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and not out
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == files_before


def test_a_finished_run_without_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    begin("--epochs", "2")
    shutil.rmtree("run/checkpoints")
    before = summary()
    capsys.readouterr()
    assert longer("--epochs", "4") == 2
    assert "run has finished, and has no checkpoint to continue from" in capsys.readouterr().err
    assert summary() == before


@pytest.mark.parametrize("method", quick(["dpsgd", "gossip", "local-sgd", "ps"], "dpsgd", "gossip"))
@pytest.mark.parametrize("stop", [0.0, 0.5])
def test_several_replicas(tmp_path: Path, method: str, stop: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, options = 3, dict(method=method, epochs=4, lr=0.01)
    if stop:
        time = Sessions(tmp_path / "whole", ranks, {}, **options).simulation.time
        assert not Sessions(tmp_path / "run", ranks, {}, stop=stop * time, **options).summary
    else:
        assert Sessions(tmp_path / "run", ranks, {}, **options).summary
    given = {"resume": str(tmp_path / "run"), "quiet": True, "epochs": 6}
    monkeypatch.setattr(Sessions, "main", _with(given, Sessions.main))
    again = Sessions(tmp_path / "run", ranks, {})
    assert again.summary and again.summary["epochs"] == 6, again.results
    assert folders.read_run(tmp_path / "run")["epochs"] == 6
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    rates = [line["lr"] for line in lines if line["event"] == "epoch"]
    assert len(rates) >= 6 and rates[4] > 1e-4 and rates[-1] < rates[4]


@pytest.mark.parametrize("method", ["dpsgd", "gossip"])
def test_epochs_become_steps(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 steps are more than the two epochs of 3 replicas; 3 steps are fewer than those that are already made."""
    before = Sessions(tmp_path / "run", 3, {}, method=method, epochs=2, lr=0.01).summary
    assert before and before["steps"] < 40
    main = Sessions.main
    for steps, words in ((3, "the run has 2 epochs, and can only become longer: 3 steps are fewer"), (40, "")):
        given = {"resume": str(tmp_path / "run"), "quiet": True, "steps": steps}
        monkeypatch.setattr(Sessions, "main", _with(given, main))
        again = Sessions(tmp_path / "run", 3, {})
        assert any(words in error for error in again.errors) if words else not again.errors
        assert (again.summary or {}).get("steps") == (None if words else 40)


def _with(given: dict[str, Any], main: Any) -> Any:
    def work(self: Sessions, rank: int) -> Any:
        self.given = given
        return main(self, rank)

    return work
