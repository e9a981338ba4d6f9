"""The simulation: times calculated by hand (alpha + n * beta seconds for n bytes), order of sums, a thousand ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from sim_helper import CORES, LINKS, NEEDS, after, message, ones, push_sum, simulate

from minidl.comm.cluster import parse, uniform
from minidl.comm.fabric.base import CHUNK, Channel, Column, Fabric, Header, State
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.sim import Simulation
from minidl.errors import ConfigError

# -- time ------------------------------------------------------------------------------------------------------


def test_a_message_takes_alpha_and_n_beta():
    def sender(fabric):
        assert fabric.send(1, ones())
        assert fabric.now() == 0.0  # a sender does not wait

    def receiver(fabric):
        assert message(fabric, 0).sum() == 250
        return fabric.now()

    assert simulate({0: sender, 1: receiver}).results[1] == pytest.approx(1e-3 + 1e-3)


def test_network_cards_send_one_message_at_a_time_but_links_inside_a_node_do_not():
    def sender(fabric):
        for peer in (1, 2):
            fabric.send(peer, ones())

    def receiver(fabric):
        message(fabric, 0)
        return fabric.now()

    work = {0: sender, 1: receiver, 2: receiver}
    results = simulate(work, 3).results
    assert results[1] == pytest.approx(2e-3) and results[2] == pytest.approx(3e-3)
    results = simulate(work, 3, uniform(3, per_node=3, **LINKS)).results
    assert results[1] == results[2] == pytest.approx(2e-3)


def test_ranks_of_a_node_share_its_network_card():
    cluster = uniform(4, per_node=2, **LINKS)  # ranks 0 and 1 on one node, 2 and 3 on the other

    def sender(fabric):
        fabric.send(fabric.rank + 2, ones())

    def receiver(fabric):
        message(fabric, fabric.rank - 2)
        return fabric.now()

    results = simulate({0: sender, 1: sender, 2: receiver, 3: receiver}, 4, cluster).results
    assert results[2] == pytest.approx(2e-3) and results[3] == pytest.approx(3e-3)


def test_a_lost_message_is_sent_again_after_the_timeout():
    cluster = uniform(2, **LINKS, drop=0.6, timeout=0.5)

    def sender(fabric):
        for _ in range(30):
            fabric.wait(lambda: fabric.send(1, ones()) or None)

    def receiver(fabric):
        times = [fabric.now()]
        for _ in range(30):
            message(fabric, 0)
            times.append(fabric.now())
        return np.diff(times)

    took = simulate({0: sender, 1: receiver}, cluster=cluster).results[1]
    tries = (took - 1e-3) / 0.501  # each lost message costs its transfer (1 ms) and the timeout
    np.testing.assert_allclose(tries, np.round(tries), atol=0.01)
    assert tries.max() > 1 and tries.min() < 0.1


def test_a_gradient_takes_its_flops_and_a_straggler_is_slower():
    text = """
    devices.slow.flops = 1e6
    devices.fast = {flops = 4e6, memory = 1e6}
    nodes = [{name = "a", devices = ["slow"]}, {name = "b", devices = ["fast"]}]
    between = {}
    """

    def work(fabric):
        with fabric.working("gradient", 8):
            pass
        after_gradient = fabric.now()
        fabric.elapse("mix", 1000)
        return after_gradient, fabric.now() - after_gradient

    results = simulate(work, cluster=parse(text), flops=1e5).results
    assert results[0][0] == pytest.approx(0.8) and results[1] == pytest.approx((0.2, 0.012))
    text += "stragglers = {probability = 0.999999, factor = 3}"
    results = simulate(work, cluster=parse(text), flops=1e5).results
    assert results[0][0] == pytest.approx(2.4)


def test_a_gradient_in_parts_takes_as_long_as_in_one_piece():
    """Random slowness (jitter, stragglers) is drawn per step, not per part. So a seed gives the same slow steps whether
    or not a method divides the gradient into parts."""

    def work(parts):
        def steps(fabric):
            for step in range(50):
                fabric.begin_step(step, synchronous=False)
                for _ in range(parts):
                    fabric.elapse("gradient", 1 / parts)
            return fabric.now()

        return steps

    times = [simulate(work(parts), 1, parse(CORES), flops=1e6).results[0] for parts in (1, 4)]
    assert times[0] == pytest.approx(times[1])


def test_jitter_has_mean_one_and_its_sigma():
    text = """
    devices.core = {flops = 1e6, jitter = 0.1}
    nodes = [{name = "a", devices = ["core"]}]
    """

    def work(fabric):
        times = [fabric.now()]
        for _ in range(2000):
            fabric.elapse("gradient", 1)
            times.append(fabric.now())
        return np.diff(times)

    times = simulate(work, 1, parse(text), flops=1e6).results[0]
    assert times.mean() == pytest.approx(1, abs=0.01) and np.log(times).std() == pytest.approx(0.1, abs=0.01)


# -- messages --------------------------------------------------------------------------------------------------


def test_one_message_at_a_time_holds_a_copy_of_the_vector():
    def sender(fabric):
        vector = ones()
        assert fabric.send(1, vector)
        vector[:] = 7
        assert not fabric.send(1, vector)  # the receiver has not released the first message
        fabric.wait(lambda: fabric.send(1, vector) or None, (1,), "the next")
        return fabric.now()

    def receiver(fabric):
        message = fabric.wait(lambda: fabric.take(Channel.MAIL), (0,))
        after(fabric, 1.0)
        assert (message.vector == 1).all() and not message.vector.flags.writeable
        message.release()
        message.release()
        with fabric.wait(lambda: fabric.take(Channel.MAIL), (0,)) as message:
            assert (message.vector == 7).all()

    assert simulate({0: sender, 1: receiver}).results[0] == pytest.approx(1.002)


def test_memory_for_messages_is_limited_as_on_real_machines():
    def work(fabric):
        if fabric.rank == 0:
            assert [fabric.send(peer, ones()) for peer in (1, 2, 3)] == [True, True, False]  # NEEDS.mail is 2

    simulate(work, 4)
    with pytest.raises(ConfigError, match="message of 4004 bytes, but the method requested slots of 4000 bytes"):
        simulate(lambda fabric: fabric.send(1 - fabric.rank, ones(1001)))


def test_when_the_newest_publication_is_seen_inside_a_node_and_between_nodes():
    def writer(fabric):
        for value in (1, 2, 3):
            fabric.publish([np.full(250, value, np.float32)], Header(round=value))
            after(fabric, 0.01)

    def reader(fabric):
        after(fabric, 0.015)
        seen = []
        for _ in range(2):
            with fabric.wait(lambda: fabric.latest(0), (0,)) as message:
                seen.append((message.header.round, fabric.now()))
        assert fabric.latest(0) is None  # already read
        return seen

    inside = simulate({0: writer, 1: reader}, cluster=uniform(2, per_node=2, **LINKS)).results[1]
    assert inside == [(2, pytest.approx(0.017)), (3, pytest.approx(0.022))]
    between = simulate({0: writer, 1: reader}).results[1]  # the request takes alpha, the reply alpha + n * beta
    assert between == [(2, pytest.approx(0.018)), (3, pytest.approx(0.023))]


def test_a_sum_is_added_in_the_order_of_the_tree():
    vectors = np.random.default_rng(0).standard_normal((7, 100)).astype(np.float32)

    def work(fabric):
        vector = vectors[fabric.rank].copy()
        beside = vector.copy()
        pending = fabric.allreduce_start(beside)
        fabric.elapse("gradient", 1)
        pending.wait()
        fabric.allreduce(vector)
        np.testing.assert_array_equal(vector, beside)
        return vector

    v = vectors
    expected = (v[0] + ((v[1] + v[3]) + v[4])) + ((v[2] + v[5]) + v[6])
    for result in simulate(work, 7, flops=1e6).results.values():
        np.testing.assert_array_equal(result, expected)


def test_gather_and_calls():
    def client(fabric):
        out = np.zeros(3, np.float32)
        header = fabric.call(2, [np.full(3, fabric.rank, np.float32)], out)
        fabric.set_status(Column.STATE, State.FINISHED)
        return out[0], header.round

    def server(fabric):
        fabric.serve(lambda message: ([message.vector + 10], Header(round=message.sender)))
        return "served"

    simulation = Simulation(uniform(3, **LINKS), 3)
    fabrics = [Fabric(transport, replicas=(0, 1)) for transport in simulation.transports]
    for fabric in fabrics:
        fabric.join(NEEDS, "layout")
    jobs = [partial(work, fabric) for work, fabric in zip((client, client, server), fabrics)]
    assert simulation.run(dict(enumerate(jobs))) == {0: (10, 0), 1: (11, 1), 2: "served"}

    gathered = simulate(lambda f: [(r, v[0]) for r, v in f.gather(np.full(4, f.rank, np.float32))], 3).results
    assert gathered == {0: [(0, 0), (1, 1), (2, 2)], 1: [], 2: []}


def test_no_mass_is_lost_when_all_drain():
    results = simulate(push_sum, 8, parse(CORES), flops=1e5).results
    assert sum(results.values()) == pytest.approx(8, abs=1e-12)


def test_the_same_seed_gives_the_same_run():
    def run(seed: int) -> tuple[dict[int, float], float, int]:
        simulation = simulate(push_sum, 8, parse(CORES), flops=1e5, seed=seed)
        return simulation.results, simulation.time, simulation.happened

    assert run(1) == run(1)
    assert run(1)[:2] != run(2)[:2]


def test_a_thousand_ranks():
    simulation = simulate(lambda fabric: push_sum(fabric, 5, 1024), 1024, flops=1e6)
    assert sum(simulation.results.values()) == pytest.approx(1024)
    total = np.zeros(1)

    def work(fabric):
        vector = np.full(1, fabric.rank, np.float32)
        fabric.allreduce(vector)
        total[0] += vector[0] == 1023 * 512

    simulate(work, 1024)
    assert total[0] == 1024


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_parts_of_a_sum_are_broadcast_while_others_are_added(ranks):
    parts = 12
    size = parts * CHUNK // 4

    def work(fabric):
        own = np.full(size, 1.0 + fabric.rank, np.float32)
        fabric.allreduce(own)
        assert own.min() == own.max() == ranks * (ranks + 1) / 2

    one_way = parts * CHUNK * LINKS["beta"]  # the time of one vector through a link
    together = simulate(work, ranks, uniform(ranks, per_node=ranks, **LINKS)).time
    assert one_way < together < 1.75 * one_way
    apart = simulate(work, ranks).time  # every rank is a node: each sends 2 (P - 1) / P vectors; two send a vector each
    assert apart / one_way == pytest.approx(2 * (ranks - 1) / ranks, rel=0.1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_published_states_and_claims_do_not_survive_a_second_join(nodes: int) -> None:
    def work(fabric: Fabric) -> tuple[bool, bool, int]:
        tickets: list[int] = []
        fabric.transport.claims.request(2, tickets.append)
        fabric.transport.claims.begin(tickets[0])
        fabric.transport.claims.settle(tickets[0])
        fabric.publish([ones()], Header(round=7))
        after(fabric, 1.0)
        if nodes == 2:
            fabric.latest(1 - fabric.rank)  # the reply arrives after the second join
        fabric.join(NEEDS, "another layout")
        fabric.transport.claims.request(2, tickets.append)
        after(fabric, 1.0)
        early = fabric.latest(1 - fabric.rank)
        after(fabric, 1.0)
        fabric.publish([ones()], Header(round=8))
        found = fabric.wait(lambda: fabric.latest(1 - fabric.rank), (), "a state")
        return early is None, tickets[1] >= 0, found.header.round

    results = simulate(work, 2, uniform(2, 2 // nodes, **LINKS)).results
    assert list(results.values()) == [(True, True, 8)] * 2


def test_attributes_of_the_transport_are_those_of_the_fabric() -> None:
    fabric = Fabric(LoopbackTransport())
    fabric.stall, fabric.service, fabric.stop_wanted = 7.0, lambda: True, True
    assert (fabric.transport.stall, fabric.transport.stop_wanted) == (7.0, True)
    assert fabric.transport.poll_service() and fabric.claims.request(1, lambda ticket: None) is None


def test_claims_of_a_single_rank_do_not_survive_a_second_join() -> None:
    fabric, tickets = Fabric(LoopbackTransport()), []
    for _ in range(2):
        fabric.join(NEEDS, "layout")
        fabric.transport.claims.request(1, tickets.append)
        fabric.transport.claims.begin(tickets[-1])
        fabric.transport.claims.settle(tickets[-1])
    assert tickets[0] == tickets[1] >= 0
