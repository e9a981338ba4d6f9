"""Methods with --compress agree with their equations in float64, and converge where they do without compression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quadratic import CURVATURE, SIZE, START, STEPS, Quadratic, Run, gradient
from quick import quick
from sessions import Sessions
from toy_replicas import config_of, easy_batch, run

from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods import choco, dpsgd, method
from minidl.comm.topology import build
from minidl.comm.transport.sim import Simulation
from minidl.errors import ConfigError

ETA, RHO = 0.1, 1.2
Q = Callable[[np.ndarray], np.ndarray]


def int8(x: np.ndarray) -> np.ndarray:
    x = np.float32(x)
    scale = np.max(abs(x)) / np.float32(127)
    return (np.rint(x / scale) * scale if scale else x).astype(np.float64)


def top4(x: np.ndarray) -> np.ndarray:
    """Of 7 elements, topk:0.5 keeps 4."""
    q = np.float32(x).astype(np.float64)
    q[np.argsort(-abs(q), kind="stable")[4:]] = 0
    return q


CODECS = {"int8": int8, "topk:0.5": top4}


class Lossy:
    """The codes of a rank, with the feedback of errors."""

    def __init__(self, q: Q) -> None:
        self.q, self.error = q, np.zeros(SIZE)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        sent = self.q(self.error + x)
        self.error = self.error + x - sent
        return sent


@pytest.mark.parametrize("center", ["copies", "beside"])
@pytest.mark.parametrize("name", CODECS)
def test_sync_easgd(name: str, center: str) -> None:
    """Replicas 1 and 2 send codes to replica 0, which sends the code of the sum back."""
    found = Run("sync-easgd", 3, rho=RHO, lr=ETA, momentum=0.9, period=2, center=center, overlap=True, compress=name)
    x, c, v, codes = np.tile(START, (3, 1)), START, np.zeros((3, SIZE)), [Lossy(CODECS[name]) for _ in range(3)]
    for t in range(STEPS):
        d = 0.0 * x if t % 2 else ETA * RHO * (x - c)
        v = 0.9 * v - ETA * np.array([gradient(x[i], t, i) for i in range(3)])
        x = x + v - d
        if not t % 2:
            c = c + codes[0](d[0] + codes[1](d[1]) + codes[2](d[2]))
        np.testing.assert_allclose(found.x[t], x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.c[-1], c, rtol=0, atol=1e-12)


def train(name: str, ranks: int, steps: int, **options: Any) -> tuple[np.ndarray, dict[int, Any]]:
    """Train quadratics. Returns the weights after each step (steps, P, n), and the methods."""
    config = config_of(name, **{"weight_decay": 0.0, "momentum": 0.0, "lr": ETA, **options})
    kind: Any = method(name)
    replicas = kind.roles(ranks, config).replicas
    simulation = Simulation(uniform(ranks, 1, alpha=1e-5, beta=1e-9), ranks, 0, flops=1e4)
    found, methods = np.zeros((steps, len(replicas), SIZE)), {}

    def work(rank: int) -> None:
        fabric = Fabric(simulation.transport(rank), replicas)
        fabric.join(kind.buffers(2 * SIZE, config), "quadratic")
        replica: Any = Quadratic(fabric, ETA, 0.0)
        acting = methods[rank] = kind(replica, fabric, config)
        fabric.set_status(Column.STATE, State.TRAINING)
        for step in range(steps):
            fabric.begin_step(step, kind.synchronous)
            acting.step(None)
            found[step, rank] = replica.theta
        fabric.set_status(Column.STATE, State.PAUSED)
        acting.pause()

    simulation.run({rank: lambda rank=rank: work(rank) for rank in range(ranks)})
    return found, methods


@pytest.mark.parametrize("name", [name for name in sorted({*choco.FIXED, *dpsgd.UNDIRECTED}) if name != "file"])
def test_graphs_that_are_offered_are_the_same_in_every_step(name: str) -> None:
    """h_i and s_i of CHOCO, and the weights by share, are those of one graph."""
    assert build(name, 8).period == 1


@pytest.mark.parametrize("topology", ["ring", "star"])
@pytest.mark.parametrize("name", CODECS)
def test_dpsgd_is_choco(name: str, topology: str) -> None:
    """With each h_j written out, instead of sum_j W_ij h_j."""
    ranks, q = 5, CODECS[name]
    found, _ = train("dpsgd", ranks, 12, topology=topology, compress=name, gamma=0.3)
    w = build(topology, ranks).matrix(0)
    x, h = np.tile(START, (ranks, 1)), np.tile(START, (ranks, 1))
    for t in range(12):
        x = x - ETA * np.array([gradient(x[i], t, i) for i in range(ranks)])
        h = h + np.array([q(x[i] - h[i]) for i in range(ranks)])
        x = x + 0.3 * np.array([sum(w[i, j] * (h[j] - h[i]) for j in range(ranks)) for i in range(ranks)])
        np.testing.assert_allclose(found[t], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", quick(["bf16", "int8", "sign", "topk:0.3", "randk:0.3"], "topk:0.3"))
def test_replicas_in_a_ring_come_to_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant gradients that differ, with a rate that goes to zero: the distance between the replicas does, too."""
    def decaying(x: np.ndarray, step: int, replica: int) -> np.ndarray:
        return CURVATURE * (x - replica) / (1 + step) ** 2 if step < 40 else np.zeros(SIZE)

    monkeypatch.setattr("quadratic.gradient", decaying)
    found, _ = train("dpsgd", 6, 2000, topology="ring", compress=name)
    apart = np.linalg.norm(found - found.mean(axis=1, keepdims=True), axis=(1, 2))
    assert apart[:40].max() > 0.1 and apart[-1] < 1e-5 * apart.max()


