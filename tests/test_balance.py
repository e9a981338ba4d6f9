"""Shares by speed: divisions lose and repeat no image, follow the speeds, and continue after stops and deaths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from quick import quick
from sessions import Sessions, count_images

from minidl import data
from minidl.comm.balance import REVIEW, Balancer
from minidl.comm.cluster import parse
from minidl.data.shared import SharedSampler, divide, grain, part_of
from minidl.run.config import resolve
from minidl.run.folder import RunFolder
from minidl.run.signals import Signals, Stopped
from minidl.schema import Mismatch
from minidl.training.balanced import Balanced, part_before
from minidl.training.simulated import SimulatedRun

SMALL: dict[str, Any] = dict(data="synthetic:123x2x2x1:2", model="mlp", batch_size=8, lr=0.01, quiet=True)
CLUSTER = """
devices.fast = {flops = 4e6, jitter = JITTER}
devices.slow = {flops = 1e6, jitter = JITTER}
nodes = [{name = "node", devices = ["fast", "slow", "fast", "slow"]}]
inside = {alpha = 1e-6, rate = 1e12}
"""
speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


# -- divisions ---------------------------------------------------------------------------------------------------------


@given(batch_size=st.integers(1, 200), shares=speeds)
def test_a_division_is_exact_and_of_few_sizes(batch_size: int, shares: list[float]) -> None:
    sizes, images = divide(batch_size, shares), grain(batch_size)
    assert sum(sizes) == batch_size * len(shares) and all(size % images == 0 for size in sizes)
    assert min(sizes) >= min(2, batch_size), "batch norm needs two images"
    total = sum(sizes)
    least = images * -(-2 // images)
    if all(share / sum(shares) * total >= least for share in shares):
        assert all(abs(size - share / sum(shares) * total) < images * (1 + 1e-9) for size, share in zip(sizes, shares))


def test_divisions_of_the_paper() -> None:
    """Moreno-Alvarez et al.: the shares that speeds of 14:5:1 and 8:4:2:1 give."""
    assert divide(20, [14, 5, 1]) == (42, 15, 3)
    assert divide(64, [8, 4, 2, 1]) == (136, 68, 34, 18)
    assert divide(64, [1, 1]) == (64, 64)


@given(images=st.integers(2, 300), division=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_the_last_images_of_an_epoch(images: int, division: list[int]) -> None:
    sizes = part_of(tuple(division), images)
    assert sum(sizes) == images
    assert images == sum(division) or images == 1 or 1 not in sizes, "batch norm needs two images"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_image_is_lost_or_repeated(draw: st.DataObject) -> None:
    """Each division of an epoch is among other replicas, which stop after other steps; each step has other sizes."""
    batch_size, pick = draw.draw(st.integers(1, 12)), draw.draw
    dataset = data.load(f"synthetic:{pick(st.integers(20, 200))}x1x1x1:2", seed=0)
    trained: Counter[int] = Counter()
    parts: list[list[int]] = []
    for last in [*[False] * pick(st.integers(0, 2)), True]:
        replicas = pick(st.integers(1, 4))
        samplers = [SharedSampler(dataset, batch_size, 3, place, replicas, prefetch=0) for place in range(replicas)]
        starts = {sampler.divide_again(1, parts) if parts else 0 for sampler in samplers}
        [start], length = starts, len(samplers[0])
        stop = length if last else pick(st.integers(start, length))
        divisions = [divide(batch_size, pick(st.lists(st.integers(1, 9), min_size=replicas, max_size=replicas)))
                     for _ in range(start, stop)]  # fmt: skip
        counts = [stop if last else pick(st.integers(max(start, stop - 2), stop)) for _ in range(replicas)]
        counts[0] = stop
        for sampler, count in zip(samplers, counts):
            for step in range(start, count):
                x, _ = sampler.batch(1, step, divisions[step - start])
                trained.update(x.reshape(-1).tolist())
        parts.append(samplers[0].part(counts, [[1, *division] for division in divisions], 1))
    assert trained == Counter(dataset.x_train.reshape(-1).tolist())


def test_a_part_that_does_not_fit_is_refused() -> None:
    sampler = SharedSampler(data.load("synthetic:60x1x1x1:2"), 4, 3, 0, 2, prefetch=0)
    for part in ([2, 1, 1, 1, 3, 3], [2, 3, 1, 1, 4, 4], [2, 1], [3, 1, 1, 1, 1, 4, 4], [2, 1, 1, 1, 4]):
        with pytest.raises(Mismatch):
            sampler.divide_again(0, [part])


# -- reviews -----------------------------------------------------------------------------------------------------------


def same(batch_size: int, replicas: int, once: bool = False) -> list[Balancer]:
    """Return the balancers of all replicas."""
    return [Balancer(batch_size, replicas, once=once) for _ in range(replicas)]


def steps_of(balancers: list[Balancer], speeds: Sequence[float], steps: int, fixed: ArrayLike = 0.0,
             slower: Callable[[], ArrayLike] = lambda: 1.0) -> list[float]:  # fmt: skip
    """Make steps in which gradients take (images + fixed) / speed * slower() seconds; return the steps' durations."""
    durations, first = [], balancers[0]
    for _ in range(steps):
        if not first.due and not first.constant:
            measured = np.array([one.measured for one in balancers])
            for one in balancers:
                one.review(measured)
        assert all(one.state() == first.state() for one in balancers)
        seconds = (np.array(first.division) + fixed) / speeds * slower()
        durations.append(float(seconds.max()))
        for one, own in zip(balancers, seconds, strict=True):
            one.stepped(float(own), True)
    return durations


