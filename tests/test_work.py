"""The work of a run is counted in samples: each is trained once an epoch, also after stops and deaths."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import Sessions, count_images
from test_claims import claim, ledgers

from minidl import data, models, nn
from minidl.comm.claims import piece_of
from minidl.comm.cluster import parse
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods import method
from minidl.comm.remote_claims import RemoteClaims, serve
from minidl.comm.replica import Engine
from minidl.comm.stats import Stats, merge
from minidl.comm.transport.sim import Simulation
from minidl.data.sampler import Sampler
from minidl.errors import CheckpointError
from minidl.run.config import resolve
from minidl.run.signals import Stopped
from minidl.training.resume import make_checkpoint, restore
from minidl.training.trainer import Trainer
from minidl.training.work import Claimed

UNEQUAL = """
devices.fast = {flops = 4e6, jitter = 0.2}
devices.slow = {flops = 1e6, jitter = 0.2}
nodes = [{name = "node", devices = ["fast", "slow", "fast", "slow", "slow", "slow", "fast", "fast"]}]
between = {alpha = 1e-6, rate = 1e12}
"""
OPTIONS: dict[str, Any] = dict(data="synthetic:26x2x2x1:2", model="mlp", method="gossip", batch_size=4, epochs=2)


class Group:
    """Replicas that train in virtual time. settled: how often each piece was settled; begun: number of steps begun."""

    def __init__(
        self, ranks: int, cluster: str = UNEQUAL, deaths: dict[int, float] | None = None, stop: float = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        config = resolve(OPTIONS, options)
        lines = ", ".join(f"{{rank = {rank}, time = {time!r}}}" for rank, time in (deaths or {}).items())
        self.simulation = simulation = Simulation(parse(f"{cluster}deaths = [{lines}]"), ranks, flops=1e5)
        self.data = data.load(config.data)
        nn.seed(0)
        model = models.mlp(self.data.input_shape, self.data.classes, hidden=(3,))
        engine = Engine(model, config)
        self.settled: Counter[int] = Counter()
        self.rates: dict[int, float] = {}
        self.epochs: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(ranks)}
        self.moments: set[float] = set()
        plan = simulation.at

        def at(time: float, call: Any, *arguments: Any) -> None:
            self.moments.add(time)
            plan(time, call, *arguments)

        simulation.at = at  # type: ignore[method-assign]
        if stop:
            simulation.at(stop, simulation.stop)
        self.trainers = []
        for transport in simulation.transports:
            fabric = Fabric(transport)
            fabric.join(method(config.method).buffers(engine.arena.size, config), "layout")
            self.trainers.append(Trainer(model, self.data, config, fabric=fabric, engine=engine))
        simulation.run({rank: lambda rank=rank: self.main(rank) for rank in range(ranks)})

    def main(self, rank: int) -> None:
        trainer = self.trainers[rank]
        work, settle = trainer.work, trainer.work.settle
        assert isinstance(work, Claimed)

        def counted(at: Any, *counts: Any) -> bool:
            done = settle(at, *counts)
            self.settled[work.piece] += done
            self.rates[work.piece] = at.lr
            return done

        work.settle = counted  # type: ignore[method-assign]
        trainer.fabric.set_status(Column.STATE, State.TRAINING)
        trainer.fabric.stats.start()
        with suppress(Stopped):
            self.epochs[rank] += [entry for entry in trainer.run() if entry["event"] == "epoch"]
        trainer.fabric.stats.stop()
        work.give_back()
        trainer.fabric.set_status(Column.STATE, State.PAUSED)
        trainer.method.pause()

    @property
    def steps(self) -> list[int]:
        return [trainer.replica.steps for trainer in self.trainers]


def test_a_fast_replica_makes_more_steps() -> None:
    """Eight replicas at speeds 4 and 1 process at least 95% of the sum of their speeds."""
    even = UNEQUAL.replace("jitter = 0.2", "jitter = 0.0")
    group = Group(8, even, data="synthetic:640x2x2x1:2", steps=170)
    assert min(group.steps) >= 60 and sum(group.steps) == 8 * 170
    samples = sum(trainer.replica.images for trainer in group.trainers)
    speeds = (4 * 4e6 + 4 * 1e6) / 1e5  # images/s
    assert samples / group.simulation.time >= 0.95 * speeds
    idle = [fabric.stats.ended for fabric in group.simulation.transports]
    assert 0 < sum(max(idle) - end for end in idle) < 0.05 * 8 * group.simulation.time
    assert all(fabric.stats.report()["seconds"]["waiting"] == 0 for fabric in group.simulation.transports)


def test_every_piece_is_trained_once() -> None:
    group = Group(4)
    assert group.settled == Counter(range(2 * 7)) and group.trainers[0].work.repeated == 0
    fast, slow = group.steps[0], group.steps[1]
    assert fast > slow and sum(group.steps) == 14
    for entries in group.epochs.values():
        assert [entry["epoch"] for entry in entries] == [1, 2], "each replica ends each epoch"
        assert [entry["step"] for entry in entries] == [2, 4] and all(np.isfinite(entry["loss"]) for entry in entries)
    assert sum(entry["images"] for entries in group.epochs.values() for entry in entries) == 2 * 26
    assert {trainer.progress.step for trainer in group.trainers} == {4}, "a step is 1/4 of the batches of all"


def test_the_learning_rate_depends_on_the_samples_of_all() -> None:
    """A piece has the same rate, whichever replica trains it; with one replica it is the rate of the step."""
    rates = [Group(ranks, epochs=4, schedule="cosine").rates for ranks in (1, 4)]
    assert list(rates[0]) == sorted(rates[0]) and len(rates[0]) == 28
    assert rates[0] == pytest.approx(rates[1]) and min(rates[0].values()) < 0.01 * max(rates[0].values())


def test_one_dies_at_every_moment() -> None:
    moments = sorted(Group(3).moments)
    assert len(moments) > 30
    repeated = 0
    for victim in (0, 1):
        for moment in moments:
            group = Group(3, deaths={victim: moment + 1e-12})
            assert group.settled == Counter(range(14)), (victim, moment)
            assert group.trainers[2].work.repeated <= 1, "a replica holds one piece that it has begun"
            repeated += group.trainers[2].work.repeated
            assert group.trainers[2].progress.epoch == 2
    assert repeated > len(moments) / 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_at_every_moment(ranks: int) -> None:
    """Each piece is either settled or left, and the claims of all replicas are given back."""
    for moment in sorted(Group(ranks).moments):
        group = Group(ranks, stop=moment)
        state = group.trainers[0].work.state()
        assert sorted([*group.settled.elements(), *state["left"], *range(state["first"], 14)]) == [*range(14)]
        assert max(group.settled.values(), default=1) == 1 and group.trainers[0].work.repeated == 0


def images_of(batches: Iterator[Any]) -> list[int]:
    return [int(y) for _, labels in batches for y in labels]


def sampler(images: int, batch_size: int, place: int, replicas: int) -> Sampler:
    dataset = data.load("synthetic:96x2x2x1:3")
    dataset = replace(dataset, x_train=dataset.x_train[:images], y_train=np.arange(images))  # the label is the image
    return Sampler(dataset, batch_size, 5, place, replicas, prefetch=0)


@pytest.mark.parametrize("images", [26, 33])
def test_pieces_of_an_epoch_contain_each_sample_once(images: int) -> None:
    """The pieces are the batches of a single replica."""
    one, two = sampler(images, 4, 0, 1), sampler(images, 4, 1, 2)
    for epoch in range(3):
        pieces = [two.piece(epoch * two.pieces + number) for number in range(two.pieces)]
        assert sorted(images_of(iter(pieces))) == list(range(images))
        for (x, y), piece in zip(one.epoch(epoch), pieces, strict=True):
            assert np.array_equal(x, piece[0]) and np.array_equal(y, piece[1])


def test_the_images_left_out_change_with_the_epoch() -> None:
    left = []
    for epoch in range(8):
        seen = {image for place in range(4) for image in images_of(sampler(27, 4, place, 4).epoch(epoch))}
        left.append({*range(27)} - seen)
    assert sampler(27, 4, 0, 4).left_out == 3 and {len(out) for out in left} == {3}
    assert len(set.union(*left)) > 12


@settings(max_examples=60, deadline=None)
@given(st.integers(12, 60), st.integers(1, 8), st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), max_size=3),
       st.integers(1, 5))  # fmt: skip
def test_an_interrupted_epoch_is_divided_again(
    images: int, batch_size: int, stops: list[tuple[int, float]], last: int
) -> None:
    """Replicas stop somewhere in an epoch, others continue, stop, ...: each sample is trained once."""
    seen: list[int] = []
    parts: list[list[int]] = []
    for replicas, part in [*stops, (last, 1.0)]:
        each = [sampler(images, batch_size, place, replicas) for place in range(replicas)]
        starts = {one.divide_again(3, parts) for one in each} if parts else {0}
        [start] = starts
        end = start + int(part * (len(each[0]) - start))
        for one in each:
            seen += images_of(batch for _, batch in zip(range(end - start), one.epoch(3, start)))
        parts.append([end] * replicas)
    assert len(seen) == len(set(seen)) > images - last


def test_a_stopped_run_continues_with_the_samples_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete runs: stopped twice, each time with another number of replicas. Counts the samples of each epoch."""
    options = dict(data="synthetic:122x2x2x1:2", batch_size=8, lr=0.01, epochs=4)
    seen = count_images(monkeypatch)
    whole = Sessions(tmp_path / "whole", 3, {}, method="gossip", **options).simulation.time
    assert set(seen.values()) == {4} and len(seen) == 122
    for name, missing in (("gossip", 0), ("allreduce", 5)):
        seen.clear()
        Sessions(tmp_path / name, 3, {}, stop=0.4 * whole, method=name, **options)
        Sessions(tmp_path / name, 4, {}, stop=0.2 * whole)
        last = Sessions(tmp_path / name, 2, {})
        assert last.summary and last.summary["epochs"] == 4
        assert max(seen.values()) <= 4 and 4 * 122 - missing <= seen.total() <= 4 * 122, name
        assert last.summary["samples"] == 4 * 122
        assert last.summary["batches_repeated"] == 0


