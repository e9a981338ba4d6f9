"""A change of the view: no message of the old view is left, and interrupted groups stay closed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sim_helper import CORES, NEEDS, after, message, ones, simulate

from minidl.comm.cluster import parse
from minidl.comm.fabric import view
from minidl.comm.fabric.base import Channel, Column, Fabric, Header, PeerLost, State


def enter(fabric: Fabric, number: int) -> bool:
    return view.leave(fabric, number) and view.begin(fabric, number)


def test_messages_of_the_old_view_are_dropped() -> None:
    """Rank 0 sends on two channels, and rank 1 takes neither message before both enter the new view."""

    def work(fabric: Fabric) -> Any:
        if fabric.rank == 0:
            assert fabric.post(Channel.MAIL, [1], (ones(),), Header())
            assert fabric.post(Channel.TREE, [1], (ones(),), Header())
        else:
            after(fabric, 7.0)
        assert enter(fabric, 1)
        fabric.group([1, 0]).barrier()  # takes the next message on TREE
        if fabric.rank == 0:
            assert fabric.post(Channel.MAIL, [1], (2 * ones(),), Header())
            return fabric.now()
        return message(fabric, 0)[0]

    results = simulate(work, 2, parse(CORES)).results
    assert results[0] > 7.0 and results[1] == 2.0


def test_a_newcomer_delays_no_view() -> None:
    """Rank 2 is in the place of a dead rank, and takes no message. Those that have reached it count as delivered."""

    def work(fabric: Fabric) -> Any:
        after(fabric, 3.0)
        assert fabric.post(Channel.MAIL, [2], (ones(),), Header())
        fabric.replicas = (0, 1)
        return enter(fabric, 1), fabric.now()

    def waits(fabric: Fabric) -> None:
        if fabric.newcomer:
            fabric.enter(NEEDS, "layout")
        fabric.wait(lambda: None, (), "a leader")

    cluster = parse(CORES + "deaths = [{rank = 2, time = 1.0}]\njoins = [{rank = 2, time = 2.0}]")
    results = simulate({0: work, 1: work, 2: waits}, 3, cluster).results
    assert {rank: entered for rank, (entered, _) in results.items()} == {0: True, 1: True}
    assert all(time > 3.0 for _, time in results.values()), "on its way, it could meet the new view"


def test_one_that_has_ended_enters_no_view() -> None:
    def work(fabric: Fabric) -> Any:
        if fabric.rank == 2:
            after(fabric, 3.0)
            fabric.set_status(Column.STATE, State.PAUSED)
            return None
        return enter(fabric, 1), fabric.now()

    assert simulate(work, 3, parse(CORES)).results == {0: (False, 3.0), 1: (False, 3.0), 2: None}


def test_a_death_ends_the_change() -> None:
    def work(fabric: Fabric) -> Any:
        fabric.fail_fast = True
        if fabric.rank == 2:
            after(fabric, 10.0)
        with pytest.raises(PeerLost, match="replica 2 died while others waited for others to enter the new view"):
            enter(fabric, 1)
        fabric.replicas = (0, 1)
        return enter(fabric, 2)

    assert simulate(work, 3, parse(CORES + "deaths = [{rank = 2, time = 4.0}]")).results == {0: True, 1: True}


def test_after_a_death_the_next_sum_of_a_group_takes_no_chunk_of_the_interrupted_one() -> None:
    """Rank 2 dies while the result of the first sum is on its way to rank 1. It is not the result of the second one."""

    def work(fabric: Fabric) -> Any:
        group, lost = fabric.group([0, 1, 2]), 0
        for _ in range(2):
            try:
                group.allreduce(np.ones(5, np.float32))
            except PeerLost:
                lost += 1
            after(fabric, 1.0)
        return lost

    assert simulate(work, 3, parse(CORES + "deaths = [{rank = 2, time = 0.5}]")).results == {0: 1, 1: 2}