@pytest.mark.parametrize("kind", ["allreduce", "dpsgd", "sync-easgd", "ps"])
def test_with_int8_runs_end_near_those_without_compression(kind: str) -> None:
    """After 100 steps, compared with the way from the beginning."""
    options: dict[str, Any] = {"topology": "ring", "lr": 0.05, "weight_decay": 0.0}
    same = dict(batch=lambda rank, step: easy_batch(rank, 0))
    plain, short = (run(kind, 5 - (kind != "ps"), 100, compress=compress, **options, **same).theta(range(4)).mean(0)
                    for compress in ("none", "int8"))  # fmt: skip
    begin = run(kind, 5 - (kind != "ps"), 0, **options).theta(range(4)).mean(0)
    assert np.linalg.norm(short - plain) < 0.1 * np.linalg.norm(plain - begin)


COMPRESSED = {
    "allreduce": {"method": "allreduce", "compress": "sign"},
    "dpsgd": {"method": "dpsgd", "topology": "ring", "compress": "randk:0.1"},
    "sync-easgd": {"method": "sync-easgd", "compress": "topk:0.1", "reduce": "ring", "period": 2, "overlap": True},
    "sync-easgd beside": {"method": "sync-easgd", "compress": "int8", "center": "beside", "messages": "layers"},
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, name: str) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, epochs=2, **COMPRESSED[name])
    run = Sessions(tmp_path / "run", 3, {}, epochs=2, stop=whole.simulation.time / 2, **COMPRESSED[name])
    assert whole.summary and run.summary is None and not run.errors
    again = Sessions(run.folder, 3, {})
    first, second = ({name: vector.tobytes() for name, vector in each.last().vectors.items()
                      if "communication" not in name} for each in (whole, again))  # fmt: skip
    assert first == second and any("error" in name or "known" in name for name in first)


@pytest.mark.parametrize("name", ["dpsgd", "allreduce", "sync-easgd"])
def test_the_others_go_on_after_a_death(tmp_path: Path, name: str) -> None:
    for part in (0.3, 0.6):
        moments = sorted(Sessions(tmp_path / f"whole-{part}", 3, {}, epochs=2, **COMPRESSED[name]).moments)
        death = {1: moments[int(part * len(moments))] + 1e-9}
        run = Sessions(tmp_path / f"run-{part}", 3, death, epochs=2, on_death="continue", **COMPRESSED[name])
        run.check()
        assert run.summary and run.summary["replicas_alive"] == 2


def test_bytes_are_counted_after_compression() -> None:
    """Seven float64, or seven int8 and a float32, in 12 sums of two replicas."""
    for name, nbytes in (("none", 56), ("int8", 11)):
        _, methods = train("sync-easgd", 2, 12, compress=name)
        assert [sum(one.fabric.stats.sent_bytes) for one in methods.values()] == [12 * nbytes] * 2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dpsgd", {"topology": "one-peer-exponential", "compress": "int8"}, "a graph that is the same in every step"),
        ("dpsgd", {"topology": "base-3", "compress": "int8"}, "a graph that is the same in every step"),
        ("dpsgd", {"topology": "ring", "compress": "sign", "overlap": True}, "excludes overlap True"),
        ("dpsgd", {"topology": "ring", "compress": "sign", "velocity": "mixed"}, "excludes velocity mixed"),
        ("allreduce", {"compress": "topk:0.9"}, "above 0 and at most 0.5"),
        ("ps", {"compress": "topk:0.9"}, "above 0 and at most 0.5"),
        ("sync-easgd", {"compress": "randk:0.9"}, "above 0 and at most 0.5"),
    ],
)
def test_what_is_refused_before_anything_is_trained(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method(name).buffers(100, config_of(name, **options))

