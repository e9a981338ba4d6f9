"""Training methods agree with their papers' formulas, repeat bit-identically, and with one replica equal plain SGD."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from toy_replicas import Group, alone, batch_of, config_of, easy_batch, run, spread

from minidl import models, nn, ops
from minidl.comm.methods import METHODS
from minidl.comm.methods.allreduce import buckets
from minidl.comm.methods.base import Method
from minidl.comm.methods.dpsgd import DPSGD
from minidl.comm.topology import build
from minidl.errors import ConfigError
from minidl.program.replay import Gradient

MOMENTUM: dict[str, Any] = dict(momentum=0.9, weight_decay=1e-2)


def same(a: Group, b: Group) -> bool:
    return np.array_equal(a.theta(), b.theta())


class Diary:
    """Copies of vectors of each replica at each step: the parameters x and the velocity m before the step, and the
    gradient g after the step."""

    def __init__(self) -> None:
        self.notes: dict[tuple[int, int, str], np.ndarray] = {}

    def before(self, method: Method, step: int) -> None:
        rank = method.fabric.rank
        self.notes[step, rank, "x"] = method.replica.theta.astype(np.float64)
        self.notes[step, rank, "m"] = method.replica.state["velocity"].astype(np.float64)

    def after(self, method: Method, step: int) -> None:
        self.notes[step, method.fabric.rank, "g"] = method.replica.grad.astype(np.float64)

    def all(self, step: int, what: str) -> np.ndarray:
        """Return x, m or g of all P replicas at a step, (P, n) float64."""
        ranks = sorted({rank for at, rank, _ in self.notes if at == step})
        return np.array([self.notes[step, rank, what] for rank in ranks])


# One replica.


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("velocity", ["local", "mixed"])
def test_one_replica_is_plain_sgd(name: str, velocity: str) -> None:
    if name == "eamsgd":
        pytest.skip("Nesterov's momentum is not that of sgd: see test_elastic.py")
    if name in ("diloco", "noloco", "gasloc"):
        pytest.skip("a single replica has outer steps, too: see test_outer.py")
    options = dict(MOMENTUM, velocity=velocity, period=2, rho=0.0)
    trained = run(name, 2 if name == "ps" else 1, 5, **options)
    plain = alone(5, **MOMENTUM)
    assert np.array_equal(trained.methods[0].replica.theta, plain.theta)


@pytest.mark.parametrize("exchange", ["pull", "push-pull"])
@pytest.mark.parametrize("peer", ["topology", "hierarchical", "speed"])
def test_one_gossiping_replica_is_plain_sgd(exchange: str, peer: str) -> None:
    trained = run("gossip", 1, 4, exchange=exchange, peer=peer, block="layers", **MOMENTUM)
    assert np.array_equal(trained.methods[0].replica.theta, alone(4, **MOMENTUM).theta)


# Synchronous SGD.


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_allreduce_equals_one_replica_with_all_batches(ranks: int) -> None:
    trained = run("allreduce", ranks, 4, bucket=1e-4, **MOMENTUM)
    for rank in range(1, ranks):
        assert np.array_equal(trained.methods[rank].replica.theta, trained.methods[0].replica.theta)

    def union(step: int) -> tuple[np.ndarray, np.ndarray]:
        batches = [batch_of(rank, step) for rank in range(ranks)]
        return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])

    np.testing.assert_allclose(trained.theta()[0], alone(4, union, **MOMENTUM).theta, rtol=2e-5, atol=2e-6)


def test_the_size_of_buckets_changes_no_bit() -> None:
    assert same(run("allreduce", 3, 3, bucket=1e-6), run("allreduce", 3, 3, bucket=1.0))


def test_buckets_consist_of_whole_layers() -> None:
    layers = [(0, 100), (100, 110), (110, 200), (200, 205)]
    assert buckets(layers, 1) == [0, 100, 110, 200, 205]
    assert buckets(layers, 50) == [0, 110, 205]
    assert buckets(layers, 102) == [0, 100, 205]
    assert buckets(layers, 1000) == [0, 205]


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet20"])
def test_a_gradient_in_parts_has_the_same_bits(name: str) -> None:
    """`gradient.parts` yields a part of the gradient as soon as this part has its final value."""
    shape = (16, 16, 3)
    nn.seed(0)
    model = models.build(name, shape, 10)
    x, y = np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float32), np.arange(4)
    gradient = Gradient(model, ops.cross_entropy)
    whole = gradient(x, y)
    arena = gradient.arena
    expected = arena.grad.copy()
    cuts = [slot.start for slot in arena.slots] + [arena.size]
    arena.grad[:] = np.nan
    seen, before = [], 0.0
    for start, stop, done in gradient.parts(x, y, cuts):
        for slot in arena.slots:
            if start <= slot.start < stop:
                assert np.array_equal(arena.grad[slot.start : slot.stop], expected[slot.start : slot.stop])
        assert before <= done <= 1
        seen.append((start, stop))
        before = done
        if len(seen) == 1:
            assert np.isnan(arena.grad[0]) and done < 0.9  # the rest of the gradient is not computed yet
    assert seen == list(itertools.pairwise(cuts))[::-1]
    assert gradient.result == whole


def test_parts_of_a_step_that_cannot_be_recorded() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            if float(x.mean().item()) > 1e9:
                raise AssertionError
            return self.linear(x.reshape(-1, 16))

    gradient = Gradient(Odd(), ops.cross_entropy)
    x, y = batch_of(0, 0)
    with pytest.warns(UserWarning, match="slower"):
        parts = [part for *part, _ in gradient.parts(x, y, [0, 8, gradient.arena.size])]
    assert parts == [[8, gradient.arena.size], [0, 8]]
    assert gradient.result == gradient.by_tape(x, y)


def test_replicas_stay_separate_when_the_step_is_recorded_again() -> None:
    """If a model is built anywhere in the process, the next gradient records the step again."""
    one, other = alone(1), alone(1)
    other.theta[:] = 0
    models.mlp((2, 2, 1), 2, hidden=(3,))
    assert one.gradient(batch_of(0, 1)) != other.gradient(batch_of(0, 1))
    models.mlp((2, 2, 1), 2, hidden=(3,))
    assert abs(other.gradient(batch_of(0, 1)) - np.log(3)) < 1e-6


# Local SGD.


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_sgd_averages_every_period(ranks: int) -> None:
    diary = Diary()
    trained = run("local-sgd", ranks, 7, period=3, around=(diary.before, diary.after))
    for step in range(1, 7):
        assert (spread(diary.all(step, "x")) == 0) == (step % 3 == 0)
    moved = diary.all(5, "x") - 0.1 * diary.all(5, "g")
    np.testing.assert_allclose(diary.all(6, "x")[0], moved.mean(axis=0), rtol=1e-5, atol=1e-7)
    assert spread(trained.theta()) > 0
    assert same(run("local-sgd", ranks, 4, period=9), run("local", ranks, 4))


def test_local_sgd_averages_momentum_with_velocity_mixed() -> None:
    for velocity, apart in (("local", True), ("mixed", False)):
        trained = run("local-sgd", 3, 4, period=2, velocity=velocity, **MOMENTUM)
        one, *others = (trained.methods[rank].replica for rank in range(3))
        for other in others:
            assert np.array_equal(one.theta, other.theta)
            assert np.array_equal(one.state["velocity"], other.state["velocity"]) != apart


# Mixing.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("topology", ["ring", "torus", "one-peer-exponential", "base-2", "matching", "uniform"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7])
def test_dpsgd_multiplies_by_the_mixing_matrix(topology: str, ranks: int, overlap: bool) -> None:
    """A step is X <- W @ (X - eta * G); with overlap it is X <- W @ X - eta * G. X and G hold the parameters and the
    gradients, with a row for each replica; W is the topology's mixing matrix."""
    if topology == "torus" and ranks in (2, 3, 7):
        pytest.skip("a prime number of replicas makes no torus")
    diary = Diary()
    options = dict(topology=topology, overlap=overlap)
    trained = run("dpsgd", ranks, 4, start="scattered", around=(diary.before, diary.after), **options)
    graph = build(topology, ranks, seed=0, nodes=range(ranks))
    for step in range(4):
        x, g, w = diary.all(step, "x"), diary.all(step, "g"), graph.matrix(step)
        expected = w @ x - 0.1 * g if overlap else w @ (x - 0.1 * g)
        found = diary.all(step + 1, "x") if step < 3 else trained.theta()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_dpsgd_mixes_momentum_with_velocity_mixed() -> None:
    diary = Diary()
    run("dpsgd", 3, 3, topology="ring", velocity="mixed", momentum=0.9, around=(diary.before, diary.after))
    w = build("ring", 3).matrix(0)
    expected = w @ (0.9 * diary.all(1, "m") + diary.all(1, "g"))
    np.testing.assert_allclose(diary.all(2, "m"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_quasi_global_momentum_agrees_with_its_paper(optimizer: str) -> None:
    diary = Diary()
    run("dpsgd", 3, 4, topology="ring", velocity="quasi-global", momentum=0.9, optimizer=optimizer,
        around=(diary.before, diary.after))  # fmt: skip
    mu, eta, w = 0.9, 0.1, build("ring", 3).matrix(0)
    for step in range(3):
        x, m, g = (diary.all(step, what) for what in "xmg")
        local = mu * m + g
        after = w @ (x - eta * (g + mu * local if optimizer == "nesterov" else local))
        np.testing.assert_allclose(diary.all(step + 1, "x"), after, rtol=1e-5, atol=1e-6)
        expected = mu * m + (1 - mu) * (x - after) / eta
        np.testing.assert_allclose(diary.all(step + 1, "m"), expected, rtol=1e-4, atol=1e-5)


def test_quasi_global_momentum_stays_closer_together_than_local() -> None:
    """Each replica repeats one batch, which differs between replicas, so local momentum drives them apart."""

    ends = {
        velocity: spread(run("dpsgd", 6, 60, topology="ring", velocity=velocity, momentum=0.9, lr=0.02,
                             batch=lambda rank, step: batch_of(rank, 0)).theta())
        for velocity in ("local", "mixed", "quasi-global")
    }  # fmt: skip
    assert ends["quasi-global"] < 0.7 * ends["local"], ends


# A parameter server.


def test_a_parameter_server_applies_every_gradient_once() -> None:
    trained = run("ps", 4, 6, **MOMENTUM)
    assert trained.methods[3].replica.optimizer_steps == 18
    assert spread(trained.theta()) == 0  # all ranks end with the weights of the server
    velocities = [m.replica.state["velocity"] for m in trained.methods.values()]
    assert all(np.array_equal(velocity, velocities[0]) for velocity in velocities)
    assert all(trained.methods[rank].replica.steps == 6 for rank in range(3))


def test_a_parameter_server_needs_a_separate_rank() -> None:
    with pytest.raises(ConfigError, match="2 ranks"):
        run("ps", 1, 1)


@pytest.mark.parametrize("workers", [4, 8])
def test_a_parameter_server_learns_from_late_gradients(workers: int) -> None:
    """Late gradients at the full rate would overshoot: with momentum, the loss would not fall."""
    trained = run("ps", workers + 1, 400 // workers, batch=easy_batch, momentum=0.9, lr=0.1)
    judge, images = alone(0), easy_batch(99, 0, size=200)
    first = judge.gradient(images)
    judge.theta[:] = trained.methods[0].replica.theta
    assert judge.gradient(images) < 0.1 * first


# All methods.


def runs() -> list[dict[str, Any]]:
    gossip = [dict(name="gossip", exchange=e, mix=m, peer=p, block=b) for e, m, p, b in (
        ("push", "mass", "uniform", "whole"), ("pull", "clock", "topology", "layers"),
        ("push-pull", "mass", "hierarchical", "layers"))]  # fmt: skip
    return [dict(name=name) for name in METHODS if name != "gossip"] + gossip


@pytest.mark.parametrize("options", runs(), ids=lambda o: "-".join(o.values()))
def test_a_run_is_repeated_and_resumed_exactly(options: dict[str, Any]) -> None:
    """A repeated run of 6 steps is bit-identical, and so is a repeated run of 3 steps that is resumed for 3 more.
    Except with asynchronous methods, the resumed run is also bit-identical to the run of 6 steps."""
    options = {**MOMENTUM, "period": 2, **options}
    name = options.pop("name")
    first = run(name, 4, 6, **options)
    assert same(first, run(name, 4, 6, **options))
    half = run(name, 4, 3, **options)
    second = run(name, 4, 6, start=half, **options)
    assert same(second, run(name, 4, 6, start=half, **options))
    if name not in ("gossip", "ps", "async-easgd", "eamsgd"):  # after a resume, these exchange in another order
        assert same(first, second)


@pytest.mark.parametrize("options", runs(), ids=lambda o: "-".join(o.values()))
def test_every_method_learns(options: dict[str, Any]) -> None:
    """Except with `local`, the average of the replicas has about the same loss as each replica."""
    options = dict(options)
    name = options.pop("name")
    trained = run(name, 4, 100, batch=easy_batch, momentum=0.9, lr=0.03, **options)
    judge = alone(0)
    images = easy_batch(99, 0, size=200)
    first = judge.gradient(images)
    losses = []
    for theta in (*trained.theta(), trained.theta().mean(axis=0)):
        judge.theta[:] = theta
        losses.append(judge.gradient(images))
    assert max(losses) < 0.5 * first, (first, losses)
    if name != "local":
        assert abs(losses[-1] - np.mean(losses[:-1])) < 0.05


def test_options_that_do_not_fit_together_are_refused_in_one_line() -> None:
    from minidl.comm.methods import method

    for name, options, words in (
        ("gossip", dict(mix="mass", exchange="pull"), "--mix mass needs --exchange push"),
        ("gossip", dict(velocity="mixed", optimizer="adam"), "--velocity mixed is for sgd"),
        ("dpsgd", dict(velocity="quasi-global", optimizer="lars"), "--velocity quasi-global is for sgd"),
        ("dpsgd", dict(velocity="quasi-global", optimizer="muon"), "muon has no such momentum"),
        ("dpsgd", dict(velocity="quasi-global", lookahead=5), "quasi-global and --lookahead 5 exclude each other"),
        ("hogwild-sgd", dict(lookahead=5), "--lookahead 5: replicas of hogwild-sgd share their weights"),
        ("local-sgd", dict(velocity="quasi-global"), "unknown velocity 'quasi-global'. Known: local, mixed"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            method(name).buffers(100, config_of(name, **options))
        assert "\n" not in str(caught.value)


def test_messages_are_as_long_as_needed() -> None:
    assert DPSGD.buffers(100, config_of("dpsgd", velocity="mixed")).nbytes == 800
    assert DPSGD.buffers(100, config_of("dpsgd")).nbytes == 400
