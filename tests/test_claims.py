"""The ledger of claimed work: each piece is settled once, whatever happens to its holders."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import typeof

from minidl.comm import claims, memory
from minidl.comm.claims import OVER, WAIT, Ledger, piece_of
from minidl.comm.cluster import uniform
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.sim import Simulation

DEAD = 5.0


def ledgers(ranks: int) -> list[Ledger]:
    table, states = np.zeros(claims.words(ranks), np.int64), np.zeros(ranks)
    return [Ledger(table, states, rank) for rank in range(ranks)]


def claim(ledger: Ledger, total: int) -> int:
    answers: list[int] = []
    ledger.request(total, answers.append)
    return answers[0]


def test_pieces_are_handed_out_in_order_and_settled_once() -> None:
    one, two = ledgers(2)
    first, second = claim(one, 3), claim(two, 3)
    assert [piece_of(first), piece_of(second)] == [0, 1]
    assert one.state() == (2, [0, 1])
    assert one.begin(first) and one.settle(first) and not one.settle(first)
    assert not one.settle(second), "another rank holds it"
    third = claim(one, 3)
    assert piece_of(third) == 2 and claim(one, 3) == WAIT
    assert one.settle(third) and two.settle(second)
    assert claim(one, 3) == claim(two, 3) == OVER and one.state() == (3, []) and one.repeated == 0


def test_a_dead_rank_s_piece_is_handed_out_again_and_counted() -> None:
    one, two = ledgers(2)
    begun, ahead = claim(one, 2), claim(one, 2)
    one.begin(begun)
    assert claim(two, 2) == WAIT
    one.states[0] = DEAD
    again = [claim(two, 2), claim(two, 2)]
    assert [piece_of(ticket) for ticket in again] == [0, 1]
    assert two.repeated == 1, "the piece that the dead rank had only claimed ahead is not repeated"
    assert not one.settle(begun) and not one.settle(ahead)
    assert all(two.settle(ticket) for ticket in again) and claim(two, 2) == OVER


def test_a_suspected_rank_settles_too_late() -> None:
    one, two = ledgers(2)
    late = claim(one, 1)
    one.begin(late)
    two.revoke(0)
    assert two.repeated == 1 and not one.settle(late)
    again = claim(two, 1)
    assert piece_of(again) == 0 and not one.settle(late) and two.settle(again)


def test_pieces_that_are_given_back_are_not_repeated() -> None:
    one, two = ledgers(2)
    one.begin(claim(one, 9))
    claim(one, 9)
    one.give_back()
    assert one.state() == (2, [0, 1]) and piece_of(claim(two, 9)) == 0 and two.repeated == 0


def test_a_claim_that_was_interrupted_is_completed() -> None:
    """A process was killed after it had counted the piece, and before it wrote its slot."""
    one, two = ledgers(2)
    one.table[claims.HEAD] = 1 << claims.FIELD | claims.FIRST
    assert piece_of(claim(two, 9)) == 1 and two.state() == (2, [0, 1])
    one.states[0] = DEAD
    assert piece_of(claim(two, 9)) == 0


def test_an_old_claim_is_not_completed_again() -> None:
    """A process that was suspended while it completed a claim continues after the piece was settled."""
    one, _ = ledgers(2)
    for _ in range(2 * claims.DEPTH):
        ticket = claim(one, 99)
        head, before = int(one.table[claims.HEAD]), one.table.copy()
        one.settle(ticket)
        claims.complete(one.table, head)
        assert one.state() == (head >> claims.FIELD, []) and not np.array_equal(before, one.table)


@pytest.mark.parametrize("ranks", [1, 2])
def test_claims_are_compiled_for_the_arrays_of_the_transports(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Numba compiles a function again for an array of another memory layout."""
    kinds: list[tuple[Any, Any]] = []

    def request(self: Ledger, total: int, answer: Callable[[int], None]) -> None:
        kinds.append((typeof(self.table), typeof(self.states)))
        answer(0)

    monkeypatch.setattr(Ledger, "request", request)
    claims.prepare(ranks)
    transports = [Simulation(uniform(ranks), ranks).transport(0), *([LoopbackTransport()] if ranks == 1 else [])]
    for transport in transports:
        transport.claims.request(1, [].append)
    assert kinds == kinds[:1] * len(kinds) and len(kinds) > 1


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int]]]:
    ranks = draw(st.integers(1, 4))
    actions = st.sampled_from(["claim", "claim", "settle", "settle", "give back", "die", "revoke", "interrupt"])
    return ranks, draw(st.integers(0, 12)), draw(st.lists(st.tuples(actions, st.integers(0, ranks - 1)), max_size=60))


