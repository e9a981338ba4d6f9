"""Requests and replies on a virtual clock: replicas that train and serve, calls that overlap a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidl.comm.cluster import parse, uniform
from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Header, Message, State
from minidl.comm.fabric.service import Service
from minidl.comm.transport.sim import Simulation

ONES = np.ones(250, np.float32)  # 1000 bytes
DEATH = """
devices.core = {flops = 1e6}
nodes = [{name = "node", count = 3, devices = ["core"]}]
between = {alpha = 1e-3, beta = 1e-6}
deaths = [{rank = 1, time = 0.0031}]
"""


def simulated(work: Callable[[Fabric], Any], ranks: int = 2, cluster: Any = None) -> dict[int, Any]:
    """Run `work` on ranks that all may call and serve. A message of 1000 bytes takes 2 ms, an image 1 s."""
    cluster = cluster or uniform(ranks, alpha=1e-3, beta=1e-6)
    simulation = Simulation(cluster, ranks, flops=cluster.devices["core"].flops)
    fabrics = [Fabric(transport) for transport in simulation.transports]
    for fabric in fabrics:
        fabric.join(BufferSpec(nbytes=1000, call=True, serving=tuple(range(ranks))), "layout")
        fabric.stats.start()
    return simulation.run({fabric.rank: lambda fabric=fabric: work(fabric) for fabric in fabrics})


def echo(message: Message) -> tuple[list[np.ndarray], Header]:
    return [message.vector * 2], message.header


def test_ranks_that_call_each_other_answer_while_they_wait():
    def work(fabric: Fabric) -> tuple[float, float]:
        fabric.register(echo)
        out = np.zeros(250, np.float32)
        fabric.call(1 - fabric.rank, (ONES,), out)
        return out.sum(), fabric.now()

    assert simulated(work) == {0: (500, pytest.approx(4e-3)), 1: (500, pytest.approx(4e-3))}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 3, 0, 1]])
def test_many_calls_of_one_server_get_their_own_replies_in_any_order(order: list[int]):
    def work(fabric: Fabric) -> list[float]:
        if fabric.rank == 0:
            fabric.register(echo)
            fabric.wait(lambda: fabric.state(1) >= State.PAUSED or None, (1,))
            return []
        out = np.zeros((5, 1), np.float32)
        calls = [fabric.call_start(0, (np.full(1, i, np.float32),), out[i], Header(round=i)) for i in range(5)]
        assert [calls[i].wait().round for i in order] == order
        fabric.set_status(Column.STATE, State.PAUSED)
        return out.ravel().tolist()

    assert simulated(work)[1] == [0, 2, 4, 6, 8]


def test_replies_of_a_handler_are_sent_before_it_is_replaced():
    """Rank 1 computes while its first reply is there, so its second reply waits. Then rank 0 stops answering."""

    def work(fabric: Fabric) -> float:
        if fabric.rank == 0:
            fabric.register(echo)
            for step in range(2):
                fabric.elapse("gradient", 0.5)
                fabric.begin_step(step, synchronous=False)
            fabric.register(None)
            fabric.wait(lambda: fabric.state(1) >= State.PAUSED or None, (1,))
            return fabric.now()
        out = np.zeros((2, 250), np.float32)
        calls = [fabric.call_start(0, (ONES,), out[i]) for i in range(2)]
        fabric.elapse("gradient", 2)
        for call in calls:
            call.wait()
        fabric.set_status(Column.STATE, State.PAUSED)
        return float(out.sum())

    assert simulated(work)[1] == 1000


def test_a_server_looks_for_requests_once_between_two_waits(monkeypatch: pytest.MonkeyPatch):
    polls: list[float] = []
    poll = Service.poll

    def counted(self: Service) -> bool:
        polls.append(self.transport.now())
        return poll(self)

    monkeypatch.setattr(Service, "poll", counted)

    def work(fabric: Fabric) -> None:
        if fabric.rank == 0:
            fabric.set_status(Column.STATE, State.PAUSED)
            fabric.serve(echo)
            return
        fabric.elapse("gradient", 1)
        fabric.set_status(Column.SPEED, 1)  # wakes the server
        fabric.elapse("gradient", 1)
        fabric.set_status(Column.STATE, State.PAUSED)

    simulated(work)
    assert polls.count(1.0) == 1


def test_a_rank_calls_itself():
    def work(fabric: Fabric) -> float:
        fabric.register(echo)
        out = np.zeros(250, np.float32)
        fabric.call(fabric.rank, (ONES,), out)
        return out.sum()

    assert simulated(work) == {0: 500, 1: 500}


def test_a_call_overlaps_a_gradient_and_a_busy_rank_answers_when_it_begins_a_step():
    def work(fabric: Fabric) -> float:
        out = np.zeros(250, np.float32)
        if fabric.rank == 1:
            pending = fabric.call_start(0, (ONES,), out, Header(round=7))
            fabric.elapse("gradient", 1)
            assert pending.wait() == pending.wait() == Header(round=7)
            assert out.sum() == 500
            return fabric.now()
        fabric.register(echo)
        for step in range(3):
            fabric.elapse("gradient", 0.5)
            fabric.begin_step(step, synchronous=False)
        return fabric.now()

    assert simulated(work) == {0: pytest.approx(1.5), 1: pytest.approx(1.0)}  # the reply arrives during the gradient


def test_the_time_of_an_answer_does_not_count_as_waiting():
    def slow(message: Message) -> tuple[list[np.ndarray], Header]:
        assert served.append(message.sender) is None
        fabrics[0].elapse("gradient", 3)
        return echo(message)

    served: list[int] = []
    fabrics: dict[int, Fabric] = {}

    def work(fabric: Fabric) -> float:
        fabrics[fabric.rank] = fabric
        if fabric.rank == 0:
            fabric.register(slow)
        else:
            fabric.call(0, (ONES,), np.zeros(250, np.float32))
        fabric.barrier()
        return float(fabric.stats.report()["seconds"]["waiting"])

    waited = simulated(work)
    assert waited[1] > 3 and waited[0] < 0.1 and served == [1]


def test_a_concurrent_sum_does_not_answer():
    """A handler changes the replica's state, so it must not run beside the gradient, in another thread."""
    answered: list[float] = []

    def work(fabric: Fabric) -> None:
        def note(message: Message) -> tuple[list[np.ndarray], Header]:
            answered.append(fabric.now())
            return echo(message)

        if fabric.rank == 0:
            fabric.register(note)
            pending = fabric.allreduce_start(np.zeros(250, np.float32))
            fabric.elapse("gradient", 1)
            pending.wait()
            fabric.barrier()
            return
        pending = fabric.allreduce_start(np.zeros(250, np.float32))
        fabric.call(0, (ONES,), np.zeros(250, np.float32))
        pending.wait()
        fabric.barrier()

    simulated(work)
    assert answered == [pytest.approx(1.0)]


