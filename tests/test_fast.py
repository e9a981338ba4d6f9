"""FAST agrees with its equations, loses no gradient, never waits within an epoch, and survives deaths and stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quadratic import SIZE, START, Quadratic, gradient
from quick import quick
from sessions import CLUSTER, Sessions
from toy_replicas import LINK, config_of, run, spread

from minidl import simulate, train
from minidl.comm.cluster import Event, uniform
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods.fast import Fast
from minidl.comm.topology import build
from minidl.comm.transport.sim import Simulation

ETA = 0.05
FAST_LINK = {"alpha": 1e-9, "beta": 1e-13}
SIX = CLUSTER.replace("count = 4", "count = 6")
EXCHANGES = ("gradients", "models")
After = Callable[[Any, int], None]


class Trained:
    """Quadratics in float64 that a simulation trains. x: the weights after each step (steps, P, n).

    staggered: replica i begins i / P of a step late, so that each message arrives before its receiver's next step.
    slow: {rank: how many times as long its gradients take}. sent, applied: sums of gradients, by replica.
    """

    def __init__(
        self, ranks: int, steps: int, *, staggered: bool = False, slow: dict[int, int] | None = None,
        momentum: float = 0.0, link: dict[str, float] = LINK, after: After = lambda method, step: None, **options: Any,
    ) -> None:  # fmt: skip
        config = config_of("fast", **{"weight_decay": 0.0, "momentum": momentum, "lr": ETA, **options})
        self.x, self.times = np.zeros((steps, ranks, SIZE)), np.zeros((steps, ranks))
        self.methods: dict[int, Any] = {}
        self.sent, self.applied = np.zeros((ranks, SIZE)), np.zeros((ranks, SIZE))
        simulation = Simulation(uniform(ranks, 1, **link), ranks, 0, flops=1e4)

        def work(rank: int) -> None:
            fabric = Fabric(simulation.transport(rank))
            fabric.join(Fast.buffers(2 * SIZE, config), "quadratic")  # the sizes are for float32
            quadratic: Any = Slowed(fabric, ETA, momentum, (slow or {}).get(rank, 1))
            method = self.methods[rank] = Fast(quadratic, fabric, config)
            apply = quadratic.apply

            def applied(vector: np.ndarray) -> None:
                self.applied[rank] += vector
                apply(vector)

            quadratic.apply = applied
            fabric.set_status(Column.STATE, State.TRAINING)
            if staggered:
                fabric.elapse("gradient", 8 * rank / ranks)
            for step in range(steps):
                fabric.begin_step(step, synchronous=False)
                method.step(None)
                self.sent[rank] += quadratic.own
                self.x[step, rank], self.times[step, rank] = quadratic.theta, fabric.now()
                after(method, step)
            fabric.set_status(Column.STATE, State.PAUSED)
            method.pause()

        simulation.run({rank: lambda rank=rank: work(rank) for rank in range(ranks)})


class Slowed(Quadratic):
    """own: the last gradient of this replica."""

    def __init__(self, fabric: Fabric, lr: float, momentum: float, slow: int) -> None:
        super().__init__(fabric, lr, momentum)
        self.slow = slow

    def gradient(self, batch: object) -> float:
        self.fabric.elapse("gradient", 8 * (self.slow - 1))
        loss = super().gradient(batch)
        self.own = self.grad.copy()
        return loss

    def mix(self, other: np.ndarray, weight: float) -> None:
        self.mix_into(self.theta, other, weight)


# -- the equations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "ranks", "momentum"), [("torus", 9, 0.0), ("ring", 5, 0.0), ("ring", 2, 0.9)])
def test_gradients_in_numpy(topology: str, ranks: int, momentum: float) -> None:
    """In its turn, a replica sends the gradient of its last step, applies what has arrived, and makes a step."""
    steps = 12
    options: dict[str, Any] = {"momentum": momentum, "exchange": "gradients", "topology": topology}
    found = Trained(ranks, steps, staggered=True, link=FAST_LINK, **options)
    graph = build(topology, ranks)
    x, v = np.tile(START, (ranks, 1)), np.zeros((ranks, SIZE))
    arrived: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    own = np.zeros((ranks, SIZE))
    for t in range(steps):
        for i in range(ranks):
            for j in graph.neighbours(i) if t else ():
                arrived[j].append(own[i].copy())
            for g in arrived[i]:
                v[i] = momentum * v[i] + g
                x[i] = x[i] - ETA * v[i]
            own[i] = gradient(x[i], t, i)
            v[i] = momentum * v[i] + own[i]
            x[i] = x[i] - ETA * v[i]
            np.testing.assert_allclose(found.x[t, i], x[i], rtol=0, atol=1e-12)
            arrived[i] = []
    assert sum(method.accumulated + method.dropped for method in found.methods.values()) == 0


@pytest.mark.parametrize(("topology", "ranks"), [("torus", 9), ("ring", 5)])
def test_models_in_numpy(topology: str, ranks: int) -> None:
    """The models that have arrived are averaged with D-PSGD's weights, which then sum to 1."""
    steps = 12
    found = Trained(ranks, steps, staggered=True, link=FAST_LINK, exchange="models", topology=topology)
    graph = build(topology, ranks)
    w, x = graph.matrix(0), np.tile(START, (ranks, 1))
    arrived: list[dict[int, np.ndarray]] = [{} for _ in range(ranks)]
    for t in range(steps):
        for i in range(ranks):
            for j in graph.neighbours(i) if t else ():
                arrived[j][i] = x[i].copy()
            models = {i: x[i], **arrived[i]}
            mixed = sum(w[i, j] * model for j, model in models.items()) / sum(w[i, j] for j in models)
            x[i] = mixed - ETA * gradient(mixed, t, i)
            np.testing.assert_allclose(found.x[t, i], x[i], rtol=0, atol=1e-12)
            arrived[i] = {}


