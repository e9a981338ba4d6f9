"""What a run prints while it trains: the bar, compilation, the lines of epochs, where a resume begins."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from sessions import SMALL_MODEL, Sessions

from minidl import simulate, train
from minidl.run import display
from minidl.run.display import Display, Position, count, epoch_line, legend, speed
from minidl.run.folder import read_run

ENTRY = {"epoch": 3, "loss": 0.5, "accuracy": 0.875, "lr": 0.05, "images_per_second": 12345.6}
SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--workers", "1"]


class Terminal(io.StringIO):
    """A terminal that does not tell its size, so that 80 columns are assumed."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """All lines, including the earlier contents of a line that was overwritten."""
        return [re.sub("\033\\[[KA]", "", line).rstrip() for line in re.split(r"[\r\n]+", self.getvalue())]


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error by a terminal. Not a fixture: between fixtures and test, pytest replaces it again."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(display, "INTERVAL", 0.0)
    return screen


def position(run: float, done: int, epoch: int = 12) -> Position:
    return Position(run, epoch, 15, (done, 345))


def test_the_bars_fit_80_columns_and_show_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    shown = Display(quiet=False)
    for done in (1, 2, 3):
        shown.show(position(0.72 + done / 100, done), speed(57_095), "loss 0.1824", {0: 28_000.0, 1: 29_095.4})
    shown.say("a line that stays")
    shown.show(position(1.0, 345), speed(57_095), "loss 0.1824", dict.fromkeys(range(100), 1e5))
    shown.close()
    lines = terminal.lines
    assert max(map(len, lines)) < 80
    run = [line for line in lines if line.startswith("run ")]
    assert re.fullmatch(r"run    75% \|.{10,}\| epoch 12/15, \d\d:\d\d left, 57,095 images/s", run[-2])
    assert run[-1].startswith("run   100% |") and "| epoch 12/15, 00:00 left, 57,095 images/s" in run[-1]
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert re.fullmatch(r"epoch   1% \|.{20,}\| 3/345, loss 0\.1824", epochs[-2]) and "100%" in epochs[-1]
    speeds = [line for line in lines if line.startswith("replicas ")]
    assert speeds[0] == "replicas 0: 28,000  1: 29,095 images/s"
    assert re.fullmatch(r"replicas 0: 100,000  1: 100,000 .* and 9\d more images/s", speeds[-1])
    assert "a line that stays" in lines, "the bars were cleared before the line"


def test_the_epochs_bar_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    shown = Display(quiet=False)
    for run, done, epoch in ((0.5, 345, 12), (0.6, 1, 13)):
        shown.show(position(run, done, epoch), "5 images/s", "loss 1")
    shown.close()
    epochs = [line for line in terminal.lines if "epoch " in line and "loss" in line]
    assert re.match(r"epoch 100% \|.* 345/345", epochs[0]) and re.search(r"epoch   0% \|.* 1/345", epochs[-1])
    assert not any("  0% |" in line and "345/345" in line for line in epochs), "a wrong bar, for a moment"


@pytest.mark.parametrize("quiet", [True, False])
def test_bars_are_due_in_a_terminal_only(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Display(quiet).due()
    open_terminal(monkeypatch)
    assert Display(quiet).due() is not quiet
    monkeypatch.setattr(display, "INTERVAL", 60.0)
    shown = Display(quiet=False)
    assert shown.due()
    shown.show(position(0.1, 1), "5 images/s", "loss 1")
    assert not shown.due()
    shown.close()


def test_compilation_is_reported_only_if_kernels_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Display(quiet=False)
    for ready in (16, 16):
        shown.compiling(ready, 16)
    assert capsys.readouterr().err == ""
    for ready in (13, 14, 15, 16, 16):
        shown.compiling(ready, 16)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["compiling 3 kernels that the cache does not contain ...", "compiled 3 kernels in 0 s"]
    for ready in (15, 16):  # another batch size may need another kernel
        shown.compiling(ready, 16)
    assert capsys.readouterr().err.splitlines()[-1] == "compiled 1 kernel in 0 s"


def test_compilation_in_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    shown = Display(quiet=False)
    for ready in (13, 14, 16):
        shown.compiling(ready, 16)
    assert "compiling 3 kernels: 1 done after 0 s" in terminal.lines
    assert terminal.getvalue().count("\n") == 1 and terminal.lines[-2] == "compiled 3 kernels in 0 s"


def test_a_speed_that_was_not_measured_is_a_dash() -> None:
    assert epoch_line(ENTRY, "/9").endswith("lr 0.05  12,346 images/s")
    assert epoch_line(ENTRY | {"images_per_second": 0.0}).endswith("lr 0.05  - images/s")
    assert (count(1, "step"), count(1200, "step")) == ("1 step", "1,200 steps")


def test_an_epoch_of_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert "- images/s" in err and "0 images/s" not in err + out
    assert out.splitlines()[-1].startswith("1 epoch, 1 step, 0.")


@pytest.mark.parametrize("method", ["dpsgd", "gossip", "ps"])
def test_lines_of_epochs_are_means_of_all_replicas(tmp_path: Path, method: str) -> None:
    run = Sessions(tmp_path, 4, {}, method=method, epochs=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    last = [line for line in lines if line["event"] == "epoch"][-1]
    losses = [member["progress"]["train_loss"] for member in run.last().state["members"].values()]
    assert len(losses) == (3 if method == "ps" else 4) and len(set(losses)) == len(losses)
    assert run.summary and run.summary["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    if method == "dpsgd":  # in the other methods, no replica waits: a line may contain a loss of an earlier epoch
        assert last["loss"] == pytest.approx(run.summary["train_loss"], rel=1e-12)
    assert last["loss"] != losses[0] and "4 replicas" in legend(4)


def test_a_resume_says_where_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Sessions(tmp_path / "run", 2, {}, stop=0.02, method="dpsgd", epochs=40, quiet=False)
    step = run.last().state["progress"]["step"]
    capsys.readouterr()
    with SMALL_MODEL:
        assert train.main(["--resume", str(tmp_path / "run"), "--workers", "1"]) == 0
    first, _, _, *epochs = capsys.readouterr().err.splitlines()
    found = re.fullmatch(rf"resuming {tmp_path}/run from step ([\d,]+) of ([\d,]+) \(epoch (\d+) of 40\)", first)
    assert found and int(found[1]) == step < int(found[2].replace(",", ""))
    assert epochs[0].split()[1] == f"{found[3]}/40"


def test_a_resume_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train.main([*SMALL, "--steps", "2", "--quiet", "--out", str(out)]) == 0
    (out / "summary.json").unlink()
    for checkpoint in (out / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    assert train.main(["--resume", str(out)]) == 0
    assert capsys.readouterr().err.startswith(f"resuming {out} from the start: it has no checkpoint yet\n")


def test_a_finished_run_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert train.main([*SMALL, "--steps", "2", "--quiet", "--out", out]) == 0
    capsys.readouterr()
    assert train.main(["--resume", out, "--json"]) == 0
    told, words = capsys.readouterr()
    assert json.loads(told)["steps"] == 2 and words.count("\n") == 1
    assert re.search(r"finished on \d{4}-\d\d-\d\d \d\d:\d\d and is not trained again; this is its result", words)
    advice = words.strip().split("python -m minidl.train ")[1].split()
    assert advice == ["--resume", out, "--steps", "N"]
    assert train.main([*advice[:3], "4", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4 and read_run(out)["steps"] == 4
    assert train.main(["--resume", out, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_simulation_prints_a_few_of_many_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--ranks", "3"]
    assert simulate.main([*small, "--steps", "67", "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    total = len([line for line in (tmp_path / "run" / "metrics.jsonl").open() if '"epoch",' in line])
    assert 5 <= len(epochs) <= 11 < total
    assert all(re.match(r"epoch +\d+/34  [\d.e-]+ virtual s  loss ", line) for line in epochs), epochs
    assert "distance: consensus distance" in lines[1]
