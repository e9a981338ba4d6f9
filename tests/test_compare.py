"""bench/compare.py: its rule finds what became slower and raises few false alarms; checked on synthetic timings."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bench import compare
from bench.compare import decide, rank

STARTS, ROWS = 14, 12


def ratios(random: np.random.Generator, true: float, noise: float, outliers: float = 0.0) -> list[float]:
    """Return the ratios of STARTS starts. noise: relative, of each side. outliers: share of starts disturbed by 50%."""
    a, b = (1 + noise * random.standard_normal(STARTS) for _ in range(2))
    disturbed = random.random((2, STARTS)) < outliers
    return list(true * b * np.where(disturbed[1], 1.5, 1.0) / (a * np.where(disturbed[0], 1.5, 1.0)))


@pytest.mark.parametrize("n", [1, 5, 6, 9, 14])
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_the_rank_covers_the_median(n: int, error: float) -> None:
    """Against a count of all sequences of coin tosses: the median is outside if fewer than k heads or tails fall."""
    k = rank(n, error)
    heads = [sum(toss) for toss in product((0, 1), repeat=n)]

    def missed(k: int) -> float:
        return sum(min(h, n - h) < k for h in heads) / len(heads)

    assert missed(k) <= error < missed(k + 1)


@pytest.mark.parametrize("noise", [0.001, 0.03, 0.2])
def test_few_false_alarms(noise: float) -> None:
    """In 500 comparisons of a commit with itself, at most 5% (and chance: 4 standard deviations) say something."""
    random, alarms = np.random.default_rng(0), 0
    for _ in range(500):
        verdicts = [decide(ratios(random, 1.0, noise), ROWS, 0.0).text for _ in range(ROWS)]
        alarms += any(text in ("slower", "faster") for text in verdicts)
    assert alarms <= 25 + 4 * 5


@pytest.mark.parametrize("true, text", [(1.08, "slower"), (1 / 1.08, "faster")])
def test_a_difference_of_twice_the_noise_is_found(true: float, text: str) -> None:
    """Even if something else disturbs every twentieth process."""
    random = np.random.default_rng(1)
    found = [decide(ratios(random, true, 0.02, outliers=0.05), ROWS, 0.02).text for _ in range(200)]
    assert found.count(text) > 150 and set(found) <= {text, "no difference beyond noise"}


def test_a_difference_below_the_tolerance_does_not_matter() -> None:
    certain = [1.01 + 1e-4 * i for i in range(STARTS)]
    assert decide(certain, ROWS, 0.02).text == "no difference beyond noise"
    assert decide(certain, ROWS, 0.005).text == "slower"
    assert decide([1 / ratio for ratio in certain], ROWS, 0.005).text == "faster"


def test_noise_is_no_difference() -> None:
    found = decide([0.8, 1.3] * 7, ROWS, 0.02)
    assert found.text == "no difference beyond noise" and found.low == 0.8 and found.high == 1.3


def test_more_rows_need_more_starts() -> None:
    assert decide([1.5] * 6, 1, 0.02).text == "slower"
    assert decide([1.5] * 6, 2, 0.02).text == decide([1.5], 1, 0.02).text == "too few starts to decide"


class Clock:
    """Stands for a worker whose steps take the seconds of a machine that slows down with each turn of any worker."""

    now = 1.0

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def build(self, net: str, batch: int, predict: bool, timeout: float) -> float:
        return 0.01

    def steps(self, steps: int) -> list[float]:
        if steps > 1:
            Clock.now *= 1.05
        return [self.factor * Clock.now] * steps


def test_turns_cancel_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.time, "sleep", lambda seconds: None)
    found = []
    for start in range(4):
        a, b = compare.times_of([Clock(1.0), Clock(1.1)], "mlp-b8", 6, start % 2 == 1, quick=False)  # type: ignore
        found.append(b / a)
    assert np.mean(found) == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("words, named", [
    (["no-such-commit", "HEAD"], "no-such-commit"),
    (["HEAD", "HEAD", "--only", "mlp-b7"], "mlp-b7"),
    (["HEAD", "HEAD", "--starts", "0"], "--starts 0"),
])  # fmt: skip
def test_wrong_arguments(root: Path, words: list[str], named: str) -> None:
    done = subprocess.run([sys.executable, "bench/compare.py", *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_quick_run(root: Path) -> None:
    """A commit against itself: both are checked out, measured, and removed."""
    before = compare.git("worktree", "list")
    command = [sys.executable, "bench/compare.py", "HEAD", "HEAD", "--only", "mlp-b8", "--quick", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (row,) = result["rows"]
    assert row["name"] == "mlp-b8" and row["low"] <= row["value"] <= row["high"]
    assert compare.git("worktree", "list") == before