def test_disagreement_grows_with_gradients_and_not_with_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours on a 4x4 torus begin on opposite sides of the minimum, which all share: the eigenvalue -3 of I + A.

    The mean contracts by 1 - 5 * eta * h. With messages in the same step, the difference would grow by 1 + 3 * eta * h.
    """
    monkeypatch.setattr("quadratic.gradient", lambda x, step, replica: x)
    side = np.array([(-1) ** (rank // 4 + rank % 4) for rank in range(16)])

    def start(self: Any, *arguments: Any) -> None:
        created(self, *arguments)
        self.theta[:] = 1e-3 * side[self.fabric.rank]

    created = Slowed.__init__
    monkeypatch.setattr(Slowed, "__init__", start)
    ends = {exchange: Trained(16, 40, exchange=exchange, topology="torus:4x4").x for exchange in EXCHANGES}
    growth = {exchange: spread(x[-1]) / spread(x[9]) for exchange, x in ends.items()}
    assert growth["gradients"] > (1 + 2 * ETA) ** 30
    assert growth["models"] < 1
    np.testing.assert_allclose(np.sign(ends["gradients"][-1, :, 0]), side * np.sign(ends["gradients"][-1, 0, 0]))


# -- messages ----------------------------------------------------------------------------------------------------------


SLOW_LINK = {"alpha": 2e-4, "beta": 1e-5}


@pytest.mark.parametrize("max_age", [1, 3, 1000])
def test_no_gradient_is_lost(max_age: int) -> None:
    """What was sent to the neighbours was applied, dropped or still waits. A slow replica keeps its edges busy."""
    ranks, log = 6, []
    drop, receive = Fast.drop, Fast.receive

    def dropped(self: Any, place: int) -> None:
        if self.queued[place, 0]:
            log.append(self.waiting[place].copy())
        drop(self, place)

    def received(self: Any, message: Any) -> None:
        before = self.dropped
        receive(self, message)
        if self.dropped > before:
            log.append(message.vector.copy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fast, "drop", dropped)
        patch.setattr(Fast, "receive", received)
        found = Trained(ranks, 40, slow={2: 7}, link=SLOW_LINK, exchange="gradients", topology="torus", max_age=max_age)
    methods = found.methods.values()
    waiting = sum((method.waiting[method.queued[:, 0] > 0].sum(axis=0) for method in methods), np.zeros(SIZE))
    sent = sum(len(method.neighbours) * total for method, total in zip(methods, found.sent))
    np.testing.assert_allclose(found.applied.sum(axis=0) + np.sum(log, axis=0) + waiting, sent, rtol=0, atol=1e-11)
    assert sum(method.accumulated for method in methods) > 0
    assert (sum(method.dropped for method in methods) == 0) == (max_age == 1000)
    assert max(method.fabric.stats.age_max for method in methods) <= max_age


def test_a_straggler_does_not_slow_the_others() -> None:
    for exchange in EXCHANGES:
        even = Trained(9, 30, exchange=exchange, topology="torus")
        slowed = Trained(9, 30, slow={4: 10}, exchange=exchange, topology="torus")
        others = [rank for rank in range(9) if rank != 4]
        assert slowed.times[-1, 4] > 9 * even.times[-1, 4]
        assert slowed.times[-1, others].max() <= 1.001 * even.times[-1, others].max()


def test_step_time_does_not_grow_with_the_replicas() -> None:
    """A 2x2 torus has 2 neighbours, an 8x8 torus 4: each of their gradients is an update more."""
    for exchange in EXCHANGES:
        few, many = (Trained(ranks, 20, exchange=exchange, topology="torus").times[-1].max() for ranks in (4, 64))
        assert many <= 1.05 * few


# -- the end of an epoch -----------------------------------------------------------------------------------------------


def test_all_restart_from_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 2 has the best accuracy on enough images; replica 3 has a better one on too few."""
    accuracies, images, at_end = (0.5, 0.7, 0.8, 1.0), (64, 64, 64, 8), {}

    def after(method: Any, step: int) -> None:
        if step % 10 == 9:
            rank = method.fabric.rank
            at_end[rank] = method.replica.theta.copy()
            method.meet(step // 10 + 1, images[rank], accuracies[rank], 1.0)
            assert (method.replica.theta == at_end[2]).all() and not method.queued.any()

    found = Trained(4, 20, slow={1: 3}, exchange="gradients", topology="torus", after=after)
    assert {method.epoch for method in found.methods.values()} == {2}
    assert sum(method.dropped for method in found.methods.values()) > 0, "gradients of the epoch before"


def test_a_run_ends_with_the_weights_of_the_best(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "run", 4, {}, method="fast", topology="torus", epochs=3, lr=0.01)
    vectors, summary = sessions.last().vectors, sessions.summary
    assert all((vectors[f"{rank}/theta"] == vectors["0/theta"]).all() for rank in range(4))
    assert summary and summary["consensus_distance"] == 0 and {"accumulated", "dropped"} <= summary.keys()
    assert vectors["0/method.waiting"].shape[0] == 4 and vectors["0/method.queued"].shape == (4, 2)


@pytest.mark.parametrize("pieces", [1, 3, 5])
def test_replicas_that_find_no_batch_meet_the_others(tmp_path: Path, pieces: int) -> None:
    """The run ends with an epoch that has fewer batches than there are replicas."""
    data = f"synthetic:{24 * 10}x4x4x1:3"
    sessions = Sessions(tmp_path / "run", 4, {}, method="fast", data=data, steps=2 + pieces, lr=0.01)
    assert sessions.summary and sessions.summary["consensus_distance"] == 0


# -- deaths, newcomers, stops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_death_is_survived(exchange: str) -> None:
    """A torus of 5 does not exist: the others go on along a ring."""
    options: dict[str, Any] = {"exchange": exchange, "topology": "torus", "lr": 0.01}
    whole = run("fast", 6, 40, cluster=2, **options)
    cluster = replace(uniform(6, 2, **LINK), deaths=(Event(time=whole.seconds / 2, rank=2),))
    end = run("fast", 6, 40, cluster=cluster, **options)
    left = {rank: method for rank, method in end.methods.items() if rank != 2}
    assert end.methods[2].replica.steps < 40 and all(method.replica.steps == 40 for method in left.values())
    ring = {0: [1, 5], 1: [0, 3], 3: [1, 4], 4: [3, 5], 5: [0, 4]}
    assert {rank: sorted(method.neighbours) for rank, method in left.items()} == ring


def test_gradients_that_wait_keep_their_neighbour_when_another_dies() -> None:
    fabric = Fabric(Simulation(uniform(6, 1), 6, 0, flops=1.0).transport(0))
    method = Fast(Quadratic(fabric, ETA, 0.0), fabric, config_of("fast", topology="torus"))  # type: ignore[arg-type]
    assert method.neighbours == [1, 2, 3]
    method.queued[:3], method.waiting[:3] = [(1, 1), (2, 1), (3, 1)], np.arange(3)[:, None]
    method.find_neighbours((0, 2, 3, 4))
    assert method.neighbours == [2, 3] and method.dropped == 1
    assert method.queued[:, 0].tolist()[:2] == [2, 3] and method.waiting[:2, 0].tolist() == [1, 2]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_resumed_run_has_the_same_bits(exchange: str) -> None:
    """The gradients that wait are saved: those of 10 steps, a stop and 10 steps are those of 20 steps."""
    options: dict[str, Any] = {"exchange": exchange, "topology": "ring", "momentum": 0.9, "lr": 0.01, "cluster": 2}
    half = run("fast", 4, 10, **options)
    ends = [run("fast", 4, 20, start=half, **options).theta() for _ in range(2)]
    assert (ends[0] == ends[1]).all() and not (ends[0] == half.theta()).all()
    other = run("fast", 4, 10, start=half, **options)  # no step more
    assert (other.theta() == half.theta()).all()
    for rank, method in half.methods.items():
        for name, vector in method.vectors().items():
            assert (other.methods[rank].vectors()[name] == vector).all()
        assert other.methods[rank].numbers() == method.numbers()


@pytest.mark.parametrize(("exchange", "topology"), quick(
    [*product(EXCHANGES, ("ring", "torus"))], ("gradients", "torus"), ("models", "ring"),
))  # fmt: skip
def test_one_joins_and_one_dies(tmp_path: Path, exchange: str, topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 4 joins, and replica 1 dies: there is a torus of 4, none of 5, and one of 4 again. Then the run stops."""
    monkeypatch.setattr("sessions.CLUSTER", SIX)
    options: dict[str, Any] = {"method": "fast", "exchange": exchange, "topology": topology, "epochs": 4, "lr": 0.01}
    whole = Sessions(tmp_path / "whole", 4, {}, **options).simulation.time
    run = Sessions(tmp_path / "run", 5, {1: 0.6 * whole}, joins={4: 0.2 * whole}, stop=0.75 * whole, **options)
    assert not run.errors and len(run.last().state["members"]) == 4
    again = Sessions(tmp_path / "run", 4, {})
    assert again.summary and again.summary["replicas_alive"] == 4 and again.summary["epochs"] == 4


@pytest.mark.parametrize("exchange", quick(["push", "push-pull"], "push-pull"))
def test_gossip_on_a_torus_takes_a_newcomer(
    tmp_path: Path, exchange: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no torus of 5: one line says so, and the replicas exchange along a ring."""
    monkeypatch.setattr("sessions.CLUSTER", SIX)
    options: dict[str, Any] = {"method": "gossip", "peer": "topology", "topology": "torus:2x2", "exchange": exchange}
    whole = Sessions(tmp_path / "whole", 4, {}, **options).simulation.time
    capsys.readouterr()
    run = Sessions(tmp_path / "run", 5, {}, joins={4: 0.3 * whole}, quiet=False, **options)
    assert run.summary and run.summary["replicas_alive"] == 5
    words = "minidl: there is no torus:2x2 of 5 replicas: from now on, they exchange along a ring"
    assert capsys.readouterr().err.count(words) == 1


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ("--max-age 0", "max-age: expected a whole number between 1 and 1000000, got 0"),
    ("--max-age -1", "max-age: expected"),
    ("--topology complete", "unknown topology 'complete'"),
    ("--exchange push", "unknown exchange 'push'"),
    ("--topology torus:2x3", "torus:2x3 is for 6 replicas, not for 5"),
    ("--topology torus", "torus over 5 replicas: 5 is a prime number"),
])  # fmt: skip
def test_mistakes(options: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["--method", "fast", "--ranks", "5", "--model", "mlp", "--out", str(tmp_path / "run"), *options.split()]
    assert simulate.main(command) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and not (tmp_path / "run").exists()
    if "torus" not in options:
        assert train.main(["--method", "fast", "--workers", "5", *options.split()]) == 2
