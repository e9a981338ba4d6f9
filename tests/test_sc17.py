"""bench/papers/sc17.py: kept results, the time to an accuracy, and the tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.papers import sc17
from bench.papers import sc17_paper as paper
from bench.papers.sc17_figures import draw
from bench.papers.sc17_tables import interval, tables
from minidl.comm.cluster import EXAMPLES, load
from minidl.comm.methods import METHODS


def test_results_are_kept_even_after_a_kill_in_the_middle_of_a_line(tmp_path: Path):
    file, made = tmp_path / "new" / "results.jsonl", []

    def job() -> dict[str, int]:
        made.append(1)
        return {"value": len(made)}

    assert sc17.Store(file).get("a", job) == {"key": "a", "value": 1}
    assert sc17.Store(file).get("a", job)["value"] == 1
    file.write_text(file.read_text() + '{"key": "b", "va')
    store = sc17.Store(file)
    assert store.get("a", job)["value"] == 1 and store.get("b", job)["value"] == 2
    assert {*sc17.Store(file).found} == {"a", "b"} and len(made) == 2


def test_the_time_to_an_accuracy_is_interpolated():
    curve = [[1.0, 0.5], [2.0, 0.9], [3.0, 0.95]]
    assert sc17.reached(curve, 0.7) == pytest.approx(1.5) and sc17.reached(curve, 0.25) == pytest.approx(0.5)
    assert sc17.reached(curve, 0.95) == 3.0 and sc17.reached(curve, 0.96) is None


def test_a_confidence_interval():
    assert interval([3.0])[0] == 3.0
    pytest.importorskip("scipy")
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and half == pytest.approx(1.963, abs=1e-3)  # 2.776 * sqrt(2.5 / 5)


def options(**given: object) -> argparse.Namespace:
    usual = {"cluster": "gpu-node-8", "quick": False, "seeds": 2, "first_seed": 5, "epochs": 6, "data_dir": None}
    return argparse.Namespace(**usual | given)


def test_each_result_has_a_key_of_its_own_which_changes_with_seeds_and_cluster(tmp_path: Path):
    keys = [key for key, _ in sc17.jobs(options(), load("gpu-node-8"))]
    rows = [row for row in paper.ROWS if row.name in METHODS]
    assert len(keys) == len({*keys}) == len(rows) * (1 + 2) + 2 * 7 + 5 and len(rows) >= 3
    assert any("seed 6" in key for key in keys)
    other = tmp_path / "mine.toml"
    other.write_text((EXAMPLES / "gpu-node-8.toml").read_text() + "# changed\n")
    assert sc17.named(str(other)).split()[1] != sc17.named("gpu-node-8").split()[1]


def test_the_tables_and_figures_show_what_was_found_beside_the_paper(tmp_path: Path):
    shares = {"computation": 0.1, "data": 0.02, "update": 0.03, "weights": 0.85}
    results = {
        f"breakdown | c | {paper.ORIGINAL}": {"milliseconds": 80.0, "shares": shares},
        f"breakdown | c | {paper.THIRD}": {"milliseconds": 10.0, "shares": shares},
        f"accuracy | c | {paper.ORIGINAL} | seed 0": {"curve": [[10.0, 0.99]]},
        f"accuracy | c | {paper.THIRD} | seed 0": {"curve": [[2.0, 0.99]]},
        "accuracy | c | Async EASGD | seed 0": {"curve": [[2.0, 0.99]]},
        "accuracy | c | Async SGD | seed 0": {"curve": [[3.0, 0.5]]},
        "scaling | GoogLeNet | 1": {"seconds": 1.0, "method": "m"},
        "scaling | GoogLeNet | 2": {"seconds": 1.25, "method": "m"},
        "parts | 1": {"milliseconds": 1.0}, "parts | 4": {"milliseconds": 0.5},
    }  # fmt: skip
    text = tables(results, 0.988, lambda curve: sc17.reached(curve, 0.988))
    assert "| Original EASGD | 80.00 | 10.0% | 2.0% | 3.0% | 85.0% | 87.0% (calibrated) | 87% |" in text
    assert "| Sync EASGD 3 | 1 of 1 | 1.996 ± nan | 7.7 | 5.00 | 5.3 | 8.00 |" in text
    assert "| Async SGD | 0 of 1 | not reached |" in text and "| Async EASGD | Async SGD | 1 of 1 | always |" in text
    assert "| GoogLeNet | m | 2 | 1.25 | 80.0% | 96.4% |" in text and "| 4 | 0.500 | 2.00 | 1.57 |" in text
    assert tables({}, 0.988, lambda curve: None) == ""
    assert [file.suffix for file in draw(results, 0.988, lambda curve: sc17.reached(curve, 0.988), tmp_path)] == [
        ".svg", ".png"
    ]  # fmt: skip


def test_the_command_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sc17, "breakdown", lambda row, cluster: {
        "milliseconds": 1.0, "shares": dict.fromkeys(("computation", "data", "update", "weights"), 0.25)})  # fmt: skip
    sc17.main(["--quick", "--only", "breakdown", "--json", "--out", str(tmp_path)])
    first = capsys.readouterr().out
    assert json.loads(first.splitlines()[-1])["rows"][0]["value"] == 1.0
    monkeypatch.setattr(sc17, "breakdown", None)
    sc17.main(["--quick", "--only", "breakdown", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[0] == "## Where the time goes: LeNet, 8 replicas"
    assert (tmp_path / "sc17.svg").read_bytes()[:5] == b"<?xml" and (tmp_path / "sc17.png").stat().st_size > 10_000