@pytest.mark.parametrize("before", [[4.0, 1.0], [2.0, 2.0], [5.0, 3.0, 1.0]])
@pytest.mark.parametrize("fixed", [0.0, 8.0])
def test_a_replica_that_slows_down_or_recovers_has_another_share_within_twelve_steps(
    before: list[float], fixed: float
) -> None:
    balancers = same(64, len(before))
    whole = (64 + fixed) * len(before)
    assert steps_of(balancers, before, 40, fixed)[-1] <= 1.05 * whole / sum(before)
    slowed = [before[0] / 2, *before[1:]]
    assert steps_of(balancers, slowed, 20, fixed)[12] <= 1.05 * whole / sum(slowed)
    assert steps_of(balancers, before, 20, fixed)[12] <= 1.05 * whole / sum(before)
    assert len(balancers[0].known) <= 4


def test_the_fixed_part_of_a_gradient_is_found() -> None:
    balancers = same(64, 2)
    steps_of(balancers, [4.0, 1.0], 13, 16.0)
    np.testing.assert_allclose(balancers[0].fixed, 16.0, rtol=1e-3)
    assert balancers[0].coming == (112, 16), "112 + 16 images at speed 4, 16 + 16 at speed 1"


@pytest.mark.parametrize("seed", range(3))
def test_few_divisions_are_close_to_the_best_in_spite_of_noise(seed: int) -> None:
    """Times vary by 7%, and one in 30 is twice as long. Then replica 0 becomes twice as slow, and recovers."""
    rng, balancers, fixed = np.random.default_rng(seed), same(64, 2), 4.0

    def slower() -> ArrayLike:
        return (1 + 0.07 * np.abs(rng.standard_normal(2))) * np.where(rng.random(2) < 1 / 30, 2.0, 1.0)

    for speeds in [(4.0, 1.0), (2.0, 1.0), (4.0, 1.0)]:
        best = (128 + 2 * fixed) / sum(speeds) * np.mean([np.max(slower()) for _ in range(1000)])
        durations = steps_of(balancers, speeds, 50, fixed, slower)
        assert np.median(durations[16:]) <= 1.05 * best and np.mean(durations[16:]) <= 1.1 * best
    assert len(balancers[0].known) <= 5


@pytest.mark.parametrize("at", range(REVIEW))
def test_four_disturbed_steps_change_nothing(at: int) -> None:
    balancers = same(64, 2)
    steps_of(balancers, [3.0, 1.0], 40 + at)
    settled, known = balancers[0].division, len(balancers[0].known)
    for speed, steps in [(0.5, REVIEW), (3.0, 12)]:
        for _ in range(steps):
            steps_of(balancers, [speed, 1.0], 1)
            assert balancers[0].division == balancers[0].coming == settled
    assert len(balancers[0].known) == known


