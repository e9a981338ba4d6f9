"""bench/papers/sc17.py: kept results, the time to an accuracy, the goals that need no training, and bad input."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.papers import sc17
from bench.papers import sc17_paper as paper
from bench.papers.sc17_findings import interval, reached
from bench.papers.sc17_jobs import (
    DIGITS,
    GRID,
    Plan,
    climb,
    communication,
    lenet,
    rates,
    searched,
    step,
    write_rates,
)
from bench.papers.sc17_store import Store, work
from bench.papers.sc17_tables import tuning
from minidl.comm.cluster import EXAMPLES, load


def test_results_are_kept_even_after_a_kill_in_the_middle_of_a_line(tmp_path: Path):
    file, made = tmp_path / "new" / "results.jsonl", []

    def job() -> dict[str, int]:
        made.append(1)
        return {"value": len(made)}

    first = Store(file)
    assert first.do("a", job) and first.found["a"] == {"key": "a", "value": 1}
    file.write_text(file.read_text() + '{"key": "b", "va')
    store = Store(file)
    work(store, lambda: [(key, job) for key in ("a", "b") if key not in store.found])
    assert {*Store(file).found} == {"a", "b"} and len(made) == 2


def test_the_time_to_an_accuracy_is_interpolated():
    curve = [[100, 1.0, 0.5], [200, 2.0, 0.9], [300, 3.0, 0.95]]
    assert reached(curve, 0.7) == pytest.approx(1.5) and reached(curve, 0.25) == pytest.approx(0.5)
    assert reached(curve, 0.95) == 3.0 and reached(curve, 0.96) is None


def test_a_confidence_interval():
    assert interval([3.0])[0] == 3.0
    pytest.importorskip("scipy")
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and half == pytest.approx(1.963, abs=1e-3)  # 2.776 * sqrt(2.5 / 5)


@pytest.mark.parametrize("best", GRID)
def test_the_search_of_a_rate_climbs_to_the_best(best: float):
    known: dict[float, float] = {}
    while (found := climb(known.get, 0.11))[0] is None:
        rate = found[1]
        known[rate] = -rate if rate > best else rate  # larger rates diverge
    assert found[0] == best
    assert climb(known.get, best)[0] == best, "a search from its result finds it again, without another training"


def test_the_grid_has_a_factor_of_the_square_root_of_two():
    assert all(math.isclose(high / low, 2**0.5, rel_tol=0.01) for low, high in pairwise(GRID)) and 0.1 in GRID


def test_each_trained_row_has_a_rate_and_the_page_shows_what_was_tried():
    assert {*rates()} == {row.title for row in paper.ROWS if row.trained}
    assert rates()[paper.THIRD] == rates()[paper.SECOND], "rows with the same bits have one rate"
    text = tuning()
    for title, row in searched()["rows"].items():
        assert f"| {title} | {row['rate']:g} |" in text
        if tried := row["accuracy"]:
            best = float(max(tried, key=lambda rate: tried[rate] or 0))
            above = GRID[GRID.index(best) + 1]
            diverges = tried[f"{above:g}"] is None
            assert row["rate"] == (GRID[GRID.index(best) - 1] if diverges else best) and len(tried) >= 3


def test_what_a_search_finds_is_written(tmp_path: Path):
    plan = Plan("gpu-node-8", load("gpu-node-8"), DIGITS, "", range(1), True, "cpu")
    results: dict[str, dict[str, Any]] = {}
    while jobs := plan.missing_rates(results):
        for key, _ in jobs:
            rate = float(key.split("lr ")[1].split(",")[0].split(" ")[0])
            worse = abs(math.log(rate / 0.2))
            results[key] = {"diverged": True} if rate > 0.5 else {"curve": [[0, 0, 0], [0, 0, 1 - worse], [0, 0, 1]]}
    write_rates(plan, results, tmp_path)
    found = json.loads((tmp_path / "rates-sc17.json").read_text())
    assert found["seeds"] == [1000, 1001] and found["images"] == DIGITS.tuning
    for row in found["rows"].values():
        assert row["rate"] == 0.2 and {"0.141", "0.2", "0.283"} <= {*row["accuracy"]}
        assert row["accuracy"]["0.2"] > row["accuracy"]["0.283"]


def test_the_breakdown_holds():
    cluster = load("gpu-node-8")
    rows = (paper.ORIGINAL, paper.FIRST, paper.THIRD, paper.OWN)
    found = {title: step(paper.row(title), cluster, lenet(), 16, 8) for title in rows}
    faster = {title: found[paper.ORIGINAL]["milliseconds"] / found[title]["milliseconds"] for title in rows}
    assert communication(found[paper.ORIGINAL]) == pytest.approx(0.87, abs=0.01)
    assert faster[paper.FIRST] >= 2.8 and communication(found[paper.THIRD]) <= 0.18
    assert faster[paper.OWN] >= 6.0 and communication(found[paper.OWN]) <= 0.08


@pytest.mark.parametrize(("options", "words"), [
    (["--seeds", "0"], "--seeds 0: expected 1 or more"),
    (["--data-dir", "/nowhere"], "'/nowhere': there is no such folder"),
    (["--cluster", "uniform"], "expected a node with 8 devices and then their host"),
    (["--cluster", "gpu-node-4"], "9 ranks on 5 devices"),
])  # fmt: skip
def test_bad_input_is_one_line(options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        sc17.main([*options, "--out", str(tmp_path)])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and words in text and text.count("\n") == 1


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_and_another_cluster_has_other_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--quick", "--only", "breakdown", "--out", str(tmp_path)]
    sc17.main(options)
    assert "| Original EASGD |" in capsys.readouterr().out
    sc17.main(options)
    assert capsys.readouterr().out.startswith("## ")  # no job is done again
    mine = tmp_path / "mine.toml"
    mine.write_text((EXAMPLES / "gpu-node-8.toml").read_text() + "# changed\n")
    sc17.main([*options, "--cluster", str(mine)])
    assert "mine.toml" in capsys.readouterr().out
    assert (tmp_path / "sc17.svg").read_bytes()[:5] == b"<?xml" and (tmp_path / "sc17.png").stat().st_size > 10_000
