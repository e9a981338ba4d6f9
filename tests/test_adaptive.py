"""Adaptive communication: the rule, the steering, and each method with it on a simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick
from toy_replicas import LINK, Group, config_of, easy_batch, engine_of, run, spread

from minidl.comm import codecs
from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import Fabric
from minidl.comm.methods import adaptive
from minidl.comm.methods.adaptive import GAIN, Trigger
from minidl.comm.methods.base import Method
from minidl.comm.replica import Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.errors import ConfigError

# The methods that take --adaptive, and the options with which all exchange in the same steps on every run.
METHODS: dict[str, dict[str, Any]] = {
    "gossip": {"method": "gossip"},
    "gossip layers": {"method": "gossip", "block": "layers", "mix": "mass"},
    "gossip pull": {"method": "gossip", "exchange": "pull"},
    "gossip push-pull": {"method": "gossip", "exchange": "push-pull", "velocity": "mixed", "momentum": 0.9},
    "dpsgd": {"method": "dpsgd", "topology": "ring"},
    "dpsgd matching": {"method": "dpsgd", "topology": "matching", "velocity": "mixed", "momentum": 0.9},
    "local-sgd": {"method": "local-sgd", "period": 2},
    "easgd": {"method": "easgd", "center": "beside"},
    "easgd overlap": {"method": "easgd", "center": "rank", "overlap": True},
    "sync-easgd": {"method": "sync-easgd"},
    "sync-easgd rank": {"method": "sync-easgd", "center": "rank", "overlap": True, "period": 2},
    "async-easgd": {"method": "async-easgd"},
    "eamsgd": {"method": "eamsgd", "period": 2},
    "hogwild-easgd": {"method": "hogwild-easgd"},
    "easgd compressed": {"method": "easgd", "center": "rank", "compress": "int8"},
    "sync-easgd compressed": {"method": "sync-easgd", "compress": "topk:0.1"},
    "async-easgd compressed": {"method": "async-easgd", "compress": "randk:0.2"},
    "eamsgd compressed": {"method": "eamsgd", "compress": "sign"},
}
DECIDE_TOGETHER = ("local-sgd", "sync-easgd", "sync-easgd rank", "sync-easgd compressed")


def train(name: str, steps: int, replicas: int = 4, **options: Any) -> Group:
    own = {**METHODS[name], "rho": 0.5, **options}
    method = own.pop("method")
    return run(method, replicas + (own.get("center") == "rank"), steps, batch=easy_batch, **own)


def counted(group: Group, name: str) -> int:
    """Return a number of the statistics, summed over the replicas."""
    reports = [group.fabrics[rank].stats.report() for rank in group.fabrics[0].replicas]
    return sum(report[name] for report in reports)


def trigger(**options: Any) -> Trigger:
    """Return a trigger for a replica whose theta is a random vector."""
    config = config_of("gossip", **{"adaptive": "drift", "longest_silence": 1000, **options})
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    replica.theta[:] = np.random.default_rng(0).standard_normal(replica.theta.size)
    blocks = replica.layers() if config.block == "layers" else ()
    found = adaptive.build(replica, config, blocks)
    assert found
    return found


def step(one: Trigger) -> list[int]:
    """Make a step, and exchange what is due. Return the blocks."""
    one.replica.steps += 1
    due = one.due()
    for block in due:
        one.exchanged(block)
    return due


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_a_rotation_triggers_drift_and_not_the_norm_rule() -> None:
    for rule, expected in (("drift", [0]), ("norm", [])):
        one = trigger(adaptive=rule, threshold=0.1)
        theta = one.replica.theta
        theta[:] = theta[::-1].copy()  # the norm is the same, up to the order of its sum
        assert step(one) == expected, rule


@pytest.mark.parametrize("rule", ["drift", "norm"])
def test_growth_triggers_both_rules_above_the_threshold(rule: str) -> None:
    for factor, expected in ((1.09, []), (1.11, [0])):
        one = trigger(adaptive=rule, threshold=0.1)
        one.replica.theta[:] *= np.float32(factor)
        assert step(one) == expected


def test_the_first_contact_is_measured_from_the_model_at_the_start() -> None:
    """All replicas begin with the same model, so there is nothing to tell before it has changed."""
    one = trigger(threshold=0.01)
    assert [step(one) for _ in range(5)] == [[]] * 5
    one.replica.theta[3] += np.float32(10)
    assert step(one) == [0] and step(one) == []


def test_a_model_of_zeros() -> None:
    one = trigger()
    one.reference[:] = one.replica.theta[:] = 0
    assert step(one) == []
    one.replica.theta[0] = 1
    assert step(one) == [0]


def test_a_change_that_is_not_a_number_is_exchanged() -> None:
    one = trigger()
    one.replica.theta[0] = np.nan
    assert step(one) == [0]


def test_warm_up_and_the_longest_silence() -> None:
    one = trigger(adaptive_after=3, longest_silence=4)
    assert [bool(step(one)) for _ in range(12)] == [True] * 3 + [False] * 3 + [True] + [False] * 3 + [True, False]


def test_the_shortest_silence() -> None:
    one = trigger(shortest_silence=3, threshold=0.01)
    found = []
    for _ in range(9):
        one.replica.theta[:] *= np.float32(1.1)
        found.append(bool(step(one)))
    assert found == [False, False, True] * 3


def test_each_layer_has_its_own_reference() -> None:
    one = trigger(block="layers", threshold=0.1)
    (start, stop), theta = one.blocks[1], one.replica.theta
    theta[start:stop] *= np.float32(1.2)
    assert step(one) == [1]
    np.testing.assert_array_equal(one.reference[start:stop], theta[start:stop])
    theta *= np.float32(1.15)
    assert sorted(step(one)) == [0, 1, 2]
    assert step(one) == []


def test_a_block_that_could_not_be_sent_is_due_again() -> None:
    one = trigger(threshold=0.1)
    one.replica.theta[:] *= np.float32(2)
    for one.replica.steps in (1, 2, 3):
        assert one.due() == [0]
    one.exchanged()
    one.replica.steps = 4
    assert one.due() == []


def test_the_blocks_that_have_been_silent_longest_come_first() -> None:
    one = trigger(block="layers", longest_silence=1)
    one.last[:] = [0, -5, -2]
    one.replica.steps = 1
    assert one.due() == [1, 2, 0]


def test_the_threshold_of_eventgrad() -> None:
    """The mean slope before the last two exchanges, times the horizon for each step since."""
    one = trigger(adaptive="norm", horizon=0.5, threshold=0.05)
    theta = one.replica.theta
    theta *= np.float32(1.2)
    assert step(one) == [0]
    assert one.threshold[0] == pytest.approx((0.05 + 0.2) / 2, rel=1e-5)
    assert step(one) == step(one) == []
    assert one.threshold[0] == pytest.approx((0.05 + 0.2) / 8, rel=1e-5)
    theta *= np.float32(1.09)
    assert step(one) == [0]
    assert one.threshold[0] == pytest.approx((0.2 + 0.09 / 3) / 2, rel=1e-5)


# -- steering ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.03, 0.9), first=st.floats(1e-4, 1.0), seed=st.integers(0, 9), rule=st.sampled_from(["drift"]))
def test_the_steering_reaches_the_wanted_rate(rate: float, first: float, seed: int, rule: str) -> None:
    """Also if the speed of the movement changes by a factor of 10. The number of exchanges is known exactly."""
    one = trigger(adaptive=rule, exchange_rate=rate, threshold=first)
    rng, theta, steps, exchanges = np.random.default_rng(seed), one.replica.theta, 1500, 0
    for number in range(steps):
        speed = 0.01 if number < steps / 2 else 0.001
        theta += np.float32(speed) * rng.standard_normal(theta.size, np.float32)
        exchanges += len(step(one))
    assert exchanges == pytest.approx(rate * steps + np.log(one.threshold[0] / first) / GAIN, abs=1e-6 * steps)
    assert abs(exchanges / steps - rate) < 0.05


def test_a_run_reaches_the_wanted_rate() -> None:
    for name in ("gossip", "dpsgd", "sync-easgd", "async-easgd", "eamsgd"):
        group = train(name, 400, exchange_rate=0.2, adaptive="drift")
        made, left_out = counted(group, "exchanges"), counted(group, "exchanges_suppressed")
        assert made / (made + left_out) == pytest.approx(0.2, abs=0.04), name


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_with_no_exchange_left_out_the_bits_are_those_of_the_method(name: str) -> None:
    if name == "gossip layers":
        pytest.skip("without --adaptive the layers take turns")
    cluster = uniform(5, 1, **LINK)
    free = replace(cluster, devices={"core": replace(cluster.devices["core"], memory=np.inf)})  # a trigger is free
    found, plain = (train(name, 12, cluster=free, **options) for options in (
        {"adaptive": "drift", "adaptive_after": 100}, {}))  # fmt: skip
    np.testing.assert_array_equal(found.theta([0, 1, 2, 3]), plain.theta([0, 1, 2, 3]))
    assert counted(found, "exchanges") > 0 == counted(found, "exchanges_suppressed")


@pytest.mark.parametrize("rule", quick(["drift", "norm"], "drift"))
@pytest.mark.parametrize("name", METHODS)
def test_replicas_that_never_trigger_do_not_exchange(name: str, rule: str) -> None:
    """They train as if they were alone, until the longest silence ends."""
    group = train(name, 20, adaptive=rule, threshold=1e6)
    assert counted(group, "exchanges") == 0 < counted(group, "exchanges_suppressed")
    longer = train(name, 20, adaptive=rule, threshold=1e6, longest_silence=8)
    assert counted(longer, "exchanges") > 0
    silent = (set(group.fabrics[0].replicas) - {0}) if name.startswith("gossip") else ()
    for rank in silent:
        assert not group.fabrics[rank].stats.report()["bytes_sent"]


@pytest.mark.parametrize("name", DECIDE_TOGETHER)
def test_all_exchange_in_the_same_steps(name: str) -> None:
    group = train(name, 60, adaptive="drift", exchange_rate=0.3, longest_silence=20)
    states = [group.methods[rank].trigger.vectors() for rank in group.fabrics[0].replicas]  # type: ignore[attr-defined]
    assert states[0]["last"][0] > 0
    for vector in ("threshold", "last", "slopes"):
        assert len({state[vector].tobytes() for state in states}) == 1, vector


@pytest.mark.parametrize("name", ["gossip", "gossip layers", "dpsgd", "dpsgd matching"])
def test_the_bytes_sent_and_left_out_are_those_of_every_exchange(name: str) -> None:
    """The fabric counts what was sent."""
    fast = uniform(4, 4, alpha=1e-12, beta=1e-15)
    group = train(name, 100, adaptive="drift", exchange_rate=0.2, cluster=fast)
    sent, left_out = counted(group, "bytes_sent"), counted(group, "bytes_suppressed")
    vectors, models = 2 if "matching" in name else 1, 2 if name == "dpsgd" else 1
    every = 100 * 4 * models * vectors * group.theta()[0].size * 4
    if name == "gossip layers":  # a second layer for the same peer waits for the next step
        assert 0.95 * every < sent + left_out <= every
    else:
        assert sent + left_out == every
    assert 0 < sent < 0.7 * left_out


def test_bytes_are_counted_after_compression() -> None:
    """A visit sends one code. At first, the center is told two whole vectors; at the end, it replies with its model."""
    group = train("easgd compressed", 100, adaptive="drift", exchange_rate=0.2)
    replica = group.methods[0].replica
    code = codecs.build("int8").nbytes(replica.theta.size)  # type: ignore[union-attr]
    sent = sum(group.fabrics[rank].stats.report()["bytes_sent"] for rank in range(4))
    whole = 4 * 2 * replica.theta.nbytes
    assert counted(group, "bytes_suppressed") == code * counted(group, "exchanges_suppressed") > 0
    assert sent - whole == code * counted(group, "exchanges") > 0


@pytest.mark.parametrize(("topology", "weighting"), quick(
    [*product(("ring", "complete", "star"), ("plain", "mixing")), ("matching", "plain")],
    ("ring", "plain"), ("star", "mixing"), ("matching", "plain"),
))  # fmt: skip
def test_dpsgd_conserves_the_average(topology: str, weighting: str) -> None:
    """Replicas that only mix: each has its own trigger, so edges are used at different times.

    With the shares in the mixing matrix, the average is weighted by them.
    """
    shares = (0.1, 0.3, 0.1, 0.3, 0.2) if weighting == "mixing" else (0.2,) * 5
    options: dict[str, Any] = dict(lr=0.0, start="scattered", topology=topology, weighting=weighting, adaptive="drift",
                                   longest_silence=40)  # fmt: skip
    begin = run("dpsgd", 5, 0, **options)
    moved = np.zeros_like(begin.theta())

    def move(method: Method, step: int) -> None:
        """Move each replica, one faster than the other."""
        rank, theta, method.replica.shares = method.fabric.rank, method.replica.theta, shares
        noise = np.random.default_rng([rank, step]).standard_normal(theta.size).astype(np.float32)
        noise *= np.float32(0.002 * rank)
        theta += noise
        moved[rank] += noise

    end = run("dpsgd", 5, 300, threshold=0.05, around=(move, lambda method, step: None), **options)
    np.testing.assert_allclose(np.array(shares) @ end.theta(), np.array(shares) @ (begin.theta() + moved), atol=1e-4)
    assert spread(end.theta()) < 0.2 * spread(begin.theta())
    exchanges = [end.fabrics[rank].stats.report()["exchanges"] for rank in range(5)]
    assert len(set(exchanges)) > 1 and max(exchanges) < 250


@pytest.mark.parametrize("topology", ["exponential", "one-peer-exponential", "uniform"])
def test_dpsgd_refuses_directed_graphs(topology: str) -> None:
    with pytest.raises(ConfigError, match=f"needs an undirected graph, and topology {topology} of 5 replicas is not"):
        run("dpsgd", 5, 1, topology=topology, adaptive="drift")


def test_a_saved_trigger_goes_on_with_the_same_decisions() -> None:
    options: dict[str, Any] = dict(exchange_rate=0.2, block="layers", longest_silence=50)

    def moved(one: Trigger, steps: range) -> list[list[int]]:
        found = []
        for number in steps:
            one.replica.theta[:] += np.float32(0.01) * np.random.default_rng(number).standard_normal(
                one.replica.theta.size, np.float32
            )
            found.append(step(one))
        return found

    whole, again = trigger(**options), trigger(**options)
    moved(whole, range(60))
    again.replica.theta[:], again.replica.steps = whole.replica.theta, whole.replica.steps
    for name, vector in again.vectors().items():
        vector[...] = whole.vectors()[name].copy()
    expected = moved(whole, range(60, 200))
    assert moved(again, range(60, 200)) == expected and any(expected)
    for name, vector in whole.vectors().items():
        assert vector.tobytes() == again.vectors()[name].tobytes(), name


def test_pull_exchanges_one_layer_at_a_time() -> None:
    group = train("gossip pull", 60, block="layers", adaptive="drift", threshold=1e-6)
    for method in group.methods.values():
        assert method.begun <= 60 and (method.trigger.last > 50).all()  # type: ignore[attr-defined]


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    (dict(exchange_rate=0.005), "exchange-rate 0.005: expected 0.01 to 1"),
    (dict(exchange_rate=0.5, shortest_silence=4), "exchange-rate 0.5: expected 0.01 to 0.25"),
    (dict(exchange_rate=0.02, period=5), "exchange-rate 0.02: expected 0.05 to 1"),
    (dict(exchange_rate=0.02, probability=0.2), "exchange-rate 0.02: expected 0.05 to 1"),
    (dict(shortest_silence=9, longest_silence=8), "shortest-silence 9 and longest-silence 8: expected"),
    (dict(velocity="quasi-global", momentum=0.9), "adaptive drift leaves out exchanges, and velocity quasi-global"),
])  # fmt: skip
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("gossip", 2, 1, adaptive="drift", **options)


@pytest.mark.parametrize("options", [{"overlap": True}, {"compress": "int8"}])
def test_dpsgd_excludes_overlap_and_compression(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="adaptive drift excludes overlap and compress with dpsgd"):
        run("dpsgd", 2, 1, topology="ring", adaptive="drift", **options)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_saved_threshold_that_is_not_possible(value: float) -> None:
    for name in METHODS:
        method = train(name, 1, adaptive="drift").methods[1]
        saved = {key: vector.copy() for key, vector in method.vectors().items()}
        saved["threshold"][...] = value
        with pytest.raises(ValueError, match="a threshold of --adaptive is"):
            method.restore(saved, method.numbers())