def test_a_small_gain_changes_nothing() -> None:
    balancers = same(64, 2)
    for one in balancers:
        one.known.append((66, 62))
    steps_of(balancers, [1.06, 1.0], 20)
    assert balancers[0].division == (64, 64), "steps would be 2.7% shorter"
    steps_of(balancers, [1.09, 1.0], 20)
    assert balancers[0].division == (66, 62), "3.1%"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_run_has_few_sizes(seed: int) -> None:
    rng, balancers = np.random.default_rng(seed), same(48, 3)
    for _ in range(60):
        steps_of(balancers, (10 * rng.random(3) + 0.1).tolist(), 4)
    assert len(balancers[0].known) <= 8 and balancers[0].division in balancers[0].known


def test_static_shares_are_measured_once() -> None:
    balancers = same(64, 2, once=True)
    steps_of(balancers, [3.0, 1.0], 4 * REVIEW)
    assert balancers[0].division == (96, 32) and balancers[0].constant
    steps_of(balancers, [1.0, 3.0], 40)
    assert balancers[0].division == (96, 32)


# -- runs in virtual time ----------------------------------------------------------------------------------------------


def simulated(folder: Path, at: dict[float, dict[int, float]] | None = None, jitter: float = 0.0, resume: bool = False,
              stop: float = 0.0, ranks: int = 4, **options: Any) -> SimulatedRun:  # fmt: skip
    """Train in virtual time. at: {virtual seconds: {rank: factor by which its images take longer from then on}}."""
    config, signals = resolve({**SMALL, "out": str(folder), **options}), Signals()
    cluster = CLUSTER.replace("JITTER", str(jitter))
    run = SimulatedRun(config, parse(cluster), ranks, signals, resume=folder if resume else None)

    def slow(factors: dict[int, float]) -> None:
        for rank, factor in factors.items():
            run.simulation.image_seconds[rank] *= factor

    for time, factors in (at or {}).items():
        run.simulation.at(time, slow, factors)
    if stop:
        run.simulation.at(stop, setattr, signals, "received", 2)
    with suppress(Stopped):
        if resume:
            run.go_on({})
        else:
            run.begin(lambda: RunFolder.create(run.config, "", cluster))
    return run


