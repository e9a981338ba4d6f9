"""Gossip: replicas reach consensus for all combinations of options, mass is conserved, and deaths are survived."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick
from toy_replicas import LINK, Group, batch_of, config_of, run, spread

from minidl.comm.cluster import Event, uniform
from minidl.comm.fabric.base import Column, Fabric, Header, State, Trust
from minidl.comm.methods import peers, weighing
from minidl.comm.methods.base import Method
from minidl.comm.replica import Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.vectors import VectorArithmetic
from minidl.data.seeds import Purpose, generator
from minidl.errors import MinidlError

AXES = [dict(zip(("exchange", "peer", "mix", "block"), choice, strict=True)) for choice in itertools.product(
    ("push", "pull", "push-pull"), ("uniform", "topology", "hierarchical", "speed"), ("half", "mass", "clock"),
    ("whole", "layers"),
) if choice[::2] != ("pull", "mass")]  # fmt: skip


def mass(group: Group) -> np.ndarray:
    """Return the mass of each block, summed over all replicas: (blocks,).

    With mix="mass", the mass is a replica's weight in the average. A block is the whole model or one layer.
    """
    return np.sum([method.weighing.mass for method in group.methods.values()], axis=0)


def weighted(group: Group) -> np.ndarray:
    """Return the average of all models (n,), weighted by mass."""
    total = np.zeros(group.theta().shape[1])
    for method in group.methods.values():
        for (start, stop), w in zip(method.blocks, method.weighing.mass, strict=True):
            total[start:stop] += w * method.replica.theta[start:stop]
    return total / len(group.methods)


@pytest.mark.parametrize("axes", quick(AXES, *AXES[::3]), ids=lambda axes: "-".join(axes.values()))
def test_replicas_that_only_mix_reach_consensus(axes: dict[str, Any]) -> None:
    """With learning rate 0 the spread shrinks. With mix="mass" the weighted average does not change."""
    ranks = 6
    steps = 90 if axes["block"] == "layers" else 30
    begin = run("gossip", ranks, 0, lr=0.0, start="scattered", cluster=3, **axes)
    end = run("gossip", ranks, steps, lr=0.0, start="scattered", cluster=3, inside=0.5, **axes)
    assert spread(end.theta()) < 0.1 * spread(begin.theta())
    if axes["mix"] == "mass":
        assert (mass(end) == ranks).all()
        np.testing.assert_allclose(weighted(end), begin.theta().mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("exchange", ["push", "push-pull"])
@pytest.mark.parametrize("block", ["whole", "layers"])
def test_no_mass_is_lost_while_replicas_train(exchange: str, block: str) -> None:
    """The links are so slow that some messages are not sent, and the replicas stop at different times."""
    slow = uniform(5, alpha=2e-5, beta=1e-7)
    end = run("gossip", 5, (60, 20, 45, 33, 51), cluster=slow, mix="mass", exchange=exchange, block=block)
    assert sum(fabric.stats.skipped for fabric in end.fabrics.values()) > 0
    assert (mass(end) == 5).all()


@settings(max_examples=60)
@given(st.integers(2, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=200))
def test_mass_is_conserved_exactly(ranks: int, schedule: list[tuple[int, int, bool]]) -> None:
    """For any order and delay of messages, the mass of all replicas and messages is exactly the number of replicas."""

    class Someone:
        images = 0

    all_ = [weighing.Mass(Someone(), 1) for _ in range(ranks)]  # type: ignore[arg-type]
    on_way: list[tuple[int, Header]] = []
    for sender, receiver, deliver in schedule:
        share = all_[sender % ranks].share(0)
        assert 0 < share <= all_[sender % ranks].mass[0] / 2
        all_[sender % ranks].sent(0, share)
        on_way.append((receiver % ranks, Header(weight=share)))
        if deliver:
            to, header = on_way.pop(0)
            assert 0 < all_[to].weight(header, 0) < 1
        assert sum(w.mass[0] for w in all_) + sum(header.weight for _, header in on_way) == ranks


def test_a_replica_that_only_sends_keeps_some_mass() -> None:
    lonely = weighing.Mass(None, 1)  # type: ignore[arg-type]
    given_away = 0.0
    while share := lonely.share(0):
        lonely.sent(0, share)
        given_away += share
    assert lonely.mass[0] > 0
    assert lonely.mass[0] + given_away == 1


def test_two_replicas_that_push_and_pull_reach_their_mean() -> None:
    """The requests of the two replicas cross, so each request also serves as the reply to the other."""
    end = run("gossip", 2, 2, lr=0.0, start="scattered", exchange="push-pull")
    begin = run("gossip", 2, 0, lr=0.0, start="scattered")
    np.testing.assert_allclose(end.theta(), np.tile(begin.theta().mean(axis=0), (2, 1)), atol=1e-6)


@settings(max_examples=10)
@given(st.integers(2, 4), st.floats(-5, 0), st.sampled_from(["half", "mass"]), st.integers(0, 1000))
def test_a_reply_is_not_answered(ranks: int, delay: float, mix: str, seed: int) -> None:
    """If links are slow, an exchange with a peer begins before the last one has ended."""
    slow = uniform(ranks, 1, alpha=10**delay, beta=1e-9)
    end = run("gossip", ranks, 60, cluster=slow, exchange="push-pull", period=3, mix=mix, seed=seed)
    begun = sum(method.begun for method in end.methods.values())
    assert begun <= sum(fabric.stats.report()["messages"] for fabric in end.fabrics.values()) <= 2 * begun


def test_weight_of_a_received_model() -> None:
    class Someone:
        images = 100

    half, clock, mass = (kind(Someone(), 2) for kind in (weighing.Half, weighing.Clock, weighing.Mass))
    header = Header(weight=0.25, clock=300.0)
    assert half.weight(header, 0) == 0.5
    assert clock.weight(header, 0) == 0.75
    assert mass.weight(header, 1) == 0.2
    assert mass.mass.tolist() == [1, 1.25]
    Someone.images = 0
    assert clock.weight(Header(), 0) == 0.5


def test_a_mixed_velocity_is_sent_with_the_model() -> None:
    def before(method: Method, step: int) -> None:
        if step == 0:
            method.replica.state["velocity"][:] = method.fabric.rank

    end = run("gossip", 4, 40, lr=0.0, momentum=0.999, velocity="mixed", mix="mass", block="layers",
              batch=lambda rank, step: batch_of(0, 0), around=(before, lambda method, step: None))  # fmt: skip
    velocities = np.array([method.replica.state["velocity"] for method in end.methods.values()], np.float64)
    assert spread(velocities) < 0.2


def test_one_layer_per_message() -> None:
    """Each message holds one layer; successive messages send the layers in cyclic order."""
    end = run("gossip", 2, 6, block="layers")
    blocks = end.methods[0].blocks
    sizes = [stop - start for start, stop in blocks]
    assert len(blocks) == 3
    assert blocks[0][0] == 0
    assert blocks[-1][1] == end.theta().shape[1]
    begun = end.methods[0].begun  # not 6: no exchange begins while a message is in flight
    assert 1 < begun < 6
    assert sum(end.fabrics[0].stats.sent_bytes) == 4 * sum(sizes[turn % 3] for turn in range(begun))


def test_period_and_probability_of_exchanges() -> None:
    assert run("gossip", 2, 12, period=5).methods[0].begun == 2
    counts = [run("gossip", 2, 60, probability=0.25, seed=seed).methods[0].begun for seed in range(4)]
    assert 20 < sum(counts) < 100
    assert len(set(counts)) > 1


# Choice of peers.


class Table(LoopbackTransport):
    """The transport of rank 1 among six replicas and a server, on two nodes. The other ranks exist only in `status`."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.nodes, self.replicas = 1, 7, (0, 0, 0, 1, 1, 1, 1), tuple(range(6))
        self.status, self.trust = np.zeros((7, len(Column))), np.zeros(7, np.int64)


