"""The simulation: deaths, deadlocks and errors."""

from __future__ import annotations

import pytest
from sim_helper import CORES, NEEDS, after, push_sum, simulate

from minidl.comm.cluster import parse, uniform
from minidl.comm.fabric.base import BufferSpec, Channel, Header, PeerLost
from minidl.comm.transport.sim import Deadlock, Simulation
from minidl.errors import ConfigError


def test_a_death_among_replicas_that_do_not_wait_for_each_other():
    cluster = parse(CORES + "deaths = [{rank = 3, time = 0.9}]")
    simulation = simulate(push_sum, 8, cluster, flops=1e5)
    assert set(simulation.results) == {0, 1, 2, 4, 5, 6, 7}
    assert 4 < sum(simulation.results.values()) < 8  # the mass of rank 3 is lost
    assert simulation.transport(0).survivors() == [0, 1, 2, 4, 5, 6, 7]


def test_a_death_ends_waits_for_the_dead_rank_and_runs_its_cleanup():
    cleaned = []

    def work(fabric):
        fabric.fail_fast = True
        try:
            with fabric.working("gradient", 10 * (1 + fabric.rank)):
                pass
            fabric.barrier()
        except PeerLost as error:
            return error.peer, fabric.now()
        finally:
            cleaned.append(fabric.rank)

    results = simulate(work, 3, parse(CORES + 'deaths = [{node = "node-2", time = 1.5}]'), flops=1e5).results
    assert results == {0: (2, 1.5), 1: (2, pytest.approx(results[1][1]))} and results[1][1] >= 1.5
    assert sorted(cleaned) == [0, 1, 2]


def test_a_deadlock_names_what_each_rank_waits_for():
    with pytest.raises(Deadlock, match=r"after 1 virtual s, all wait .*: rank 0 waits for the mail, peers: 1; rank 1 "
                                       r"waits for the exchange of round 4, peers: 0"):  # fmt: skip
        def work(fabric):
            after(fabric, 1.0)
            if fabric.rank == 0:
                fabric.wait(lambda: fabric.take(Channel.MAIL, 1), (1,), "the mail")
            else:
                list(fabric.exchange([0], [], header=Header(round=4))())

        simulate(work)


def test_an_error_ends_the_simulation_and_names_its_rank():
    def work(fabric):
        if fabric.rank == 1:
            after(fabric, 2.0)
            raise ValueError("no")
        fabric.wait(lambda: None)

    with pytest.raises(ValueError, match="no") as caught:
        simulate(work)
    assert caught.value.__notes__ == ["rank 1 of the simulation, after 2 virtual s"]


def test_all_stop_after_the_same_step():
    def work(fabric):
        for step in range(100):
            if not fabric.begin_step(step, synchronous=True):
                return step
            fabric.elapse("gradient", 1 + fabric.rank)
            if fabric.rank == 1 and step == 10:
                fabric.transport.simulation.stop()

    stops = simulate(work, 3, parse(CORES), flops=1e5).results
    assert len(set(stops.values())) == 1 and stops[0] > 11


def test_models_that_differ_and_memory_that_is_not_shared():
    simulation = Simulation(uniform(2), 2)
    simulation.transport(0).join(NEEDS, "one")
    with pytest.raises(ConfigError, match="replica 1 has another model"):
        simulation.transport(1).join(NEEDS, "other")
    with pytest.raises(ConfigError, match="ranks on 2 nodes share no memory"):
        simulation.transport(0).join(BufferSpec(shared=(("center", 5),)), "one")
    simulation = Simulation(uniform(2, per_node=2), 2)
    for transport in simulation.transports:
        transport.join(BufferSpec(shared=(("center", 5),)), "one")
    simulation.transport(0).shared("center")[:] = 3
    assert (simulation.transport(1).shared("center") == 3).all()
