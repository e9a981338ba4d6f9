"""For which rho elastic averaging converges: bounds, simulations, the default, the warning and the curvature."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_replicas import CLASSES, PLAIN, alone, batch_of, config_of, engine_of

from minidl import nn
from minidl.comm.fabric.base import Fabric
from minidl.comm.parabola import Case, largest_pull
from minidl.comm.replica import Engine, Replica
from minidl.comm.stability import curvature, default_rho, limit, round_robin_bound, sync_bound, warning
from minidl.comm.transport.loopback import LoopbackTransport

steps = st.floats(0.05, 1.95)
replicas = st.integers(1, 16)


def step_of(kind: str, state: np.ndarray, s: float, a: float, tau: int = 1, mu: float = 0.0) -> np.ndarray:
    """Return the state after one round on a parabola, as the papers write it. Rows: x_1, v_1, x_2, v_2, ..., c."""
    state = state.copy()
    x, v, center = state[:-1:2], state[1:-1:2], state[-1]
    if kind == "sync":
        for t in range(tau):
            pull = a * (x - center) if t == tau - 1 else 0 * x
            v[:] = mu * v - s * x
            x += v - pull
            center += pull.sum(axis=0)
    for i in range(len(x)) if kind != "sync" else ():
        if kind == "eamsgd":
            pull = a * (x[i] - center)
            x[i] -= pull
            center += pull
        for t in range(tau):
            elastic = kind != "eamsgd" and t == tau - 1
            pull = a * (x[i] - center) if elastic else 0 * center
            v[i] = mu * v[i] - s * (x[i] + (mu * v[i] if kind == "eamsgd" else 0))
            x[i] += v[i] - pull
            center += pull
    return state


def radius(kind: str, number: int, s: float, a: float, tau: int = 1, mu: float = 0.0) -> float:
    """Return the largest modulus of an eigenvalue of a round: below 1 it converges, above 1 it diverges."""
    return float(max(abs(np.linalg.eigvals(step_of(kind, np.eye(2 * number + 1), s, a, tau, mu)))))


def after(rounds: int, number: int, s: float, a: float) -> float:
    """Return |(x, c)| / |its start| after many rounds of the synchronous method."""
    start = np.random.default_rng(0).standard_normal(2 * number + 1)
    start[1:-1:2] = 0
    power = np.linalg.matrix_power(step_of("sync", np.eye(2 * number + 1), s, a), rounds)
    return float(np.linalg.norm(power @ start) / np.linalg.norm(start))


@given(steps, replicas)
@settings(max_examples=30)
@example(1.95, 16)
@example(0.05, 1)
def test_the_synchronous_bound_is_exact(step, number):
    bound = sync_bound(number, step)
    for smaller in (step, step / 2, step / 16):
        assert after(8192, number, smaller, 0.95 * bound) < 0.1
    assert after(2048, number, step, 1.05 * bound) > 10


@given(steps, replicas, st.floats(0.01, 1.5))
def test_the_synchronous_bound_is_the_first_of_three_inequalities(s, number, fraction):
    a = fraction * sync_bound(number, s)
    b = number * a
    first = 4 - 2 * s - 2 * a - 2 * b + s * b
    assert (first > 0) == (fraction < 1) or abs(first) < 1e-9
    if first > 0:
        assert abs(1 - s - a - b + s * b) < 1 and abs(1 - s - a) < 1


@given(steps, replicas, st.floats(0.01, 0.999))
def test_the_round_robin_bound_is_sufficient(step, number, fraction):
    assert radius("round robin", number, step, fraction * round_robin_bound(step)) < 1
    assert round_robin_bound(step) >= sync_bound(number, step) - 1e-12


def test_the_round_robin_bound_is_not_necessary():
    assert radius("round robin", 2, 1.0, 1.03 * round_robin_bound(1.0)) < 1
    assert radius("round robin", 2, 1.0, 1.10 * round_robin_bound(1.0)) > 1


@pytest.mark.parametrize("kind, number, period, momentum", [
    ("sync", 1, 1, 0.0), ("sync", 5, 4, 0.0), ("sync", 3, 1, 0.9), ("sync", 300, 3, 0.5),
    ("round robin", 3, 1, 0.0), ("round robin", 4, 6, 0.0), ("round robin", 2, 2, 0.9),
    ("eamsgd", 1, 1, 0.0), ("eamsgd", 1, 4, 0.9),
])  # fmt: skip
@pytest.mark.parametrize("step", [0.4, 1.2])
def test_the_simulated_bound_is_between_convergence_and_divergence(kind, number, period, momentum, step):
    pull = largest_pull(Case(kind, number, step, period, momentum))
    curvatures, shown = step * np.arange(1, 17) / 16, min(number, 5)
    scale = number / shown if kind == "sync" else 1  # the mean of many replicas has a stronger pull on the center
    if scale > 1:
        assert pull * number <= 4
        return
    assert max(radius(kind, shown, s, 0.95 * pull, period, momentum) for s in curvatures) < 1
    assert max(radius(kind, shown, s, 1.07 * pull, period, momentum) for s in curvatures) > 1


@given(replicas, steps)
@example(1, 1.94140625)
@settings(max_examples=10)
def test_the_simulation_finds_the_exact_bound(number, step):
    assert largest_pull(Case("sync", number, step)) == pytest.approx(sync_bound(number, step), rel=0.05, abs=0.004)


def test_workers_in_random_order_allow_about_as_much_as_a_round_robin():
    for number in (1, 2, 8, 64):
        found = largest_pull(Case("asynchronous", number, 1.0))
        assert round_robin_bound(1.0) <= found < 1.2 * round_robin_bound(1.0)


def test_the_largest_learning_rate_of_momentum_and_of_nesterov():
    def stable(kind: str, step: float) -> bool:
        return largest_pull(Case(kind, 1, step, 1, 0.9)) > 0

    assert stable("sync", 3.6) and not stable("sync", 4.0)  # eta h < 2 (1 + mu)
    assert stable("eamsgd", 1.3) and not stable("eamsgd", 1.45)  # eta h < 2 (1 + mu) / (1 + 2 mu)


def test_the_default_is_nine_tenths_unless_the_curvature_is_large():
    for number, largest in ((1, 0.36), (2, 1.18), (4, 1.59), (8, 1.79)):
        assert default_rho(number, 0.1, 0) == pytest.approx(9 / number)
        usual = 0.9 / (number * 0.1)
        assert limit("sync", 0.1, number, 1, 0, largest / 0.1).rho >= usual
        assert limit("sync", 0.1, number, 1, 0, (largest + 0.01) / 0.1).rho < usual
    assert default_rho(4, 0.1, 17) == pytest.approx(0.9 * sync_bound(4, 1.7) / 0.1)
    assert default_rho(4, 0.1, 17, kind="round robin") == pytest.approx(2.25)
    assert default_rho(4, 0.1, 21) == default_rho(4, 0.1, 0) == default_rho(4, 0.1, np.inf)  # no rho is stable
    assert 0 < default_rho(4, 0.1, 37, momentum=0.9) < 2.25


def test_warnings_name_the_bound_and_the_largest_rho():
    assert warning("sync", 0.1, 1.9, 8, 1, 0, 10) is None
    assert warning("sync", 0.1, 2.1, 8, 1, 0, 10) == (
        "elastic averaging may diverge: with 8 replicas, --lr 0.1 and an estimated curvature h = 10, rho = 2.1 is too "
        "large: the bound of the synchronous method, 4 - 2s - 2a - 2b + s b > 0, with s = eta h, a = eta rho, b = P a, "
        "allows at most 2"
    )
    assert warning("round robin", 0.1, 6, 8, 1, 0, 10) is None
    assert "round robin" in (text := warning("round robin", 0.1, 7, 8, 1, 0, 10)) and "sufficient, not" in text
    assert text.endswith("allows at most 6.67")
    assert warning("asynchronous", 0.1, 7, 8, 1, 0, 10) is None
    assert "no bound is known for asynchronous workers; a simulation" in warning("asynchronous", 0.1, 8, 8, 1, 0, 10)
    both = warning("sync", 0.1, 8, 8, 4, 0.9, 10)
    assert "no bound is known for a period of 4 and a momentum of 0.9; a simulation on parabolas allows" in both
    assert "no rho is stable (eta h = 2.1 is above 2); use a smaller --lr" in warning("sync", 0.1, 0.1, 8, 1, 0, 21)
    assert "no rho is stable (in a simulation" in warning("asynchronous", 0.1, 0.1, 8, 1, 0, np.inf)


def dense_curvature(replica: Replica, batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the largest |eigenvalue| of the Hessian, from finite differences in each direction."""
    columns, near = [], 1e-4
    for k in range(replica.theta.size):
        found = []
        for sign in (1, -1):
            replica.theta[k] += sign * near
            replica.touch()
            replica.gradient(batch)
            found.append(replica.grad.astype(np.float64))
            replica.theta[k] -= sign * near
        columns.append((found[0] - found[1]) / (2 * near))
    hessian = np.array(columns)
    return float(abs(np.linalg.eigvalsh((hessian + hessian.T) / 2)).max())


def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian():
    replica = alone(20)
    batch = batch_of(0, 0, 32)
    assert curvature(replica, [batch]) == pytest.approx(dense_curvature(replica, batch), rel=0.05)


def test_the_curvature_changes_no_replica():
    config = config_of("local", **PLAIN)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    for own in (True, False):
        replica = Replica(Engine(model, config), Fabric(LoopbackTransport()), own=own)
        replica.gradient(batch_of(0, 0))
        before = replica.theta.tobytes(), replica.statistics.tobytes(), replica.images, replica.mark().random
        found = curvature(replica, [batch_of(0, 1), batch_of(0, 2)])
        assert before == (replica.theta.tobytes(), replica.statistics.tobytes(), replica.images, replica.mark().random)
        assert curvature(replica, [batch_of(0, 1), batch_of(0, 2)]) == found > 0


def test_weights_that_are_too_large_have_an_infinite_curvature():
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    replica.theta[:] = 1e30
    with np.errstate(all="ignore"):
        assert curvature(replica, [batch_of(0, 0)]) == np.inf
