"""Options of methods in combination: each pair of values that is accepted trains every image, and its books add up."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_replicas
from sessions import count_images

from minidl.comm.cluster import parse
from minidl.comm.methods import METHODS
from minidl.comm.methods.adaptive import Trigger
from minidl.errors import ConfigError
from minidl.run import declared
from minidl.run.config import resolve
from minidl.run.folder import RunFolder
from minidl.run.signals import Signals
from minidl.training.simulated import Parts, SimulatedRun

REPLICAS, EPOCHS, IMAGES = 4, 2, 128
SMALL: dict[str, Any] = dict(data=f"synthetic:{IMAGES}x2x2x1:2", model="mlp", batch_size=8, lr=0.01, momentum=0.9,
                             epochs=EPOCHS, quiet=True)  # fmt: skip
CLUSTER = """
devices.fast = {flops = 4e6, jitter = 0.3}
devices.slow = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", devices = ["fast", "slow", "fast", "slow", "fast"]}]
inside = {alpha = 1e-5, rate = 1e9}
"""
VALUES: dict[str, tuple[Any, ...]] = {  # of each option; of the others, all that the methods declare
    "compress": ("none", "int8", "randk:0.2"),
    "topology": ("ring", "torus", "exponential", "one-peer-exponential", "matching"),
    "peer": ("uniform", "topology"), "reduce": ("tree", "ring"), "messages": ("packed", "layers"),
    "overlap": (False, True), "period": (1, 3), "exchange_rate": (0.0, 0.4), "fragments": (1, 2), "merge_after": (0, 1),
}  # fmt: skip
AXES = (*VALUES, "adaptive", "balance", "weighting", "center", "velocity", "exchange", "block", "mix")
Case = dict[str, Any]


def axes_of(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the options of a method that are combined, and their values."""
    known = declared.choices("method")[name].options
    return {axis: VALUES.get(axis, tuple(known[axis].choices)) for axis in AXES if axis in known}


def refusal(name: str, case: Case) -> str:
    """Return why a run with these options does not begin; "" if it does."""
    try:
        config = resolve({**SMALL, "method": name, **case})
        toy_replicas.run(name, REPLICAS + declared.servers(name, config.center), 0, **case)
    except ConfigError as error:
        return str(error)
    return ""


@cache
def cases(name: str) -> tuple[list[Case], list[str]]:
    """Return runs of a method that contain each possible pair of values, and why others are refused."""
    axes, rng, found, refused = axes_of(name), np.random.default_rng(0), list[Case](), dict[str, None]()
    covered: set[frozenset[tuple[str, Any]]] = set()
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            wanted = dict(zip((one, other), pair, strict=True))
            if frozenset(wanted.items()) in covered:
                continue
            for attempt in range(12):
                further = {axis: values[rng.integers(len(values))] for axis, values in axes.items()
                           if rng.random() < 0.6 - 0.05 * attempt}  # fmt: skip
                case = {**further, **wanted}
                reason = refusal(name, case)
                if not reason:
                    found.append(case)
                    covered |= {frozenset(some) for some in itertools.combinations(case.items(), 2)}
                    break
                refused[reason] = None
    return found or [{}], [*refused]


@cache
def parts() -> Parts:
    return Parts(resolve({**SMALL, "method": "local"}))


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the exchanges that --adaptive has decided about, from now on."""
    found: Counter[str] = Counter()
    due = Trigger.due

    def counted(self: Trigger, *arguments: Any) -> list[int]:
        found["exchanges"] += len(self.blocks)
        return due(self, *arguments)

    monkeypatch.setattr(Trigger, "due", counted)
    return found


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_every_pair_of_options_trains(
    name: str, every: int, tmp_path: Path, possible: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The quick tests train a part of the cases."""
    found, _ = cases(name)
    seen = count_images(monkeypatch)
    for number, case in enumerate(found[::every]):
        seen.clear()
        possible.clear()
        config = resolve({**SMALL, "method": name, "out": str(tmp_path / str(number)), **case})
        ranks = REPLICAS + declared.servers(name, config.center)
        parts().reset()
        run = SimulatedRun(config, parse(CLUSTER), ranks, Signals(), parts=parts())
        summary = run.begin(lambda run=run: RunFolder.create(run.config))
        assert np.isfinite([summary["test_loss"], summary["consensus_distance"]]).all(), case
        assert set(seen.values()) == {EPOCHS} and len(seen) == IMAGES, case
        assert summary["samples"] == EPOCHS * IMAGES, case
        decided = summary.get("exchanges", 0) + summary.get("exchanges_suppressed", 0)
        if name == "gossip":  # what cannot be sent is due again
            assert decided <= possible["exchanges"], case
        else:
            assert decided == possible["exchanges"], case
        assert bool(decided) == (case.get("adaptive", "none") != "none"), case


@pytest.mark.parametrize("name", METHODS)
def test_what_is_refused_is_refused_in_one_line(name: str) -> None:
    for reason in cases(name)[1]:
        assert "\n" not in reason and 20 < len(reason) < 250
