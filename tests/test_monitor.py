"""The launcher's monitor, with a clock and processes that the test sets."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from minidl.comm import memory
from minidl.comm.launch import monitor
from minidl.comm.launch.monitor import LOOK, NOTICE, Monitor

PROCESSES = {0: 100, 1: 101}


class Watched:
    """A monitor of two ranks, of which rank 0 gives a sign of life before each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: int = memory.LEAVE_OUT, stall: float = 2.0) -> None:
        control = memoryview(bytearray(memory.control_size(2)))
        self.words, self.numbers = control.cast("q"), control.cast("d")
        self.time, self.cpu, self.state = 1000.0, 0, "S"
        self.lines: list[str] = []
        monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: self.time))
        monkeypatch.setattr(monitor, "main_thread", lambda process: (self.cpu * (process - 100), self.state))
        monkeypatch.setattr(monitor, "tell", self.lines.append)
        self.monitor = Monitor(self.words, self.numbers)
        self.words[memory.ON_FREEZE] = how
        for rank in PROCESSES:
            self.set(rank, memory.STALL, stall)
            self.set(rank, memory.STEP, 7)
            self.set(rank, memory.STATE, memory.TRAINING)
        self.look(0)

    def set(self, rank: int, word: int, value: float) -> None:
        self.numbers[memory.at(rank, word)] = value

    def beat(self, rank: int) -> None:
        self.set(rank, memory.HEARD, self.time)

    @property
    def trust(self) -> int:
        return self.words[memory.at(1, memory.TRUST)]

    @trust.setter
    def trust(self, value: int) -> None:
        self.words[memory.at(1, memory.TRUST)] = value

    def look(self, seconds: float, **options: Any) -> list[int]:
        """Look until the seconds have passed; return the ranks to kill."""
        killed: list[int] = []
        end = self.time + seconds
        while True:
            self.beat(0)
            killed += self.monitor.look(PROCESSES, options.get("ending", False))
            if self.time >= end or killed:
                return killed
            self.time += LOOK


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_silent_rank_is_suspected_and_one_that_wakes_is_trusted(watched: Watched) -> None:
    assert not watched.look(2.0) and watched.trust == memory.TRUSTED and not watched.lines
    assert not watched.look(0.5) and watched.trust == memory.SUSPECTED
    line = r"replica 1 \(host .*, process 101\) has shown no sign of life for 2 s: it is left out until it wakes"
    assert re.fullmatch(line, watched.lines[0])
    assert not watched.look(60.0) and len(watched.lines) == 1
    watched.beat(1)
    assert not watched.look(0) and watched.trust == memory.TRUSTED and watched.lines[1].endswith(" is back")


def test_a_suspect_without_which_the_others_cannot_go_on_is_killed(watched: Watched) -> None:
    watched.look(3.0)
    watched.trust = memory.CONDEMNED
    assert watched.look(LOOK) == [1] and "it is killed, so that the others can end" in watched.lines[-1]


def test_a_condemned_rank_that_wakes_is_not_killed(watched: Watched) -> None:
    watched.look(3.0)
    watched.trust = memory.CONDEMNED
    watched.beat(1)
    assert not watched.look(1.0) and watched.trust == memory.TRUSTED


def test_suspects_are_killed_at_once_where_the_method_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, memory.KILL)
    assert not watched.look(2.0) and watched.look(0.5) == [1] and watched.lines[0].endswith(": it is killed")


def test_a_frozen_server_is_killed(watched: Watched) -> None:
    """Not before the first step: the others have nothing to save then."""
    watched.set(1, memory.SERVER, 1)
    watched.set(1, memory.STEP, 0)  # a server makes no steps
    watched.set(1, memory.STATE, memory.READY)
    watched.state = "T"
    assert not watched.look(60.0) and watched.trust == memory.SUSPECTED
    watched.beat(1)
    watched.set(1, memory.STATE, memory.TRAINING)
    assert not watched.look(2.0) and watched.look(0.5) == [1]
    assert watched.lines[-1].endswith(": it is the server, which no other rank can replace, so it is killed, and the "
                                      "others save and end")  # fmt: skip


def test_who_computes_compiles_or_announces_a_long_operation_is_not_suspected(watched: Watched) -> None:
    for _ in range(40):  # it uses the CPU
        watched.cpu += 1
        watched.look(LOOK)
    watched.state = "R"  # it waits for a free core
    watched.look(60.0)
    assert not watched.trust
    watched.state = "S"
    watched.set(1, memory.PATIENCE, 9.0)
    watched.look(8.5)
    assert not watched.trust
    watched.state = "T"  # stopped: the patience does not count
    watched.look(0.0)
    assert watched.trust == memory.SUSPECTED
    watched.beat(1)
    watched.set(1, memory.STALL, 0.0)  # its script trains no more
    watched.look(60.0)
    assert not watched.trust
    watched.set(1, memory.STALL, 2.0)
    for state in (memory.JOINING, memory.READY, memory.COMING):  # it compiles
        watched.state = "S"
        watched.set(1, memory.STATE, state)
        watched.look(60.0)
        assert not watched.trust
        watched.state = "T"
        watched.look(0.0)
        assert watched.trust == memory.SUSPECTED
        watched.beat(1)
        watched.look(0.0)


def test_the_time_in_which_the_launcher_itself_was_suspended_does_not_count(watched: Watched) -> None:
    watched.time += 3600.0
    watched.look(0)
    assert not watched.trust
    watched.look(2.0)
    assert watched.trust == memory.SUSPECTED


def test_a_signal_ends_ranks_that_do_not_notice_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, memory.WAIT, stall=30.0)
    watched.words[memory.STOP] = 15
    assert not watched.look(NOTICE) and watched.look(1.0) == [1]
    assert watched.lines[0].endswith("s since the signal: it is killed")


def test_a_signal_ends_a_rank_that_freezes_after_it_has_noticed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, memory.WAIT, stall=30.0)
    watched.words[memory.STOP] = 15
    watched.look(1.0)
    watched.beat(1)
    watched.look(0)
    assert not watched.look(29.0) and watched.look(2.0) == [1]


def test_a_rank_that_freezes_while_the_job_exits_is_killed(watched: Watched) -> None:
    assert not watched.look(NOTICE, ending=True) and watched.look(1.0, ending=True) == [1]


def test_after_an_error_nobody_is_suspected(watched: Watched) -> None:
    watched.words[memory.ABORT] = 1
    assert not watched.look(60.0) and not watched.lines
