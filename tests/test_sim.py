"""The simulation: times worked out by hand, sums to the bit, deaths, deadlocks, a thousand ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from minidl.comm.cluster import Cluster, parse, uniform
from minidl.comm.fabric.base import CHUNK, Channel, Column, Needs, Note, PeerLost, State
from minidl.comm.fabric.sim import Deadlock, SimFabric, Simulation
from minidl.errors import ConfigError

NEEDS = Needs(elements=1000, mail=2, publish=True, call=True)
LINKS = dict(alpha=1e-3, beta=1e-6)
Work = Callable[[SimFabric], Any]


def simulate(
    work: Work | dict[int, Work], ranks: int = 2, cluster: Cluster | None = None, **options: Any
) -> Simulation:
    """Every rank does its work, once it has joined; the simulation, over, with `results`."""
    simulation = Simulation(cluster or uniform(ranks, **LINKS), ranks, **options)

    def main(fabric: SimFabric) -> Callable[[], Any]:
        def go() -> Any:
            fabric.join(NEEDS, "layout")
            return (work if callable(work) else work[fabric.rank])(fabric)

        return go

    simulation.results = simulation.run({rank: main(simulation.fabric(rank)) for rank in range(ranks)})
    return simulation


def letter(fabric: SimFabric, peer: int) -> np.ndarray:
    with fabric.wait(lambda: fabric.take(Channel.MAIL, peer), (peer,), "a letter") as letter:
        return letter.vector.copy()


def ones(size: int = 250) -> np.ndarray:
    return np.ones(size, np.float32)  # 1000 bytes


def after(fabric: SimFabric, seconds: float) -> None:
    fabric._sleep(seconds)


# -- time ------------------------------------------------------------------------------------------------------


def test_a_message_takes_alpha_and_n_beta():
    def sender(fabric):
        assert fabric.send(1, ones())
        assert fabric.now() == 0.0  # who sends does not wait

    def receiver(fabric):
        assert letter(fabric, 0).sum() == 250
        return fabric.now()

    assert simulate({0: sender, 1: receiver}).results[1] == pytest.approx(1e-3 + 1e-3)


def test_a_network_card_sends_one_message_after_the_other_and_links_inside_a_node_do_not():
    def sender(fabric):
        for peer in (1, 2):
            fabric.send(peer, ones())

    def receiver(fabric):
        letter(fabric, 0)
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
        letter(fabric, fabric.rank - 2)
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
            letter(fabric, 0)
            times.append(fabric.now())
        return np.diff(times)

    took = simulate({0: sender, 1: receiver}, cluster=cluster).results[1]
    tries = (took - 1e-3) / 0.501  # each one lost costs n beta and the timeout
    np.testing.assert_allclose(tries, np.round(tries), atol=0.01)
    assert tries.max() > 1 and tries.min() < 0.1


def test_a_gradient_takes_its_flops_and_a_straggler_longer():
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


def test_a_gradient_in_parts_takes_as_long_as_whole():
    """... so that a seed brings the same stragglers to all methods."""

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


def test_one_message_on_its_way_and_a_copy_of_what_was_sent():
    def sender(fabric):
        vector = ones()
        assert fabric.send(1, vector)
        vector[:] = 7
        assert not fabric.send(1, vector)  # not yet released
        fabric.wait(lambda: fabric.send(1, vector) or None, (1,), "the next")
        return fabric.now()

    def receiver(fabric):
        letter = fabric.wait(lambda: fabric.take(Channel.MAIL), (0,))
        after(fabric, 1.0)
        assert (letter.vector == 1).all() and not letter.vector.flags.writeable
        letter.release()
        letter.release()
        with fabric.wait(lambda: fabric.take(Channel.MAIL), (0,)) as letter:
            assert (letter.vector == 7).all()

    assert simulate({0: sender, 1: receiver}).results[0] == pytest.approx(1.002)


def test_memory_for_messages_is_as_short_as_on_real_machines():
    def work(fabric):
        if fabric.rank == 0:
            assert [fabric.send(peer, ones()) for peer in (1, 2, 3)] == [True, True, False]  # NEEDS.mail is 2

    simulate(work, 4)
    with pytest.raises(ConfigError, match="message of 1001 float32; the method needs room for 1000"):
        simulate(lambda fabric: fabric.send(1 - fabric.rank, ones(1001)))


def test_the_newest_publication_is_seen_inside_a_node_at_once_between_nodes_when_asked():
    def writer(fabric):
        for value in (1, 2, 3):
            fabric.publish([np.full(250, value, np.float32)], Note(round=value))
            after(fabric, 0.01)

    def reader(fabric):
        after(fabric, 0.015)
        seen = []
        for _ in range(2):
            with fabric.wait(lambda: fabric.latest(0), (0,)) as letter:
                seen.append((letter.note.round, fabric.now()))
        assert fabric.latest(0) is None  # seen before
        return seen

    inside = simulate({0: writer, 1: reader}, cluster=uniform(2, per_node=2, **LINKS)).results[1]
    assert inside == [(2, pytest.approx(0.017)), (3, pytest.approx(0.022))]
    between = simulate({0: writer, 1: reader}).results[1]  # alpha to ask; n beta and alpha back
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


def test_gather_and_questions():
    def client(fabric):
        out = np.zeros(3, np.float32)
        note = fabric.call(2, [np.full(3, fabric.rank, np.float32)], out)
        fabric.announce(Column.STATE, State.FINISHED)
        return out[0], note.round

    def server(fabric):
        fabric.serve(lambda letter: ([letter.vector + 10], Note(round=letter.sender)))
        return "served"

    simulation = Simulation(uniform(3, **LINKS), 3)
    for fabric in simulation.fabrics:
        fabric.replicas = (0, 1)
        fabric.join(NEEDS, "layout")
    jobs = [partial(work, fabric) for work, fabric in zip((client, client, server), simulation.fabrics)]
    assert simulation.run(dict(enumerate(jobs))) == {0: (10, 0), 1: (11, 1), 2: "served"}

    gathered = simulate(lambda f: [(r, v[0]) for r, v in f.gather(np.full(4, f.rank, np.float32))], 3).results
    assert gathered == {0: [(0, 0), (1, 1), (2, 2)], 1: [], 2: []}


def push_sum(fabric: SimFabric, steps: int = 30, ranks: int = 8) -> float:
    """Each keeps half of its mass and gives half away, to anybody."""
    mass, chance = 1.0, np.random.default_rng(fabric.rank)
    for step in range(steps):
        fabric.begin_step(step, synchronous=False)
        fabric.elapse("gradient", 1)
        mass += sum(letter.note.weight for letter in fabric.poll())
        if fabric.send(int(chance.integers(ranks)), ones(4), note=Note(weight=mass / 2)):
            mass /= 2
    taken: list[float] = []
    fabric.drain(lambda letter: taken.append(letter.note.weight))
    return mass + sum(taken)


CORES = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", count = 8, devices = ["core"]}]
between = {alpha = 0.3, beta = 1e-3}
"""


