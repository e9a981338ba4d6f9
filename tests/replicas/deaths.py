"""A scenario for mpi.py: ranks die one after another, and the others go on."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from minidl.comm.claims import OVER, WAIT, piece_of
from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Header

PIECES = 60


def deaths(fabric: Fabric, *victims: str) -> dict[str, Any]:
    """The victims die in this order, each while it holds a piece of work. After each death the others communicate.

    Returns the pieces that this rank has settled, and how many pieces of all were begun in vain.
    """
    fabric.join(BufferSpec(nbytes=4000, mail=2, publish=True), "layout")
    settled = work(fabric, 3)
    for number, victim in enumerate(map(int, victims)):
        communicate(fabric, 2 * number + 1)
        settled += work(fabric, 2)
        fabric.set_status(Column.ACCURACY, number + 1)
        if fabric.rank == victim:
            ready = lambda: bool((fabric.status[fabric.survivors(), Column.ACCURACY] > number).all()) or None  # noqa: B023, E731
            fabric.wait(ready, (), "the others")
            fabric.claims.begin(claimed(fabric))
            fabric.send((victim + 1) % fabric.size, np.ones(1000, np.float32), header=Header(round=-1))
            os.kill(os.getpid(), 9)
        fabric.wait(lambda: not fabric.alive(victim) or None, (), "the death")  # noqa: B023
        for message in fabric.poll():
            assert message.header.round == -1
        communicate(fabric, 2 * number + 2)
    settled += work(fabric, PIECES)
    return {"settled": settled, "repeated": fabric.claims.repeated, "alive": fabric.survivors()}


def communicate(fabric: Fabric, round: int) -> None:
    """Exchange messages, published states, rows of the status table and sums with all live ranks."""
    others = [rank for rank in fabric.survivors() if rank != fabric.rank]
    fabric.set_status(Column.SPEED, round)
    seen = lambda: bool((fabric.status[others, Column.SPEED] >= round).all()) or None  # noqa: E731
    fabric.wait(seen, (), "rows of the status table")
    own = np.full(1000, round, np.float32)
    for message in fabric.exchange(others, others, own, header=Header(round=round))():
        assert message.vector.min() == message.vector.max() == message.header.round == round
    fabric.wait(lambda: fabric.publish((own,), Header(round=round)) or None, (), "memory")
    for peer in others:
        with fabric.wait(lambda: fabric.latest(peer), (peer,), "a published state") as message:  # noqa: B023
            assert message.header.round == round
    group = fabric.group(fabric.survivors())
    group.allreduce(own)
    assert own[0] == own[-1] == round * len(group.ranks)


def claimed(fabric: Fabric) -> int:
    """Claim a piece. Returns its ticket or OVER."""
    answers: list[int] = []
    while not answers or answers[-1] == WAIT:
        fabric.claims.request(PIECES, answers.append)
        fabric.wait(lambda: len(answers) or None, (), "a piece")
        if answers[-1] == WAIT:
            answers.clear()
            fabric.idle(50)
    return answers[0]


def work(fabric: Fabric, pieces: int) -> list[int]:
    """Claim and settle up to `pieces` pieces. Returns their numbers."""
    done: list[int] = []
    while len(done) < pieces and (ticket := claimed(fabric)) != OVER:
        fabric.claims.begin(ticket)
        fabric.claims.settle(ticket)
        done.append(piece_of(ticket))
    return done
