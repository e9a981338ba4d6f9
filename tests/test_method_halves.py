"""The two halves of a step, `local` and `exchange`, and the calls of `on_membership`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_replicas import LINK, batch_of, config_of, engine_of, run

from minidl.comm.cluster import Event, uniform
from minidl.comm.fabric.base import Fabric, Header, Message, View
from minidl.comm.methods import method
from minidl.comm.methods.base import Method
from minidl.comm.methods.gossip import Gossip
from minidl.comm.methods.local import Local
from minidl.comm.replica import Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.kernels.elementwise.stream import SERIAL

MOMENTUM: dict[str, Any] = dict(momentum=0.9, weight_decay=1e-2)


def every(period: int) -> Any:
    """Return a function that lets a method exchange only in every period-th step."""

    def wrap(method: Method, step: int) -> None:
        if step:  # only once
            return
        exchange = method.exchange
        method.exchange = lambda: exchange() if method.replica.steps % period == 0 else None  # type: ignore[method-assign]

    return wrap


def test_a_period_can_wrap_the_exchange() -> None:
    """Local SGD is independent steps, and an average in every period-th step."""
    wrapped = run("local-sgd", 3, 7, period=1, around=(every(3), lambda method, step: None), **MOMENTUM)
    assert np.array_equal(wrapped.theta(), run("local-sgd", 3, 7, period=3, **MOMENTUM).theta())
    never = run("dpsgd", 3, 4, around=(every(100), lambda method, step: None), **MOMENTUM)
    assert np.array_equal(never.theta(), run("local", 3, 4, **MOMENTUM).theta())


@pytest.mark.parametrize("name", ["local", "local-sgd", "dpsgd", "gossip"])
def test_local_is_a_whole_step_of_the_optimizer(name: str) -> None:
    config = config_of(name, momentum=0.0, weight_decay=0.0, lr=0.1)
    engine = engine_of("sgd", 0.0, 0.0, 0.1)
    replica = Replica(engine, Fabric(LoopbackTransport()), own=True)
    acting = method(name)(replica, replica.fabric, config)
    before = replica.theta.copy()
    loss = acting.local(batch_of(0, 0))
    np.testing.assert_allclose(replica.theta, before - 0.1 * replica.grad, rtol=1e-6, atol=1e-7)
    assert loss == replica.loss and replica.steps == 1


# Membership.


def deaths(steps: int, monkeypatch: pytest.MonkeyPatch, kind: type[Method], name: str, **options: Any) -> list[Any]:
    """Let rank 2 of 4 die; return the calls of `on_membership` as (rank, live replicas, the caller's steps)."""
    calls: list[Any] = []
    before = kind.on_membership

    def note(self: Method, view: View) -> None:
        calls.append((self.fabric.rank, list(view.members), self.replica.steps))
        before(self, view)

    monkeypatch.setattr(kind, "on_membership", note)
    whole = run(name, 4, steps, **options)
    assert not calls, "nobody has died"
    cluster = replace(uniform(4, 1, **LINK), deaths=(Event(time=whole.seconds / 2, rank=2),))
    run(name, 4, steps, cluster=cluster, **options)
    return calls


def test_a_death_is_reported_once_and_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = deaths(20, monkeypatch, Local, "local")
    assert sorted(rank for rank, _, _ in calls) == [0, 1, 3]
    for _, alive, steps in calls:
        assert alive == [0, 1, 3] and 5 < steps < 15


def test_gossip_forgets_what_it_owes_to_a_dead_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = deaths(20, monkeypatch, Gossip, "gossip", exchange="push-pull")
    assert len(calls) == 3
    config = config_of("gossip", exchange="push-pull", momentum=0.0, weight_decay=0.0, lr=0.1)
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    acting = Gossip(replica, replica.fabric, config)
    acting.owed = {1: 0, 2: 0}
    acting.on_membership(View(1, (0, 1)))
    assert acting.owed == {1: 0}


def test_a_reply_is_not_answered_although_another_one_has_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges with one peer overlap: the second reply finds that none is expected."""
    config = config_of("gossip", exchange="push-pull", momentum=0.0, weight_decay=0.0, lr=0.1)
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    acting, sent = Gossip(replica, replica.fabric, config), list[bool]()
    monkeypatch.setattr(acting, "push", lambda peer, block, reply=False: sent.append(reply) or True)
    acting.asked = {1}
    for _ in range(2):
        acting.answer(Message(1, replica.theta, Header(marker=True), lambda: None))
    assert not sent and not acting.asked
    acting.answer(Message(1, replica.theta, Header(), lambda: None))
    assert sent == [True]


# Arithmetic.


@pytest.mark.parametrize("size", [1, 7, 1000, SERIAL, SERIAL + 1, 3 * SERIAL + 5])
def test_arithmetic_agrees_with_float64(size: int) -> None:
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    rng = np.random.default_rng(size)

    def pair() -> list[np.ndarray]:
        return [rng.standard_normal(size).astype(np.float32) for _ in range(2)]

    close: dict[str, Any] = dict(rtol=1e-6, atol=1e-6)
    x, y = pair()
    wide, other = x.astype(np.float64), y.astype(np.float64)
    distance = np.linalg.norm(wide - other) / np.linalg.norm(other)
    assert replica.drift(x, y) == pytest.approx(distance, rel=1e-6)
    assert replica.drift(x, x) == 0 and replica.drift(x, np.zeros_like(x)) == np.inf
    assert replica.drift(np.zeros_like(x), np.zeros_like(x)) == 0
    replica.axpy(-0.7, x, y)
    np.testing.assert_allclose(y, other - 0.7 * wide, **close)
    out = np.full_like(x, np.nan)
    replica.scale(x, 1 / 3, out)
    assert np.array_equal(out, x * np.float32(1 / 3)) and np.array_equal(x, wide)
    x, y = pair()
    wide, other = x.astype(np.float64), y.astype(np.float64)
    replica.elastic(x, y, 0.3)
    np.testing.assert_allclose(x, wide - 0.3 * (wide - other), **close)
    np.testing.assert_allclose(y, other + 0.3 * (wide - other), **close)
    np.testing.assert_allclose(x.astype(np.float64) + y, wide + other, **close)
    x, y = pair()
    out = np.full_like(x, np.nan)
    replica.pull(x, y, 0.3, out)
    np.testing.assert_allclose(out, 0.3 * (x.astype(np.float64) - y), **close)


def test_the_sign_of_zero_survives_scaling() -> None:
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    vector = np.array([-0.0, 0.0, 2.0], np.float32)
    replica.scale(vector, 0.5)
    assert np.array_equal(np.signbit(vector), [True, False, False])


@pytest.mark.parametrize("operation", ["mix_into", "scale", "axpy", "elastic", "pull"])
def test_arithmetic_on_the_weights_marks_them_as_changed(operation: str) -> None:
    """Kernels compute other forms of the weights again if the arena's version has increased."""
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    other, arena = np.zeros_like(replica.theta), replica.engine.arena
    calls: dict[str, tuple[Any, ...]] = {
        "mix_into": (replica.theta, other, 0.5), "scale": (replica.theta, 0.5),
        "axpy": (0.5, other, replica.theta), "elastic": (other, replica.theta, 0.5),
        "pull": (other, other.copy(), 0.5, replica.theta),
    }  # fmt: skip
    before = arena.version
    getattr(replica, operation)(*calls[operation])
    assert arena.version > before
    before = arena.version
    getattr(replica, operation)(*(other.copy() if argument is replica.theta else argument
                                  for argument in calls[operation]))  # fmt: skip
    assert arena.version == before