def test_no_mass_is_lost_when_all_drain():
    results = simulate(push_sum, 8, parse(CORES), flops=1e5).results
    assert sum(results.values()) == pytest.approx(8, abs=1e-12)


def test_the_same_seed_gives_the_same_run():
    def run(seed: int) -> tuple[dict[int, float], float, int]:
        simulation = simulate(push_sum, 8, parse(CORES), flops=1e5, seed=seed)
        return simulation.results, simulation.time, simulation.happened

    assert run(1) == run(1)
    assert run(1)[:2] != run(2)[:2]


# -- deaths, joins, errors -------------------------------------------------------------------------------------


def test_a_death_among_replicas_that_do_not_wait_for_each_other():
    cluster = parse(CORES + "deaths = [{rank = 3, time = 0.9}]")
    simulation = simulate(push_sum, 8, cluster, flops=1e5)
    assert set(simulation.results) == {0, 1, 2, 4, 5, 6, 7}
    assert 4 < sum(simulation.results.values()) < 8  # its mass has gone with it
    assert simulation.fabric(0).survivors() == [0, 1, 2, 4, 5, 6, 7]


def test_a_death_ends_the_waiting_of_those_who_waited_for_it_and_cleans_up_behind_it():
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


def test_what_waits_forever_is_named():
    with pytest.raises(Deadlock, match=r"after 1 virtual s, all wait .*: rank 0 waits for the mail of 1; rank 1 waits "
                                       r"for the exchange of round 4 of 0"):  # fmt: skip
        def work(fabric):
            after(fabric, 1.0)
            if fabric.rank == 0:
                fabric.wait(lambda: fabric.take(Channel.MAIL, 1), (1,), "the mail")
            else:
                list(fabric.exchange([0], [], note=Note(round=4))())

        simulate(work)


def test_an_error_ends_the_simulation_and_says_whose_it_was():
    def work(fabric):
        if fabric.rank == 1:
            after(fabric, 2.0)
            raise ValueError("no")
        fabric.wait(lambda: None)

    with pytest.raises(ValueError, match="no") as caught:
        simulate(work)
    assert caught.value.__notes__ == ["rank 1 of the simulation, after 2 virtual s"]


def test_one_that_joins_late_is_dead_to_others_until_then():
    def work(fabric):
        seen = [fabric.survivors()]
        after(fabric, 3.0)
        return [*seen, fabric.survivors(), fabric.now()]

    results = simulate(work, 2, parse(CORES + "joins = [{rank = 1, time = 2.0}]")).results
    assert results == {0: [[0], [0, 1], 3.0], 1: [[0, 1], [0, 1], 5.0]}


def test_all_stop_after_equally_many_steps():
    def work(fabric):
        for step in range(100):
            if not fabric.begin_step(step, synchronous=True):
                return step
            fabric.elapse("gradient", 1 + fabric.rank)
            if fabric.rank == 1 and step == 10:
                fabric.simulation.stop()

    stops = simulate(work, 3, parse(CORES), flops=1e5).results
    assert len(set(stops.values())) == 1 and stops[0] > 11


def test_models_that_differ_and_memory_that_is_not_shared():
    simulation = Simulation(uniform(2), 2)
    simulation.fabric(0).join(NEEDS, "one")
    with pytest.raises(ConfigError, match="replica 1 has another model"):
        simulation.fabric(1).join(NEEDS, "other")
    with pytest.raises(ConfigError, match="ranks on 2 nodes share no memory"):
        simulation.fabric(0).join(Needs(shared=(("center", 5),)), "one")
    simulation = Simulation(uniform(2, per_node=2), 2)
    for fabric in simulation.fabrics:
        fabric.join(Needs(shared=(("center", 5),)), "one")
    simulation.fabric(0).shared("center")[:] = 3
    assert (simulation.fabric(1).shared("center") == 3).all()


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
def test_a_sum_comes_down_while_the_rest_of_it_rises(ranks):
    parts = 12
    size = parts * CHUNK // 4

    def work(fabric):
        own = np.full(size, 1.0 + fabric.rank, np.float32)
        fabric.allreduce(own)
        assert own.min() == own.max() == ranks * (ranks + 1) / 2

    one_way = parts * CHUNK * LINKS["beta"]  # a vector through a network card
    through_one = {2: 1, 3: 2}.get(ranks, 3)  # vectors: up, and down to two
    assert one_way < simulate(work, ranks).time < (through_one + 0.75) * one_way
