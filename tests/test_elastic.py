"""Elastic averaging agrees with its papers' equations, step by step, on quadratics in float64."""

from __future__ import annotations

import numpy as np
import pytest
from quadratic import SIZE, START, STEPS, Run, gradient
from toy_replicas import PLAIN, alone, config_of, run, spread

from minidl.comm.methods import method
from minidl.errors import ConfigError

P, ETA, RHO = 3, 0.1, 1.2
RANKS = {"rank": P + 1, "beside": P, "copies": P}  # by --center
FAMILY = ("easgd", "sync-easgd", "async-easgd", "eamsgd")
Expected = tuple[np.ndarray, list[np.ndarray]]  # x after each step (STEPS, P, n), c after each of its changes


def gradients(x: np.ndarray, t: int) -> np.ndarray:
    return np.array([gradient(x[i], t, i) for i in range(P)])


def sync_easgd(mu: float, tau: int) -> Expected:
    x, c, v, xs, cs = np.tile(START, (P, 1)), START, 0.0, [], []
    for t in range(STEPS):
        rho = 0.0 if t % tau else RHO
        v = mu * v - ETA * gradients(x, t)
        x, c = x + v - ETA * rho * (x - c), c + ETA * rho * (x - c).sum(axis=0)
        xs.append(x)
        cs += [] if t % tau else [c]
    return np.array(xs), cs


def easgd(mu: float, tau: int) -> Expected:
    x, c, v, xs, cs = np.tile(START, (P, 1)), START, 0.0, [], []
    for t in range(STEPS):
        v = mu * v - ETA * gradients(x, t)
        for i in range(P):
            rho = 0.0 if t % tau else RHO
            x[i], c = x[i] + v[i] - ETA * rho * (x[i] - c), c + ETA * rho * (x[i] - c)
            cs += [] if t % tau else [c]
        xs.append(x.copy())
    return np.array(xs), cs


def async_easgd(mu: float, tau: int, visits: list[int]) -> Expected:
    """A visit is complete when the gradient that is computed meanwhile is."""
    x, c, v, made, xs, cs = np.tile(START, (P, 1)), START, np.zeros((P, SIZE)), [0] * P, np.zeros((STEPS, P, SIZE)), []
    for i in visits:
        d = ETA * RHO * (x[i] - c)
        c = c + d
        cs.append(c)
        for t in range(made[i], min(made[i] + tau, STEPS)):
            v[i] = mu * v[i] - ETA * gradient(x[i], t, i)
            x[i] = xs[t, i] = x[i] + v[i] - (d if t == made[i] else 0)
        made[i] += tau
    return xs, cs


def eamsgd(mu: float, tau: int, visits: list[int]) -> Expected:
    x, c, v, made, xs, cs = np.tile(START, (P, 1)), START, np.zeros((P, SIZE)), [0] * P, np.zeros((STEPS, P, SIZE)), []
    for i in visits:
        d = ETA * RHO * (x[i] - c)
        x[i], c = x[i] - d, c + d
        cs.append(c)
        for t in range(made[i], min(made[i] + tau, STEPS)):
            v[i] = mu * v[i] - ETA * gradient(x[i] + mu * v[i], t, i)
            x[i] = xs[t, i] = x[i] + v[i]
        made[i] += tau
    return xs, cs


def agree(found: Run, expected: Expected) -> None:
    np.testing.assert_allclose(found.x, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.c, expected[1], rtol=0, atol=1e-12)
    for one in found.methods.values():  # all end with the center
        assert np.array_equal(one.center, found.c[-1])


