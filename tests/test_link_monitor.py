"""Signs of life from other nodes: a link between two nodes is cut. The test sets the clock and the messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minidl.comm import memory
from minidl.comm.launch import monitor
from minidl.comm.launch.monitor import LOOK, NOTICE
from minidl.comm.transport.mpi_monitor import LinkMonitor

STALL = 3.0


class Side:
    """The first rank of one of two nodes, which looks at the ranks of the other one. nodes: the node of each rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: str, rank: int, how: int = memory.LEAVE_OUT) -> None:
        ranks = range(len(nodes))
        control = memoryview(bytearray(memory.control_size(len(nodes))))
        self.words, numbers = control.cast("q"), control.cast("d")
        self.time, self.lines = 1000.0, list[str]()
        monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: self.time))
        monkeypatch.setattr(monitor, "tell", self.lines.append)
        beside = [peer for peer in ranks if nodes[peer] == nodes[rank]]
        self.heard = [0.0 for _ in ranks]
        transport: Any = SimpleNamespace(
            rank=rank, groups=[nodes.index(node) for node in nodes], heard=self.heard, beside=beside, leader=0,
            survivors=lambda: [*ranks], described=lambda peer: f"replica {peer}",
            trusts=lambda peer: peer == rank or not self.words[memory.at(peer, memory.TRUST)],
        )  # fmt: skip
        self.far = {peer: 0 for peer in ranks if peer not in beside}
        self.monitor = LinkMonitor(transport, self.words, numbers)
        self.words[memory.ON_FREEZE] = how
        for peer in ranks:
            for word, value in ((memory.STALL, STALL), (memory.STEP, 7), (memory.STATE, memory.TRAINING)):
                numbers[memory.at(peer, word)] = value
        self.look(0)

    def look(self, seconds: float, *heard: int) -> list[int]:
        """Look until the seconds have passed. heard: the ranks from which rows arrive. Return the ranks to end."""
        ended: list[int] = []
        end = self.time + seconds
        while True:
            for peer in heard:
                self.heard[peer] = self.time
            ended += self.monitor.look(self.far, False)
            if self.time >= end or ended:
                return ended
            self.time += LOOK

    def trust(self) -> list[int]:
        return [self.words[memory.at(peer, memory.TRUST)] for peer in self.far]


def test_a_sign_of_life_of_one_rank_is_one_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, "0011", 0)
    assert not side.look(60.0, 3) and side.trust() == [0, 0]
    assert not side.look(STALL + 1.5) and side.trust() == [0, 0], "a sign of life may be late"
    assert not side.look(1.0) and side.trust() == [memory.SUSPECTED] * 2
    assert side.lines == [f"replica {peer} has shown no sign of life for 5 s: it is left out until it wakes"
                          for peer in (2, 3)]  # fmt: skip
    side.look(0.0, 2)
    assert side.trust() == [0, 0] and side.lines[2:] == ["replica 2 is back", "replica 3 is back"]


@pytest.mark.parametrize(("nodes", "rank", "goes_on"), [
    ("0011", 0, True), ("0011", 2, False), ("0111", 0, False), ("0111", 1, True), ("01", 0, True), ("01", 1, False),
])  # fmt: skip
def test_only_one_side_of_a_cut_link_goes_on(
    monkeypatch: pytest.MonkeyPatch, nodes: str, rank: int, goes_on: bool
) -> None:
    """The one with more replicas, or with the leader."""
    side = Side(monkeypatch, nodes, rank, memory.KILL)
    ended = side.look(20.0)
    assert ended == (list(side.far) if goes_on else [])
    fate = "it counts as dead" if goes_on else "the others wait for it"
    assert len(side.lines) == len(side.far) and all(line.endswith(fate) for line in side.lines)


def test_a_signal_ends_also_the_side_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(monkeypatch, "0011", 2, memory.KILL)
    assert not side.look(20.0)
    side.words[memory.STOP] = 15
    assert not side.look(NOTICE + 1.5) and side.look(1.0) == [0, 1]