def gossiping(**options: Any) -> Trainer:
    config = resolve(OPTIONS, options)
    dataset = data.load(config.data)
    nn.seed(0)
    return Trainer(models.mlp(dataset.input_shape, dataset.classes, hidden=(3,)), dataset, config)


class Remote:
    """A replica whose ledger is on another node. late: its requests are handled so many steps after they were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
        self.trainer = gossiping()
        work, self.late = self.trainer.work, late
        assert isinstance(work, Claimed)
        [_, self.ledger] = ledgers(2)
        self.newest = np.zeros(2, np.int64)
        self.sent: deque[tuple[int, np.ndarray]] = deque()  # (steps begun, request)
        self.steps = self.waits = 0
        self.during: dict[int, Callable[[], None]] = {}  # step -> what happens in it
        work.claims = self.claims = RemoteClaims(lambda request: self.sent.append((self.steps, request)), None)
        monkeypatch.setattr(self.trainer.fabric.transport, "idle", self.idle)
        monkeypatch.setattr(self.trainer, "step", self.step)

    def idle(self, attempt: int) -> None:
        self.waits += 1
        self.handle(0)

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        self.handle(self.late)
        self.steps += 1
        self.during.get(self.steps, lambda: None)()
        return Trainer.step(self.trainer, x, y)

    def handle(self, late: int) -> None:
        while self.sent and self.sent[0][0] <= self.steps - late:
            reply = serve(self.ledger, self.newest, 0, self.sent.popleft()[1])
            if reply is not None:
                self.claims.reply(reply)


def test_pieces_of_another_node_s_ledger_are_claimed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes two steps. The replica waits only for its first piece and at the end."""
    remote = Remote(monkeypatch, late=2)
    waits = []
    remote.during = {step: lambda: waits.append(remote.waits) for step in (1, 8)}
    assert [entry["images"] for entry in remote.trainer.run() if entry["event"] == "epoch"] == [26, 26]
    assert waits == [1, 1] and remote.steps == 14 and remote.ledger.state() == (14, [])