def chosen(count: int = 400, **options: Any) -> list[int]:
    """Return how often each rank is chosen."""
    table = options.pop("table", None) or Fabric(Table())
    choose = peers.chooser(table, config_of("gossip", **options), lambda: None)  # type: ignore[arg-type,return-value]
    found = [choose(generator(Purpose.GOSSIP, 0, 1, step)) for step in range(count)]
    assert None not in found
    return np.bincount(np.array(found, int), minlength=7).tolist()


def test_choice_excludes_itself_servers_and_dead_or_paused_replicas() -> None:
    table = Fabric(Table())
    table.status[4, Column.STATE], table.status[5, Column.STATE] = State.DEAD, State.PAUSED
    counts = chosen(table=table)
    assert counts[1] == counts[4] == counts[5] == counts[6] == 0  # 6 is a server
    assert min(counts[0], counts[2], counts[3]) > 90
    table.trust[2] = Trust.SUSPECTED
    counts = chosen(table=table)
    assert not counts[2] and min(counts[0], counts[3]) > 150


def test_hierarchical_choice_is_mostly_within_the_node() -> None:
    counts = chosen(peer="hierarchical", inside=0.8)
    assert 280 < counts[0] + counts[2] < 360
    table = Fabric(Table())
    table.status[[0, 2], Column.STATE] = State.DEAD
    assert sum(chosen(peer="hierarchical", inside=1.0, table=table)[3:6]) == 400  # no other peer is left on the node


