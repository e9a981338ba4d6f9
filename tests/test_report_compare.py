"""The page that compares several runs: their groups, results with intervals, the order, and the CSV file."""

from __future__ import annotations

import csv
import json
import shutil
import tomllib
from pathlib import Path

import pytest
from scipy import stats
from test_report import check, titles

from minidl.errors import ConfigError
from minidl.report import __main__ as command
from minidl.report import compare, data

pytest.importorskip("matplotlib")
CONFIG = """
model = "mlp"
data = "synthetic:48x2x2x1:2"
batch_size = {batch}
seed = {seed}
workers = 1
"""


def make(folder: Path, seed: int = 0, batch: int = 8, accuracy: float = 0.5, seconds: float = 1.0) -> Path:
    """Write the folder of a finished run, whose validation accuracy grows by a tenth in each epoch and second."""
    from minidl.run.config import resolve
    from minidl.run.config_file import to_toml

    folder.mkdir()
    known = tomllib.loads(CONFIG.format(seed=seed, batch=batch))
    (folder / "config.toml").write_text(to_toml(resolve(known)))
    lines = [{"event": "epoch", "step": 5 * epoch, "epoch": epoch, "loss": 1 / epoch, "accuracy": 0.1 * epoch,
              "validation_accuracy": 0.1 * epoch, "validation_loss": 1.0, "seconds": seconds * epoch,
              "bytes_sent": 10 * epoch} for epoch in range(1, 6)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = {"test_accuracy": accuracy, "test_loss": 1.0, "epochs": 5, "steps": 25, "seconds": 5 * seconds,
              "images_per_second": 10.0, "out": str(folder), "bytes_sent": 100}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    made = [make(tmp_path / "a", 0, 8, 0.5, 3.0), make(tmp_path / "b", 1, 8, 0.6, 2.0),
            make(tmp_path / "c", 2, 8, 0.9, 1.0), make(tmp_path / "d", 0, 16, 0.8, 2.5)]  # fmt: skip
    return [str(folder) for folder in made]


def test_runs_that_differ_in_the_seed_form_a_group(folders: list[str]) -> None:
    runs = [data.read(folder) for folder in folders]
    groups = compare.grouped(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b", "c"], ["d"]]
    assert [group.options for group in groups] == [{"batch_size": "8"}, {"batch_size": "16"}]
    mean, half = compare.interval([0.5, 0.6, 0.9])
    low, high = stats.t.interval(0.95, 2, loc=mean, scale=stats.sem([0.5, 0.6, 0.9]))
    assert (mean - (half or 0), mean + (half or 0)) == pytest.approx((low, high))
    assert compare.interval([0.5]) == (0.5, None)
    assert compare.cell(groups[0], "test_accuracy") == f"{mean:.2%} ± {half:.2%}"


def test_the_order(folders: list[str]) -> None:
    runs = [data.read(folder) for folder in folders]
    names = lambda sort: "".join(run.name for run in compare.sorted_by(sort, runs))  # noqa: E731
    assert names("") == "abcd" and names("seconds-to:30") == "cbda" and names("-test-accuracy") == "cdba"
    assert names("batch-size") == "abcd" and names("-batch-size") == "dabc" and names("-name") == "dcba"
    assert compare.result_of(runs[0], "seconds-to:30") == pytest.approx(9.0)
    assert compare.result_of(runs[0], "seconds-to:51") is None
    (Path(folders[2]) / "metrics.jsonl").unlink()
    runs = [data.read(folder) for folder in folders]
    assert names("seconds-to:30") == "bdac" and names("-seconds-to:30") == "adbc"  # unknown: at the end


@pytest.mark.parametrize(
    ("sort", "words"),
    [
        ("seconds-to:abc", "expected a percentage after seconds-to:"),
        ("seconds-to:101", "expected a percentage after seconds-to:"),
        ("test-acuracy", "unknown 'test-acuracy'. Did you mean 'test-accuracy'?"),
    ],
)
def test_an_order_that_does_not_exist(folders: list[str], sort: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", "[?]")):
        compare.sorted_by(sort, [data.read(folder) for folder in folders])


def test_the_command(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "all.html", tmp_path / "all.csv"
    assert command.main([*folders, "--out", str(out), "--csv", str(table), "--sort", "seconds-to:30"]) == 0
    assert capsys.readouterr().out == f"report: {out}\n"
    found = check(out.read_text())
    assert titles(found) == ["Options and results", "Curves", "How they ended"] and found.figures == 6
    assert "±" in found.words and "batch-size" in found.words and "seconds-to:30" in found.words
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["run"]).name for row in rows] == ["c", "b", "d", "a"]
    assert float(rows[0]["test_accuracy"]) == 0.9 and float(rows[0]["seconds-to:30"]) == 3.0 * 1.0
    assert rows[2]["batch_size"] == "16" and rows[0]["seed"] == "2" and rows[0]["wait_fraction"] == ""


def test_bytes_of_the_leader_are_scaled_to_those_of_all(folders: list[str]) -> None:
    run = data.read(folders[0])
    assert [compare.bytes_at(run, entry) for entry in run.entries] == pytest.approx([20, 40, 60, 80, 100])


def test_equal_names_are_told_apart(folders: list[str], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "other" / "a")
    both = [folders[0], str(tmp_path / "other" / "a")]
    runs = compare.named_apart([data.read(folder) for folder in both], both)
    assert [run.name for run in runs] == both


def test_a_folder_that_is_no_run(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*folders, str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert command.main([*folders, "--model", "x.py:build"]) == 2
    assert "--model has an effect only with one run" in capsys.readouterr().err
