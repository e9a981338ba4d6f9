"""The pictures in docs/ show what the code computes now, and the pages for readers contain these pictures."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NUMBER = re.compile(r"-?\d+\.\d+")

spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
assert spec and spec.loader
figures = importlib.util.module_from_spec(spec)
before = list(sys.path)
spec.loader.exec_module(figures)
sys.path[:] = before


@pytest.mark.parametrize("name", figures.PICTURES)
def test_a_picture_shows_the_numbers_of_today(name: str) -> None:
    """The processor's rounding may move a point by a fraction of a pixel."""
    kept, made = (DOCS / name).read_text(encoding="utf-8"), figures.PICTURES[name]()
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", made), "run `python docs/figures.py`"
    np.testing.assert_allclose(*([float(word) for word in NUMBER.findall(text)] for text in (kept, made)), atol=0.25)
    assert len(kept) < 50_000 and ElementTree.fromstring(kept).find("{http://www.w3.org/2000/svg}title") is not None


@pytest.mark.parametrize(("page", "names"), [
    ("README.md", ["replicas.svg"]),
    ("docs/decentralised.md", ["mixing.svg", "push-sum.svg", "consensus-distance.svg"]),
    ("docs/elastic.md", ["elastic.svg"]),
])  # fmt: skip
def test_the_pages_show_the_pictures(page: str, names: list[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert all(f"{name})" in text for name in names)


def test_what_the_course_says_about_the_pictures() -> None:
    ring, dense, one = (figures.mix(name) for name in ("ring", "exponential", "one-peer-exponential"))
    for values in (ring, dense, one):
        np.testing.assert_allclose(values.mean(axis=1), 4.5)  # no round changes the average
    assert np.ptp(one[3]) < 1e-12 and np.ptp(dense[8]) < 0.05 and np.ptp(ring[8]) > 1
    plain, _ = figures.gossip(figures.Half)
    values, masses = figures.gossip(figures.Mass)
    assert np.ptp(plain[-1]) < 0.05 and abs(plain[-1].mean() - 2) > 0.3
    assert np.ptp(values[-1]) < 0.1 and abs(values[-1].mean() - 2) < 0.05
    np.testing.assert_allclose(masses.sum(axis=1), 5)
    found = {name: figures.train(name) for name in ("ring", "torus", "complete")}
    assert found["complete"].max() < 1e-9 and found["torus"][50:150].max() < found["ring"][50:150].min()
    for distances in (found["ring"], found["torus"]):  # the distance is nearly proportional to eta
        assert distances[250:].mean() < 0.35 * distances[50:150].mean()


def test_what_the_course_says_about_springs() -> None:
    """The distance of the mean of the replicas from the center is multiplied by 1 - (1 + P) a in each step."""
    for replicas, factor in ((2, 0.1), (4, -0.5), (8, -1.7)):
        values = figures.springs(replicas)
        distances = values[:, :-1].mean(axis=1) - values[:, -1]
        np.testing.assert_allclose(distances, factor ** np.arange(4), atol=1e-12)
