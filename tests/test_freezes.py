"""Frozen ranks in virtual time: they are left out, woken, waited for or killed, as `Freeze` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_helper import CORES, NEEDS, after, message, ones, simulate
from toy_replicas import LINK, run

from minidl.comm.cluster import FreezeEvent, parse, uniform
from minidl.comm.fabric.base import Column, Fabric, Freeze, Header, PeerLost, State
from minidl.comm.methods.base import Method
from minidl.errors import ConfigError

# Rank 1 of 3 is frozen in [2, 12) s, and suspected from 5 s on.
FROZEN = CORES + "freezes = [{rank = 1, time = 2.0, seconds = 10.0}]"
FOREVER = CORES + "freezes = [{rank = 1, time = 2.0, seconds = 1e9}]"


def test_a_frozen_rank_makes_no_steps_and_then_goes_on() -> None:
    def work(fabric: Fabric) -> list[float]:
        times = []
        for _ in range(3):
            after(fabric, 1.5)
            times.append(fabric.now())
        return times

    results = simulate(work, 3, parse(FROZEN)).results
    assert results == {0: [1.5, 3.0, 4.5], 1: [1.5, 12.0, 13.5], 2: [1.5, 3.0, 4.5]}


def test_a_rank_that_is_frozen_while_all_join_again_gets_later_messages() -> None:
    """Rank 1 waits for rank 0 when it is frozen. Rank 0 joins again at 3 s, and sends it a message at once."""

    def work(fabric: Fabric) -> float:
        after(fabric, 3.0 if fabric.rank == 0 else 1.0)
        fabric.join(NEEDS, "layout")
        if fabric.rank == 0:
            assert fabric.send(1, ones())
        return float(message(fabric, 0).sum()) if fabric.rank == 1 else fabric.now()

    assert simulate(work, 3, parse(FROZEN)).results == {0: 3.0, 1: 250.0, 2: 3.0}


def test_a_rank_is_suspected_after_the_stall_and_trusted_when_it_wakes() -> None:
    def work(fabric: Fabric) -> list[tuple[int, ...]]:
        fabric.handle_freezes(Freeze.LEAVE_OUT)
        fabric.set_status(Column.STATE, State.TRAINING)
        seen = []
        for moment in (4.9, 5.1, 11.9, 12.1):
            after(fabric, moment - fabric.now())
            seen.append(fabric.look().members)
        return seen

    results = simulate(work, 3, parse(FROZEN), stall=3.0).results
    assert results[0] == results[2] == [(0, 1, 2), (0, 2), (0, 2), (0, 1, 2)]


def waiting(fabric: Fabric) -> float:
    """Make the steps of a synchronous method; return the time at the end."""
    fabric.set_status(Column.STATE, State.TRAINING)
    fabric.fail_fast = True
    for step in range(3):
        fabric.begin_step(step, synchronous=True)
        after(fabric, 1.5)
        fabric.barrier()
    return fabric.now()


def test_a_synchronous_group_waits_for_a_frozen_rank() -> None:
    results = simulate(waiting, 3, parse(FROZEN), stall=3.0).results
    assert set(results) == {0, 1, 2} and min(results.values()) > 12


def test_a_group_that_kills_suspects_loses_the_frozen_rank_after_the_stall() -> None:
    def work(fabric: Fabric) -> tuple[float, int]:
        fabric.handle_freezes(Freeze.KILL)
        try:
            return waiting(fabric), -1
        except PeerLost as lost:
            return fabric.now(), lost.peer

    assert simulate(work, 3, parse(FROZEN), stall=3.0).results == {0: (5.0, 1), 2: (5.0, 1)}


@pytest.mark.parametrize("forever", [False, True])
def test_replicas_that_wait_for_nobody_go_on_without_a_frozen_one(forever: bool) -> None:
    """The masses add up if the frozen replica wakes before the end. Else it is killed when the others have ended."""

    def work(fabric: Fabric) -> float:
        fabric.handle_freezes(Freeze.LEAVE_OUT)
        fabric.set_status(Column.STATE, State.TRAINING)
        mass = [1.0]
        for step in range(30):
            after(fabric, 0.5)
            mass += [message.header.weight for message in fabric.poll()]
            if fabric.send((fabric.rank + 1 + step % 2) % 3, ones(4), header=Header(weight=sum(mass) / 2)):
                mass = [sum(mass) / 2]
        fabric.set_status(Column.STATE, State.PAUSED)
        fabric.drain(lambda message: mass.append(message.header.weight))
        return sum(mass)

    simulation = simulate(work, 3, parse(FOREVER if forever else FROZEN), stall=3.0)
    if forever:
        assert set(simulation.results) == {0, 2} and 0 < sum(simulation.results.values()) < 3
        assert 15 < simulation.time < 20
    else:
        assert set(simulation.results) == {0, 1, 2} and sum(simulation.results.values()) == 3


@pytest.mark.parametrize("forever", [False, True])
def test_messages_to_others_go_on_when_frozen_ranks_hold_all_slots(forever: bool) -> None:
    """Rank 0 has two slots, with messages to ranks 1 and 2. Masses are conserved, also when these wake."""
    seconds = 1e9 if forever else 10.0
    frozen = f"freezes = [{{rank = 1, time = 2.0, seconds = {seconds}}}, {{rank = 2, time = 2.0, seconds = {seconds}}}]"

    def work(fabric: Fabric) -> tuple[float, list[bool]]:
        fabric.handle_freezes(Freeze.LEAVE_OUT)
        fabric.set_status(Column.STATE, State.TRAINING)
        mass, sent = [1.0], []
        after(fabric, 2.9 if fabric.rank == 3 else 2.5)  # a message arrives after 0.3 s
        for peer in (1, 2, *[3] * 10):
            if fabric.rank == 0:
                sent.append(fabric.send(peer, ones(4), header=Header(weight=sum(mass) / 2)))
                mass = [sum(mass) / (1 + sent[-1])]
            mass += [message.header.weight for message in fabric.poll()]
            after(fabric, 1.0)
        fabric.set_status(Column.STATE, State.PAUSED)
        fabric.drain(lambda message: mass.append(message.header.weight))
        return sum(mass), sent

    results = simulate(work, 4, parse(CORES + frozen), stall=3.0).results
    assert results[0][1] == [True, True, False, *[True] * 9], "suspected from 5 s on"
    assert sum(mass for mass, _ in results.values()) == (2 - 3 / 4 if forever else 4)


def test_a_frozen_server_is_killed_when_it_is_suspected() -> None:
    """No other rank can replace it."""

    def work(fabric: Fabric) -> tuple[float, int]:
        fabric.assign((0, 2))
        fabric.join(NEEDS, "layout")
        fabric.handle_freezes(Freeze.LEAVE_OUT)
        fabric.set_status(Column.STATE, State.TRAINING)
        if fabric.rank == 1:
            fabric.serve(lambda message: ((message.vector,), Header()))
        with pytest.raises(PeerLost) as lost:
            while True:
                fabric.call(1, (ones(4),), ones(4))
        fabric.set_status(Column.STATE, State.PAUSED)
        return fabric.now(), lost.value.peer

    assert simulate(work, 3, parse(FOREVER), stall=3.0).results == {0: (5.0, 1), 2: (5.0, 1)}
def test_a_frozen_rank_is_killed_when_the_others_have_ended() -> None:
    def work(fabric: Fabric) -> float:
        after(fabric, 3.0)
        return fabric.now()

    simulation = simulate(work, 3, parse(FOREVER), stall=3.0)
    assert simulation.results == {0: 3.0, 2: 3.0} and simulation.time == 7.0  # 5 s after it was frozen


def test_a_stop_ends_the_wait_for_a_frozen_rank() -> None:
    def work(fabric: Fabric) -> tuple[float, int]:
        if fabric.rank == 0:
            fabric.transport.simulation.at(3.0, fabric.transport.simulation.stop)
        try:
            return waiting(fabric), -1
        except PeerLost as lost:
            return fabric.now(), lost.peer

    assert simulate(work, 3, parse(FOREVER)).results == {0: (8.0, 1), 2: (8.0, 1)}


def test_frozen_workers_delay_no_other_worker_of_their_server() -> None:
    """The server holds a reply for each of them."""
    ends: dict[int, float] = {}

    def note(method: Method, step: int) -> None:
        ends[method.fabric.rank] = method.fabric.now()

    freezes = tuple(FreezeEvent(time=1e-4, rank=rank, seconds=1e6) for rank in (1, 2, 3))
    run("ps", 5, 50, cluster=replace(uniform(5, 1, **LINK), freezes=freezes), around=(lambda method, step: None, note))
    assert 1e-4 < ends[0] < 1.0 and min(ends[rank] for rank in (1, 2, 3)) > 1e6


def test_a_freeze_in_a_file() -> None:
    place = parse(CORES + 'freezes = [{node = "node-1", time = 2}, {rank = 0, time = 1, seconds = 3}]').place(2)
    assert place.freezes == ((1.0, 0, 3.0), (2.0, 1, 10.0)) and place.deaths == ()
    for wrong in ("{rank = 1, seconds = 0}", "{rank = 1, until = 5}", "{}", "{rank = 5}"):
        with pytest.raises(ConfigError, match="cluster file"):
            parse(CORES + f"freezes = [{wrong}]").place(2)
    with pytest.raises(ConfigError, match="seconds"):
        parse(CORES + "deaths = [{rank = 1, seconds = 5}]")
