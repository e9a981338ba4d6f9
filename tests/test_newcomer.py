"""The state of a member reaches a newcomer, also if one of them dies or is suspended meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import data, models, nn
from minidl.comm import memory
from minidl.comm.claims import piece_of
from minidl.comm.fabric.base import Channel, Column, Fabric, Header, PeerLost, State
from minidl.comm.methods.gossip import Gossip
from minidl.comm.stats import Stats
from minidl.comm.transport.shm import ShmTransport
from minidl.errors import ConfigError, MinidlError
from minidl.run.config import resolve
from minidl.training import newcomer
from minidl.training.trainer import Trainer

FACTS = {"batch_size": 8}
FOLDER = Path("runs/some")
CONFIG = resolve({"method": "gossip", "mix": "mass", "batch_size": 8, "workers": 2, "model": "mlp",
                  "data": "synthetic:64x8x8x1:3"})  # fmt: skip


class Ranks:
    """Two members and a newcomer of a job, in this process. The newcomer is a thread."""

    def __init__(self) -> None:
        size = memory.control_size(3)
        self.segment = memory.Segment.create(size)
        self.fabrics = [self._fabric(rank) for rank in range(3)]
        status = self.fabrics[0].status
        status[2, Column.STATE], status[2, Column.INCARNATION] = State.DEAD, 1
        self.trainers: dict[int, Trainer] = {}
        self.fabrics[2].newcomer = True
        beside = threading.Thread(target=self._join, args=[1])
        beside.start()
        self._join(0)
        beside.join()
        for rank in (0, 1):
            self._train(rank)
            self.fabrics[rank].set_status(Column.STATE, State.TRAINING)
        self.fabrics[2].enter(*self._buffers())
        self._train(2)
        self.error: Exception | None = None
        self.folder: Path | None = None

    def _fabric(self, rank: int) -> Fabric:
        segment = memory.Segment(os.dup(self.segment.fd))
        return Fabric(ShmTransport(rank, 3, segment, Stats(rank), began=2), (0, 1))

    def _model(self) -> nn.Module:
        nn.seed(0)
        return models.build("mlp", (8, 8, 1), 3)

    def _buffers(self) -> tuple[Any, str]:
        arena = self._model().flatten()
        return Gossip.buffers(arena.size, CONFIG), arena.layout_hash

    def _join(self, rank: int) -> None:
        self.fabrics[rank].join(*self._buffers())

    def _train(self, rank: int) -> None:
        self.trainers[rank] = Trainer(self._model(), data.load(CONFIG.data), CONFIG, fabric=self.fabrics[rank])
        self.trainers[rank].replica.theta[:] = np.random.default_rng(rank).standard_normal(
            self.trainers[rank].replica.theta.size)  # fmt: skip

    def begin(self, facts: dict[str, object] = FACTS) -> threading.Thread:
        """Let the newcomer wait for a state in a thread."""

        def work() -> None:
            try:
                self.folder = newcomer.become_member(self.trainers[2], facts)
            except MinidlError as error:
                self.error = error

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def arrived(self) -> None:
        self.fabrics[0].wait(lambda: self.fabrics[0].state(2) is State.ARRIVED or None, (), "the newcomer")

    def admit(self, rank: int) -> list[int]:
        return newcomer.admit(self.trainers[rank], FOLDER, FACTS)

    def mass(self) -> list[float]:
        return [float(self.trainers[rank].method.vectors()["mass"][0]) for rank in range(3)]

    def close(self) -> None:
        for fabric in self.fabrics:
            fabric.close()
        self.segment.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(newcomer, "PATIENCE", 60.0)  # a loaded machine decides no test
    made = Ranks()
    yield made
    made.close()


def test_a_newcomer_takes_the_state_of_the_leader(ranks: Ranks) -> None:
    leader, joined = ranks.trainers[0], ranks.trainers[2]
    leader.progress.step, leader.progress.epoch, leader.replica.steps, leader.progress.images = 30, 2, 29, 5
    leader.go_on_with(100, 7, [3, 4])
    assert ranks.admit(0) == []  # nobody has arrived
    thread = ranks.begin()
    ranks.arrived()
    assert ranks.admit(1) == [], "only the leader admits"
    assert ranks.admit(0) == [2]
    thread.join()
    assert ranks.folder == FOLDER and ranks.fabrics[1].state(2) is State.TRAINING
    assert (joined.replica.theta == leader.replica.theta).all()
    assert (joined.progress.step, joined.progress.epoch, joined.replica.steps, joined.progress.images) == (30, 2, 29, 0)
    assert (joined.work.total, joined.work.first, joined.work.left) == (100, 7, (3, 4))  # type: ignore[attr-defined]
    assert ranks.mass() == [0.5, 1.0, 0.5]
    for fabric in ranks.fabrics:
        assert fabric.look().members == (0, 1, 2) == fabric.replicas and fabric.leader == 0


def test_a_newcomer_that_takes_nothing_is_not_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "PATIENCE", 0.05)
    ranks.fabrics[2].set_status(Column.STATE, State.ARRIVED)
    assert ranks.admit(0) == [] and ranks.fabrics[0].state(2) is State.COMING
    assert ranks.mass()[:2] == [1.0, 1.0]
    monkeypatch.setattr(newcomer, "PATIENCE", 60.0)
    thread = ranks.begin()  # it drops what has come, and asks again
    ranks.arrived()
    assert ranks.admit(0) == [2]
    thread.join()
    assert (ranks.trainers[2].replica.theta == ranks.trainers[0].replica.theta).all()
    assert sum(ranks.mass()) == 2.0


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_the_leader_dies_while_it_sends(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    class Killed(BaseException):
        pass

    sent, post = [], newcomer._post

    def dies(*arguments: Any) -> None:
        if len(sent) == messages:
            raise Killed
        post(*arguments)
        sent.append(arguments)

    thread = ranks.begin()
    ranks.arrived()
    monkeypatch.setattr(newcomer, "_post", dies)
    with pytest.raises(Killed):
        ranks.admit(0)
    monkeypatch.setattr(newcomer, "_post", post)
    ranks.fabrics[1].status[0, Column.STATE] = State.DEAD
    while not ranks.admit(1):
        pass
    thread.join()
    assert (ranks.trainers[2].replica.theta == ranks.trainers[1].replica.theta).all()
    assert ranks.mass()[1:] == [0.5, 0.5]
    assert ranks.fabrics[2].leader == 1


def test_a_newcomer_whose_sponsor_has_died_does_not_join(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = ranks.fabrics[2].alive
    monkeypatch.setattr(ranks.fabrics[2], "alive", lambda rank: rank != 0 and alive(rank))
    thread = ranks.begin()
    ranks.arrived()
    ranks.admit(0)
    thread.join()
    assert str(ranks.error) == "replica 0 died while it sent its state to this one, which does not join"
    assert ranks.fabrics[1].state(2) is State.COMING and ranks.fabrics[1].look().members == (0, 1)


def test_a_newcomer_with_other_options(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "PATIENCE", 0.05)
    thread = ranks.begin({"batch_size": 16})
    ranks.arrived()
    assert ranks.admit(0) == []
    thread.join()
    assert isinstance(ranks.error, ConfigError)
    assert str(ranks.error).startswith("batch_size is 16, and 8 in the running job")


def test_a_newcomer_drops_messages_to_the_dead_member_in_whose_place_it_is(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has not noticed a death yet. It posts while the newcomer waits, and while it receives the state."""
    member, empty, post = ranks.fabrics[1], np.ones(3, np.float32), newcomer._post

    def posts(*arguments: Any) -> None:
        post(*arguments)
        member.post(Channel.TREE, [2], [empty], Header())

    thread = ranks.begin()
    ranks.arrived()
    for _ in range(2):  # the second one needs the edge of the first one
        newcomer._until(member, 2, lambda: member.post(Channel.MAIL, [2], [empty], Header()))
    monkeypatch.setattr(newcomer, "_post", posts)
    assert ranks.admit(0) == [2]
    thread.join()
    assert all(ranks.fabrics[2].take(channel) is None for channel in Channel)