@pytest.mark.parametrize("ranks", [(1, 2), (1, 1, 1)])
def test_ranks_that_compute_before_they_receive_their_replies_delay_no_other(ranks: tuple[int, ...]):
    """Two ranks make a call each, or one makes three. Then they compute for 1 s. Meanwhile another rank calls."""

    def work(fabric: Fabric) -> float:
        out = np.zeros((3, 250), np.float32)
        if fabric.rank == 0:
            fabric.set_status(Column.STATE, State.PAUSED)
            fabric.serve(echo)
            return 0.0
        calls = [fabric.call_start(0, (ONES,), each) for each, rank in zip(out, ranks) if rank == fabric.rank]
        if fabric.rank < 3:
            fabric.elapse("gradient", 1)
        else:
            fabric.elapse("gradient", 0.1)
            began = fabric.now()
            fabric.call(0, (ONES,), out[0])
        for call in calls:
            call.wait()
        fabric.set_status(Column.STATE, State.PAUSED)
        assert out.sum() == 500 * max(len(calls), fabric.rank == 3)
        return fabric.now() - began if fabric.rank == 3 else 0.0

    assert simulated(work, 4)[3] == pytest.approx(4e-3)


def test_a_caller_that_dies_does_not_block_the_others():
    """Rank 1 dies while its reply is due. Rank 0 then answers rank 2."""

    def work(fabric: Fabric) -> list[float]:
        if fabric.rank:
            fabric.elapse("gradient", 0.01 * (fabric.rank == 2))
            out = np.zeros(250, np.float32)
            fabric.call(0, (ONES,), out)
            fabric.set_status(Column.STATE, State.PAUSED)
            return [float(out.sum())]
        senders: list[float] = []

        def note(message: Message) -> tuple[list[np.ndarray], Header]:
            senders.append(message.sender)
            fabric.elapse("gradient", 0.005)
            return echo(message)

        fabric.set_status(Column.STATE, State.PAUSED)
        fabric.serve(note)
        return senders

    assert simulated(work, 3, parse(DEATH)) == {0: [1, 2], 2: [500]}
