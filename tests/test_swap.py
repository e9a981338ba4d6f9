"""Gossip by swaps: the average of all models does not change, whatever the delays, deaths and ends of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_replicas import LINK, Group, config_of, engine_of, run, spread

from minidl.comm.cluster import Cluster, Event, uniform
from minidl.comm.fabric.base import Column, Fabric, Header, Message, Trust
from minidl.comm.methods import swap
from minidl.comm.methods.base import Method
from minidl.comm.methods.gossip import Gossip
from minidl.comm.methods.momentum import Mixed, Momentum
from minidl.comm.methods.swap import NOTHING, Swaps
from minidl.comm.replica import Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.errors import ConfigError


def direction(rank: int, size: int) -> np.ndarray:
    """Return the constant gradient of a replica, (n,)."""
    return np.random.default_rng([rank, size]).standard_normal(size)


def moved(steps: list[int], cluster: Cluster | int, **options: Any) -> tuple[Group, float]:
    """Train with constant gradients from scattered models. Return the replicas, and how wrong their average is.

    Without mixing, the average moves by the mean over the replicas of steps * gradient. The error is relative to this.
    """

    def after(method: Method, step: int) -> None:
        theta = method.replica.theta
        theta -= direction(method.fabric.rank, theta.size).astype(np.float32)

    options = {"lr": 0.0, "start": "scattered", "exchange": "swap", **options}
    begin = run("gossip", len(steps), 0, **options).theta()
    end = run("gossip", len(steps), steps, cluster=cluster, around=(lambda method, step: None, after), **options)
    way = np.mean([made * direction(rank, begin.shape[1]) for rank, made in enumerate(steps)], axis=0)
    error = end.theta().mean(axis=0) - (begin.mean(axis=0) - way)
    return end, float(np.linalg.norm(error) / np.linalg.norm(way))


@settings(max_examples=25)
@given(
    st.lists(st.integers(5, 40), min_size=2, max_size=5), st.integers(1, 3), st.floats(-6, -2), st.integers(1, 3),
    st.sampled_from(["uniform", "hierarchical"]), st.sampled_from(["none", "drift"]), st.integers(0, 99),
    st.sampled_from(swap.CODES),
)  # fmt: skip
def test_the_average_moves_by_gradients_only(
    steps: list[int], per_node: int, delay: float, period: int, peer: str, adaptive: str, seed: int, compress: str
) -> None:
    """Models arrive up to hundreds of steps late, and the replicas stop at different times."""
    slow = uniform(len(steps), per_node, alpha=10**delay, beta=1e-8)
    _, error = moved(steps, slow, period=period, peer=peer, adaptive=adaptive, seed=seed, inside=0.5, compress=compress)
    assert error < 1e-5


@pytest.mark.parametrize("compress", swap.CODES)
def test_models_are_exchanged_though_they_are_old(compress: str) -> None:
    """A model crosses the link in about ten steps. The average contains no error of a code."""
    slow = uniform(4, 1, alpha=1e-4, beta=1e-9)
    end, error = moved([200] * 4, slow, compress=compress)
    stats = [fabric.stats for fabric in end.fabrics.values()]
    models = sum(sum(each.ages) for each in stats)
    assert models > 30 and sum(each.age_sum for each in stats) > 5 * models and error < 1e-5
    if compress == "none":
        assert moved([200] * 4, slow, exchange="push")[1] > 0.05, "`moved` cannot fail"


@pytest.mark.parametrize("velocity", ["local", "mixed"])
def test_replicas_that_only_swap_reach_consensus(velocity: str) -> None:
    begin = run("gossip", 6, 0, lr=0.0, start="scattered", cluster=3)
    end = run("gossip", 6, 60, lr=0.0, start="scattered", cluster=3, exchange="swap", peer="hierarchical", inside=0.5,
              velocity=velocity, momentum=0.0 if velocity == "local" else 0.9)  # fmt: skip
    assert spread(end.theta()) < 0.1 * spread(begin.theta())
    np.testing.assert_allclose(end.theta().mean(axis=0), begin.theta().mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("compress, bits", [("bf16", 8), ("int8", 7)])
def test_replicas_agree_up_to_the_last_bit_of_a_code(compress: str, bits: int) -> None:
    """A velocity is in the same code as its model."""
    largest = abs(run("gossip", 6, 0, lr=0.0, start="scattered").theta()).max()
    end = run("gossip", 6, 200, lr=0.0, start="scattered", cluster=3, exchange="swap", compress=compress,
              velocity="mixed", momentum=0.9)  # fmt: skip
    assert 0 < spread(end.theta()) < 2 * largest * 2.0**-bits


@pytest.mark.parametrize("compress, nbytes", [("none", 4), ("bf16", 2), ("int8", 1)])
def test_the_bytes_of_codes_are_counted(compress: str, nbytes: int) -> None:
    """Within a node each message is a model. int8 sends one scale more."""
    end = run("gossip", 2, 30, cluster=2, exchange="swap", compress=compress)
    stats, size = [fabric.stats for fabric in end.fabrics.values()], end.theta().shape[1]
    models, scale = sum(sum(each.sent_messages) for each in stats), 4 * (compress == "int8")
    assert models > 10 and sum(sum(each.sent_bytes) for each in stats) == models * (nbytes * size + scale)


def test_the_trigger_is_not_asked_while_a_swap_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it would count these steps as suppressed exchanges, and --exchange-rate would lower the threshold."""
    unfinished: list[bool] = []
    due = Gossip.due_blocks

    def noted(method: Gossip) -> list[int]:
        assert method.swaps
        unfinished.append(method.swaps.unfinished())
        return due(method)

    monkeypatch.setattr(Gossip, "due_blocks", noted)
    run("gossip", 4, 40, cluster=uniform(4, 2, alpha=1e-3, beta=1e-8), exchange="swap", adaptive="drift")
    assert 10 < len(unfinished) < 4 * 40 and not any(unfinished)