def test_the_place_of_a_member_is_not_given_away_before_its_death_is_noticed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer that takes each message at once gives the leader no other occasion to notice the death."""

    def until(fabric: Fabric, rank: int, ready: Callable[[], bool]) -> None:
        while not ready():
            pass

    leader = ranks.fabrics[0]
    thread = ranks.begin()
    ranks.arrived()
    leader.replicas, leader.fail_fast = (0, 1, 2), True
    with monkeypatch.context() as patch:
        patch.setattr(newcomer, "_until", until)
        with pytest.raises(PeerLost, match="replica 2 died"):
            ranks.admit(0)
    leader.replicas, leader.fail_fast = (0, 1), False
    assert ranks.admit(0) == [2]
    thread.join()


def test_a_refilled_place_gets_no_old_messages(ranks: Ranks) -> None:
    """Rank 1 dies with a message to it, with one that it was writing, and with a claimed piece; its place is filled."""
    members = ranks.fabrics
    assert members[0].send(1, np.ones(3, np.float32))
    members[1].reserve(Channel.MAIL, [0], 12)  # it is killed while it writes
    tickets: list[int] = []
    members[1].claims.request(10, tickets.append)
    status = members[0].status
    status[1, Column.STATE], status[1, Column.INCARNATION] = State.DEAD, 2
    again = ranks._fabric(1)
    again.newcomer = True
    again.enter(*ranks._buffers())
    assert again.take(Channel.MAIL) is None and members[0].take(Channel.MAIL) is None
    assert again.state(1) is State.COMING and again.replicas == (0, 1) and again.leader == 0
    members[0].claims.request(10, tickets.append)
    assert piece_of(tickets[0]) == piece_of(tickets[1])
    slot = again.reserve(Channel.MAIL, [0], 12)
    assert slot is not None and slot.send([np.ones(3, np.float32)], header=Header())
    again.close()