def test_a_refused_settlement_of_another_node_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces of this replica are revoked while it trains one of them. Another replica trains them."""
    remote = Remote(monkeypatch, late=0)
    others = 0

    def revoke() -> None:
        nonlocal others
        remote.ledger.revoke(0)
        for _ in range(4):
            ticket = claim(remote.ledger, 14)
            others += len(remote.trainer.sampler.piece(piece_of(ticket))[1])
            assert remote.ledger.begin(ticket) and remote.ledger.settle(ticket)

    remote.during = {3: revoke}
    entries = [entry for entry in remote.trainer.run() if entry["event"] == "epoch"]
    assert others == 16 and remote.ledger.repeated == 1 and remote.ledger.state() == (14, [])
    assert [entry["images"] for entry in entries] == [26 - others, 26] and remote.steps == 14
    assert all(0 <= entry["accuracy"] <= 1 for entry in entries)


def test_a_batch_of_an_earlier_epoch_counts_in_the_epoch_in_which_it_is_trained() -> None:
    """Another replica has claimed a batch of epoch 1, and is suspected in epoch 2. So this one trains 1 + 7 batches."""
    trainer = gossiping()
    trainer.work.claims, other = ledgers(2)  # type: ignore[attr-defined]
    claim(other, 14)
    for entry in trainer.run():
        if entry["event"] == "step" and entry["step"] == 8:
            other.revoke(1)
        if trainer.progress.batch == 8:
            checkpoint = make_checkpoint(trainer)
            restore(gossiping(), checkpoint)
    checkpoint.state["progress"]["batch"] = 15
    with pytest.raises(CheckpointError, match=r"progress\.batch is 15"):
        restore(gossiping(), checkpoint)


def test_the_thread_that_prepares_pieces_ends_with_the_epoch() -> None:
    before, trainer = {*threading.enumerate()}, gossiping()

    def preparing() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before]

    batches = trainer.work.epoch(trainer.progress)
    next(batches)
    next(batches)  # it was claimed while the first one was trained
    assert preparing() == ["minidl-prefetch_0"]
    batches.close()  # type: ignore[attr-defined]
    assert not preparing()
    trainer = gossiping()
    assert [entry["images"] for entry in trainer.run() if entry["event"] == "epoch"] == [26, 26]
    assert not preparing()


def test_a_run_with_pieces_left_has_not_finished() -> None:
    """All pieces are handed out, but three are not settled, when all replicas have died and a server saves the run."""
    trainer = gossiping()
    trainer.work.claims, other = ledgers(2)  # type: ignore[attr-defined]
    for piece in range(14):
        ticket = claim(other, 14)
        assert other.begin(ticket) and (piece > 10 or other.settle(ticket))
    trainer.work.estimate(trainer.progress, 0)
    assert not trainer.finished and trainer.work.state()["left"] == [11, 12, 13]


@pytest.mark.parametrize(("wrong", "words"), [
    ({"total": 15}, "work.total is 15; expected 2 epochs of 7 batches"),
    ({"first": 15}, "work.first is 15 of 14"),
    ({"first": 5, "left": [5]}, "increasing numbers below it"),
    ({"first": 5, "left": [3, 2]}, "increasing numbers below it"),
    ({"left": [-1]}, "work.left"),
    ({"replicas": 0}, "work.replicas"),
    (None, "does not say which batches are left"),
])  # fmt: skip
def test_work_that_does_not_fit_the_run_is_refused(wrong: dict[str, Any] | None, words: str) -> None:
    checkpoint = make_checkpoint(gossiping())
    if wrong is None:
        del checkpoint.state["work"]
    else:
        checkpoint.state["work"] |= wrong
    with pytest.raises(CheckpointError, match=words) as raised:
        restore(gossiping(), checkpoint)
    assert "\n" not in str(raised.value)


def test_idle_time_is_no_waiting_time() -> None:
    now = [0.0]
    every = [Stats(rank, size=3, now=lambda: now[0]) for rank in range(3)]
    for each, end in zip(every[:2], (4.0, 7.0)):  # the third is a server: it makes no step
        each.start()
        now[0] = end
        each.stepped()
        each.stop()
    total = merge(each.report() for each in every)
    assert total["idle_seconds"] == 3.0 and total["seconds"]["waiting"] == 0 and total["wait_fraction"] == 0