def test_a_velocity_moves_with_its_model() -> None:
    replica = Replica(engine_of("sgd", 0.9, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    replica.theta[:], replica.state["velocity"][:] = 1, 2
    sent, received = (np.repeat(np.float32(both), replica.theta.size) for both in ([3, 4], [5, 8]))
    Mixed(replica, config_of("gossip")).move(received, sent, 0.5)
    assert (replica.theta == 1 + 1).all() and (replica.state["velocity"] == 2 + 2).all()


def test_a_death_is_survived() -> None:
    """The others finish their steps, and keep no copy for the dead one."""
    whole = run("gossip", 4, 40, cluster=2, exchange="swap")
    cluster = replace(uniform(4, 2, **LINK), deaths=(Event(time=whole.seconds / 2, rank=2),))
    seen: list[set[int]] = []

    def after(method: Method, step: int) -> None:
        if step == 39:
            seen.append({*method.swaps.sent, *method.swaps.owed})

    end = run("gossip", 4, 40, cluster=cluster, exchange="swap", around=(lambda method, step: None, after))
    assert end.methods[2].replica.steps < 40
    assert all(end.methods[rank].replica.steps == 40 for rank in (0, 1, 3))
    assert len(seen) == 3 and not any(2 in peers for peers in seen)
    assert not any(method.swaps.sent or method.swaps.owed for rank, method in end.methods.items() if rank != 2)


# One replica, whose messages the test delivers.


class Table(LoopbackTransport):
    """The transport of rank 0 of three on two nodes: 1 is on its node. The others exist only in `status`."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.nodes, self.replicas = 3, (0, 0, 1), (0, 1, 2)
        self.status, self.trust = np.zeros((3, len(Column))), np.zeros(3, np.int64)


class Lonely:
    """Swaps of a replica with the weights 0. pushed: the peers to which it has sent. free: whether it can send."""

    def __init__(self) -> None:
        self.fabric = Fabric(Table())
        self.replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), self.fabric, own=True)
        self.x = self.replica.theta
        self.x[:] = 0
        self.pushed: list[int] = []
        self.asked: list[int] = []
        self.free = True
        momentum = Momentum(self.replica, config_of("gossip"))
        self.swaps = Swaps(self.fabric, momentum, lambda peer, *model: self.free and not self.pushed.append(peer))
        self.fabric.send = lambda peer, *parts, **header: self.free and not self.asked.append(peer)  # type: ignore[method-assign,assignment]

    def receives(self, peer: int, value: float | None) -> None:
        vector = NOTHING if value is None else np.full_like(self.x, value)
        self.swaps.receive(Message(peer, vector, Header(), lambda: None))


def test_what_was_sent_counts_and_not_the_model_of_now() -> None:
    one = Lonely()
    assert one.swaps.begin(1) and one.pushed == [1] and not one.asked, "within a node, nobody asks"
    one.x[:] = 10
    assert not one.swaps.begin(1) and not one.swaps.begin(2), "one at a time"
    one.receives(1, 4.0)
    assert (one.x == 12).all() and not one.swaps.sent


def test_a_replica_on_another_node_is_asked_to_send_at_the_same_time() -> None:
    one = Lonely()
    assert one.swaps.begin(2) and one.asked == [2] and not one.pushed
    one.swaps.send_owed()
    assert one.pushed == [2] and not one.swaps.owed
    other = Lonely()
    other.receives(2, None)
    other.swaps.send_owed()
    assert other.pushed == [2] and not other.asked
    other.x[:] = 1
    other.receives(2, 4.0)
    assert (other.x == 3).all()


def test_a_model_that_cannot_be_answered_now_is_mixed_when_it_can() -> None:
    one = Lonely()
    one.free = False
    one.x[:] = 2
    assert not one.swaps.begin(1)
    one.receives(1, 6.0)
    one.swaps.send_owed()
    assert (one.x == 2).all() and not one.pushed
    one.free = True
    one.swaps.send_owed()
    assert (one.x == 4).all() and one.pushed == [1] and not one.swaps.owed and not one.swaps.sent


def test_a_swap_with_a_frozen_replica_prevents_no_other() -> None:
    one = Lonely()
    one.swaps.begin(1)
    one.fabric.trust[1] = Trust.SUSPECTED
    one.swaps.on_membership()
    assert one.swaps.begin(2)
    one.receives(1, 4.0)
    assert (one.x == 2).all(), "it has woken, and finishes its swap"


def test_an_answer_is_not_answered() -> None:
    one = Lonely()
    one.swaps.receive(Message(1, np.ones_like(one.x), Header(marker=True), lambda: None))
    assert not one.pushed and not one.swaps.owed and not one.x.any()


def test_at_the_end_a_swap_is_finished_and_none_begins() -> None:
    one = Lonely()
    one.swaps.begin(1)
    for peer, vector in ((1, NOTHING), (2, np.full_like(one.x, 6)), (1, np.full_like(one.x, 4))):
        one.swaps.end(Message(peer, vector, Header(), lambda: None))
    assert (one.x == 2).all() and one.pushed == [1]


def test_swaps_with_the_dead_and_their_successors_are_dropped() -> None:
    one = Lonely()
    one.swaps.begin(1)
    one.receives(2, None)
    one.swaps.send_owed()
    assert one.pushed == [1], "what was asked for waits for the present swap"
    one.swaps.on_membership()
    assert [*one.swaps.sent, *one.swaps.owed] == [1, 2], "both live"
    one.fabric.status[2, Column.INCARNATION] = 1
    one.swaps.on_membership()
    assert [*one.swaps.sent, *one.swaps.owed] == [1]


@pytest.mark.parametrize("options, error", [
    ({"mix": "mass"}, "--exchange swap excludes --mix mass"), ({"mix": "clock"}, "excludes --mix clock"),
    ({"block": "layers"}, "exchange swap excludes block layers"),
    ({"compress": "topk:0.1"}, "compress topk:0.1 keeps too little of a whole model"),
])  # fmt: skip
def test_what_cannot_keep_the_average_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        run("gossip", 2, 1, exchange="swap", **options)