@pytest.mark.parametrize(("mu", "tau"), [(0.0, 1), (0.9, 1), (0.9, 3)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("center", RANKS)
def test_sync_easgd(center: str, overlap: bool, mu: float, tau: int) -> None:
    found = Run("sync-easgd", RANKS[center], rho=RHO, lr=ETA, momentum=mu, period=tau, center=center, overlap=overlap)
    agree(found, sync_easgd(mu, tau))


@pytest.mark.parametrize(("mu", "tau"), [(0.0, 1), (0.9, 1), (0.9, 3)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("center", ["rank", "beside"])
def test_easgd(center: str, overlap: bool, mu: float, tau: int) -> None:
    found = Run("easgd", RANKS[center], rho=RHO, lr=ETA, momentum=mu, period=tau, center=center, overlap=overlap)
    agree(found, easgd(mu, tau))
    assert found.visits == [*range(P)] * len(range(0, STEPS, tau))


@pytest.mark.parametrize(("mu", "tau"), [(0.0, 1), (0.9, 1), (0.9, 3)])
@pytest.mark.parametrize("center", ["rank", "beside"])
def test_async_easgd(center: str, mu: float, tau: int) -> None:
    """The center is visited in the order in which the requests arrive."""
    found = Run("async-easgd", RANKS[center], rho=RHO, lr=ETA, momentum=mu, period=tau, center=center)
    assert sorted(found.visits) == sorted([*range(P)] * len(range(0, STEPS, tau)))
    agree(found, async_easgd(mu, tau, found.visits))


@pytest.mark.parametrize(("mu", "tau"), [(0.0, 1), (0.9, 1), (0.9, 3)])
@pytest.mark.parametrize("center", ["rank", "beside"])
def test_eamsgd(center: str, mu: float, tau: int) -> None:
    """The center is visited in the order in which the requests arrive."""
    found = Run("eamsgd", RANKS[center], rho=RHO, lr=ETA, momentum=mu, period=tau, center=center)
    assert sorted(found.visits) == sorted([*range(P)] * len(range(0, STEPS, tau)))
    agree(found, eamsgd(mu, tau, found.visits))


# One replica, and none that pulls.


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_rho_one_replica_has_the_bits_of_sgd(name: str, momentum: float) -> None:
    if name == "eamsgd" and momentum:
        pytest.skip("Nesterov's momentum is not that of sgd")
    options = dict(momentum=momentum, weight_decay=1e-2)
    trained, plain = run(name, 1, 5, rho=0.0, period=2, **options).methods[0], alone(5, **options)
    assert type(trained) is method(name)
    assert trained.replica.theta.tobytes() == plain.theta.tobytes()


# Rho.


@pytest.mark.parametrize("name", FAMILY)
def test_the_default_pulls_the_center_equally_with_any_number_of_replicas(name: str) -> None:
    for ranks in (1, 2, 5):
        for one in run(name, ranks, 1).methods.values():
            assert ranks * one.config.lr * one.rho == pytest.approx(0.9)


def test_the_learning_rate_of_a_step_is_a_part_of_its_pull() -> None:
    one = run("sync-easgd", 2, 1, lr=0.02, rho=0.5).methods[0]
    assert one.weight == pytest.approx(0.01)
    one.replica.lr = 0.01
    assert one.weight == pytest.approx(0.005)


# Time.


def test_in_the_round_robin_replicas_compute_one_after_the_other() -> None:
    """With --overlap they compute at the same time, and only talk one after the other."""
    one_by_one, together = (Run("easgd", P, rho=RHO, lr=ETA, momentum=0.0, overlap=overlap)
                            for overlap in (False, True))  # fmt: skip
    assert np.array_equal(one_by_one.x, together.x) and np.array_equal(one_by_one.c, together.c)
    assert one_by_one.seconds - together.seconds > (P - 1) * STEPS * one_by_one.methods[0].replica.seconds


def test_a_visit_to_the_center_is_hidden_behind_the_gradient() -> None:
    options = dict(rho=RHO, lr=ETA, momentum=0.0, center="rank")
    assert Run("async-easgd", 2, **options).seconds < Run("eamsgd", 2, period=1, **options).seconds


def test_overlap_hides_the_sum_behind_the_gradient() -> None:
    plain, overlapped = (Run("sync-easgd", P, rho=RHO, lr=ETA, momentum=0.0, overlap=overlap)
                         for overlap in (False, True))  # fmt: skip
    assert np.array_equal(plain.x, overlapped.x) and np.array_equal(plain.c, overlapped.c)
    assert overlapped.seconds < plain.seconds


# What is refused.


def test_eamsgd_needs_plain_sgd() -> None:
    for optimizer in ("adam", "nesterov"):
        with pytest.raises(ConfigError, match=f"eamsgd needs --optimizer sgd.*got {optimizer}"):
            method("eamsgd").buffers(100, config_of("eamsgd", optimizer=optimizer))


def test_pulls_keep_the_replicas_together() -> None:
    apart = spread(run("local", 4, 20, **PLAIN).theta())
    for name in FAMILY:
        assert spread(run(name, 4, 20, **PLAIN).theta()) < 0.8 * apart