@given(histories())
def test_each_piece_is_settled_exactly_once(history: tuple[int, int, list[tuple[str, int]]]) -> None:
    ranks, total, actions = history
    every = ledgers(ranks)
    held: list[list[int]] = [[] for _ in range(ranks)]
    settled: Counter[int] = Counter()
    begun = 0

    def act(action: str, rank: int) -> None:
        nonlocal begun
        one = every[rank]
        if one.states[rank] == DEAD:
            return
        if action == "claim" and len(held[rank]) < 2:
            ticket = claim(one, total)
            if ticket >= 0:
                held[rank].append(ticket)
                begun += one.begin(ticket)
        elif action == "settle" and held[rank]:
            ticket = held[rank].pop(0)
            settled[piece_of(ticket)] += one.settle(ticket)
        elif action == "give back":
            one.give_back()
            held[rank].clear()
        elif action == "die" and rank:  # rank 0 survives
            one.states[rank] = DEAD
        elif action == "interrupt" and rank and (one.table[claims.HEAD] >> claims.FIELD) < total:
            head = int(one.table[claims.HEAD])  # it dies in a claim, after it has counted a new piece
            claims.complete(one.table, head)
            own = claims.FIRST + rank * claims.DEPTH
            word = int(one.table[own])
            if word == 0 or word & claims.HOLDER == claims.SETTLED:
                one.table[claims.HEAD] = ((head >> claims.FIELD) + 1) << claims.FIELD | own
                one.states[rank] = DEAD
        elif action == "revoke":
            every[0].revoke(rank)
        done, left = one.state() or (0, [])
        assert done <= total and max(settled.values(), default=0) <= 1
        assert sorted({*settled.keys()} - {p for p, n in settled.items() if not n} | {*left}) == list(range(done))

    for action, rank in actions:
        act(action, rank)
    while held[0]:
        act("settle", 0)
    for rank in range(1, ranks):
        every[0].states[rank] = DEAD
    while (ticket := claim(every[0], total)) >= 0:
        settled[piece_of(ticket)] += every[0].settle(ticket)
    assert ticket == OVER and +settled == Counter(range(total)) and every[0].repeated <= begun


def shared(segment: memory.Segment, size: int, ranks: int, rank: int) -> tuple[Any, Ledger]:
    """Return a word for the number of pieces, and a ledger, in shared memory."""
    array: Any = np.frombuffer(segment.map(size), np.int64)
    return array[:1], Ledger(array[1 + ranks :], array[1 : 1 + ranks].view(np.float64), rank)


def work(fd: int, size: int, rank: int, ranks: int, log: str) -> None:
    """Claim pieces, write each to the log, and settle it."""
    total, ledger = shared(memory.Segment(fd), size, ranks, rank)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    while (ticket := claim(ledger, int(total[0]))) != OVER:
        if ticket == WAIT:
            os.sched_yield()
            continue
        ledger.begin(ticket)
        os.write(file, f"{piece_of(ticket)}\n".encode())
        assert ledger.settle(ticket)


@pytest.mark.parametrize("kills", [0, 3])
def test_processes_that_are_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    ranks, least, log = 4, 20_000, tmp_path / "log"
    log.touch()
    size = memory.pages(8 * (1 + ranks + claims.words(ranks)))
    segment = memory.Segment.create(size)
    total, ledger = shared(segment, size, ranks, ranks - 1)
    total[0] = 1 << 30  # the work has no end before the last process is killed
    claims.prepare(ranks)
    context = get_context("fork")
    processes = [context.Process(target=work, args=(segment.fd, size, rank, ranks, str(log)), daemon=True)
                 for rank in range(ranks)]  # fmt: skip
    for process in processes:
        process.start()
    for rank in range(kills):
        while log.stat().st_size < (rank + 1) * 10_000:
            pass
        os.kill(processes[rank].pid or 0, signal.SIGKILL)
        processes[rank].join()
        ledger.states[rank] = DEAD
    total[0] = least
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-9] * kills + [0] * (ranks - kills)
    trained = Counter(map(int, log.read_text().split()))
    pieces = len(trained)
    assert sorted(trained) == list(range(pieces)) and ledger.state() == (pieces, []) and pieces >= least
    assert sum(trained.values()) - pieces <= ledger.repeated <= kills
    segment.close()