@pytest.mark.parametrize("method", ["allreduce", "dpsgd", "local-sgd"])
def test_each_image_is_trained_once_an_epoch(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """123 images do not fill the last global batch. The divisions change meanwhile."""
    seen = count_images(monkeypatch)
    run = simulated(tmp_path / "run", {0.02: {0: 3.0}}, 0.3, method=method, balance="dynamic", epochs=12)
    assert set(seen.values()) == {12} and len(seen) == 123
    work = run.sessions[0].trainer.work
    assert isinstance(work, Balanced) and len(work.balancer.known) > 1
    assert run.results[0]["samples"] == 12 * 123  # type: ignore[index, call-overload]


@pytest.mark.parametrize("balance", ["static", "dynamic"])
def test_balance_follows_the_speeds(balance: str, tmp_path: Path) -> None:
    """Speeds 4:1:4:1: equal batches reach 40% of their sum. Then a fast replica becomes four times slower."""
    options: dict[str, Any] = dict(method="allreduce", steps=70, batch_size=64, data="synthetic:1024x2x2x1:2")
    equal = simulated(tmp_path / "equal", **options).simulation.time
    found = simulated(tmp_path / "run", balance=balance, **options)
    division = found.sessions[0].trainer.work.balancer.division  # type: ignore[attr-defined]
    assert division == (102, 26, 102, 26)
    assert found.simulation.time < 0.5 * equal
    later = simulated(tmp_path / "later", {0.3 * found.simulation.time: {0: 4.0}}, balance=balance, **options)
    sizes = later.sessions[0].trainer.work.shares()
    expected = [1 / 7, 1 / 7, 4 / 7, 1 / 7] if balance == "dynamic" else [0.4, 0.1, 0.4, 0.1]
    np.testing.assert_allclose(sizes, expected, atol=0.01)


def test_shares_are_given(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", method="dpsgd", balance="static", shares="0.5,0.25,0.125,0.125", epochs=2)
    assert run.sessions[3].trainer.work.shares() == (0.5, 0.25, 0.125, 0.125)


@pytest.mark.parametrize(("method", "options"), [
    ("allreduce", {"balance": "dynamic"}), ("dpsgd", {"balance": "dynamic", "topology": "ring"}),
    ("dpsgd", {"balance": "static", "weighting": "mixing", "topology": "ring"}),
    ("local-sgd", {"balance": "static", "shares": "0.4,0.1,0.4,0.1", "weighting": "share"}),
])  # fmt: skip
@pytest.mark.parametrize("part", quick([0.13, 0.31, 0.64], 0.64))
def test_a_resumed_run_ends_with_the_same_bits(
    method: str, options: dict[str, Any], part: float, tmp_path: Path
) -> None:
    options = dict(options, method=method, epochs=8, jitter=0.3)
    whole = simulated(tmp_path / "whole", **options)
    simulated(tmp_path / "run", stop=part * whole.simulation.time, **options)
    again = simulated(tmp_path / "run", resume=True, **options)
    for rank, session in whole.sessions.items():
        np.testing.assert_array_equal(
            again.sessions[rank].trainer.replica.theta, session.trainer.replica.theta, err_msg=f"replica {rank}"
        )


@pytest.mark.parametrize("method", ["allreduce", "dpsgd"])
@pytest.mark.parametrize("after", [2, 4])
def test_other_replicas_continue(
    method: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch that was interrupted is divided again: none of its images is lost, and none trained twice."""
    options = dict(SMALL, epochs=3, method=method, balance="dynamic")
    whole = Sessions(tmp_path / "whole", 3, {}, **options)
    seen = count_images(monkeypatch)
    run = Sessions(tmp_path / "run", 3, {}, stop=0.55 * whole.simulation.time, **options)
    assert run.summary is None and not run.errors and run.last().state["progress"]["batch"] > 0
    again = Sessions(tmp_path / "run", after, {})
    assert again.summary and set(seen.values()) == {3} and len(seen) == 123


@pytest.mark.parametrize("method", ["allreduce", "dpsgd", "local-sgd"])
@pytest.mark.parametrize("part", quick([0.2, 0.5, 0.8], 0.5))  # scenarios draw more moments
def test_the_others_go_on_after_a_death(
    method: str, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is trained in each epoch. Those that the dead replica had trained may be trained again."""
    options = dict(SMALL, epochs=3, method=method, balance="dynamic", on_death="continue")
    whole = Sessions(tmp_path / "whole", 3, {}, **options)
    seen = count_images(monkeypatch)
    run = Sessions(tmp_path / "run", 3, {1: part * whole.simulation.time}, **options)
    assert run.summary and run.summary["replicas_alive"] == 2
    assert len(seen) == 123 and min(seen.values()) == 3
    repeated = sum(seen.values()) - 3 * 123
    assert repeated <= (1 if method == "allreduce" else 8) * 24, "at most a few steps of all are repeated"


def test_a_newcomer_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(SMALL, epochs=6, method="allreduce", balance="dynamic")
    whole = Sessions(tmp_path / "whole", 2, {}, **options)
    seen = count_images(monkeypatch)
    run = Sessions(tmp_path / "run", 3, {}, joins={2: 0.3 * whole.simulation.time}, **options)
    assert run.summary and run.summary["replicas_alive"] == 3 and set(seen.values()) == {6}


def test_a_saved_division_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    whole = simulated(tmp_path / "run", method="allreduce", balance="dynamic", epochs=4)
    work = whole.sessions[0].trainer.work
    assert isinstance(work, Balanced)
    saved, numbers = work.state()["balance"], work.own_numbers()
    work.restore(saved, numbers)
    for name, value in [("division", [1, 31]), ("coming", [8, 8, 8, 9]), ("known", [[0, 16, 8, 8]]), ("due", 99),
                        ("times", [[1.0, 0.0, 1.0, 1.0]]), ("times", [[1.0]]), ("past", [[1.0] * 4]),
                        ("fixed", [0.0]), ("runs", [[1, 8]])]:  # fmt: skip
        with pytest.raises(Mismatch):
            work.restore({**saved, name: value}, numbers)
    with pytest.raises(Mismatch):
        work.restore(saved, [1.0] * (REVIEW + 1))
    assert part_before(saved, [0, 0, 0, 0], 9)[:5] == [4, 0, 0, 0, 0]