def test_choice_in_proportion_to_speed() -> None:
    table = Fabric(Table())
    assert min(np.delete(chosen(peer="speed", table=table)[:6], 1)) > 50  # no speed is known yet
    table.status[:6, Column.SPEED] = 100, 100, 100, 0, 200, 400
    counts = chosen(800, peer="speed", table=table)
    assert counts[3] == counts[1] == 0
    assert 60 < counts[0] < 140
    assert counts[5] > 1.5 * counts[4] > 2 * counts[0]


def test_no_choice_if_all_peers_are_dead() -> None:
    table = Fabric(Table())
    table.status[[0, 2, 3, 4, 5], Column.STATE] = State.DEAD
    for peer in ("uniform", "hierarchical", "speed"):
        choose = peers.chooser(table, config_of("gossip", peer=peer), lambda: None)  # type: ignore[arg-type,return-value]
        assert choose(np.random.default_rng(0)) is None


# Faults and statistics.


@pytest.mark.parametrize("axes", AXES[::5], ids=lambda axes: "-".join(axes.values()))
def test_a_death_is_survived(axes: dict[str, Any]) -> None:
    """The other replicas finish. The mass of the dead replica and of messages to or from it is lost, so the masses of
    the others sum to at most 4."""
    whole = run("gossip", 4, 40, cluster=2, **axes)
    cluster = replace(uniform(4, 2, **LINK), deaths=(Event(time=whole.seconds / 2, rank=2),))
    end = run("gossip", 4, 40, cluster=cluster, **axes)
    assert end.methods[2].replica.steps < 40
    left = {rank: method for rank, method in end.methods.items() if rank != 2}
    assert all(method.replica.steps == 40 for method in left.values())
    if axes["mix"] == "mass":
        held = sum(method.weighing.mass for method in left.values())
        assert ((held > 0) & (held <= 4)).all()


def test_staleness_with_a_slow_replica() -> None:
    """A step of rank 1 takes as long as four of rank 0, so rank 1 mixes in models up to four steps old."""
    end = run("gossip", 2, (40, 10), batch=lambda rank, step: batch_of(rank, step, size=32 if rank else 8))
    assert 2 <= end.fabrics[1].stats.age_max <= 4
    assert end.fabrics[0].stats.age_max <= 1


def test_saved_state_restores_mass_and_count() -> None:
    end = run("gossip", 3, 8, mix="mass", block="layers", velocity="mixed", momentum=0.9)
    method = end.methods[1]
    vectors, numbers = method.vectors(), method.numbers()
    assert vectors["mass"].shape == (3,)
    assert vectors["mass"].dtype == np.float64
    assert 0 < numbers["begun"] <= 8
    other = run("gossip", 3, 0, mix="mass", block="layers").methods[1]
    other.restore(vectors, numbers)
    assert (other.weighing.mass == method.weighing.mass).all()
    assert other.begun == method.begun


@pytest.mark.parametrize("call", ["elastic", "drift", "axpy", "mix_into", "scale", "pull"])
def test_vectors_of_different_lengths_are_refused(call: str) -> None:
    arithmetic = VectorArithmetic()
    arithmetic.fabric = Fabric(LoopbackTransport())
    x, y = np.arange(4, dtype=np.float32), np.ones(6, np.float32)
    arguments = {"elastic": (x, y, 0.5), "drift": (x, y), "axpy": (0.5, x, y), "mix_into": (x, y, 0.5),
                 "pull": (x, y, 0.5, x)}  # fmt: skip
    with pytest.raises(MinidlError, match="vectors of 4 and 6 elements"):
        getattr(arithmetic, call)(*arguments.get(call, (x, 2.0, y)))
    assert x.tolist() == [0, 1, 2, 3] and (y == 1).all()


def test_the_whole_of_mix_movement_counts_as_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica.__new__(Replica)
    replica.fabric, replica.lr, replica.own = Fabric(LoopbackTransport()), 0.5, True
    replica._theta = np.ones(4, np.float32)
    spans: list[str] = []
    monkeypatch.setattr(replica.fabric.stats, "worked", lambda what, began, ended: spans.append(what))
    velocity = np.zeros(4, np.float32)
    replica.mix_movement(velocity, np.full(4, 2, np.float32), 0.5)
    assert velocity.tolist() == [1] * 4 and spans == ["mix"] * 2, "the movement, and the mix"
