"""Hogwild: replicas read and write shared weights without a lock. The equations step by step; overlaps; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quadratic import SIZE, START, STEPS, Run, gradient
from quick import quick
from sessions import Sessions
from sim_helper import simulate
from test_mpi import nothing_left  # noqa: F401 (a fixture)
from test_mpi_deaths import run as run_ranks
from test_network import NODE
from test_shutdown import killed
from toy_replicas import alone, run

from minidl.comm.cluster import parse
from minidl.comm.fabric.base import Fabric
from minidl.comm.methods import method
from minidl.comm.methods.hogwild import SharedVector, spec
from minidl.comm.transport.messages import BufferSpec
from minidl.simulate import main

P, ETA, RHO = 3, 0.1, 1.2
FAMILY = ("hogwild-easgd", "hogwild-sgd")


class Noted(Run):
    """A run that notes its reads and writes, in their order: ("read" or "write", replica)."""

    def watched(self) -> Any:
        notes: list[tuple[str, int]] = []
        self.notes = notes

        class Watched(self.kind):  # type: ignore[misc, name-defined]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                read, writing, rank = self.shared.read, self.shared.writing, self.fabric.rank

                def noted_read(out: np.ndarray) -> None:
                    notes.append(("read", rank))
                    read(out)

                def noted_writing() -> Any:
                    notes.append(("write", rank))
                    return writing()

                self.shared.read, self.shared.writing = noted_read, noted_writing

        self.watched = lambda: Watched  # type: ignore[method-assign]  # all ranks share the notes
        return Watched


def hogwild_easgd(notes: list[tuple[str, int]], mu: float, tau: int) -> tuple[np.ndarray, np.ndarray]:
    """Between a read and the next one, a replica makes tau steps."""
    x, c, v, t, xs = np.tile(START, (P, 1)), START, np.zeros((P, SIZE)), [0] * P, np.zeros((STEPS, P, SIZE))
    d = np.zeros((P, SIZE))
    for what, i in notes:
        if what == "read":
            d[i] = ETA * RHO * (x[i] - c)
            continue
        c = c + d[i]
        for k in range(t[i], min(t[i] + tau, STEPS)):
            v[i] = mu * v[i] - ETA * gradient(x[i], k, i)
            x[i] = xs[k, i] = x[i] + v[i] - (d[i] if k == t[i] else 0)
        t[i] += tau
    return xs, c


def hogwild_sgd(notes: list[tuple[str, int]], mu: float) -> tuple[np.ndarray, np.ndarray]:
    x, c, v, t, xs = np.tile(START, (P, 1)), START, np.zeros((P, SIZE)), [0] * P, np.zeros((STEPS, P, SIZE))
    for what, i in notes:
        if what == "read":
            x[i] = xs[t[i] - 1, i] = c
            continue
        v[i] = mu * v[i] - ETA * gradient(x[i], t[i], i)
        c, t[i] = c + v[i], t[i] + 1
    return xs, c


@pytest.mark.parametrize(("mu", "tau"), [(0.0, 1), (0.9, 1), (0.9, 3)])
def test_hogwild_easgd(mu: float, tau: int) -> None:
    found = Noted("hogwild-easgd", P, rho=RHO, lr=ETA, momentum=mu, period=tau)
    xs, c = hogwild_easgd(found.notes, mu, tau)
    np.testing.assert_allclose(found.x, xs, rtol=0, atol=1e-12)
    for one in found.methods.values():
        np.testing.assert_allclose(one.center, c, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_hogwild_sgd(mu: float) -> None:
    found = Noted("hogwild-sgd", P, lr=ETA, momentum=mu)
    xs, c = hogwild_sgd(found.notes, mu)
    np.testing.assert_allclose(found.x, xs, rtol=0, atol=1e-12)
    for one in found.methods.values():
        np.testing.assert_allclose(one.replica.theta, c, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_replica_without_a_pull_has_the_bits_of_sgd(name: str, momentum: float) -> None:
    options = dict(momentum=momentum, weight_decay=1e-2)
    trained, plain = run(name, 1, 5, rho=0.0, **options).methods[0], alone(5, **options)
    assert type(trained) is method(name)
    assert trained.replica.theta.tobytes() == plain.theta.tobytes()


def test_the_shared_vector_crosses_the_link_to_the_host() -> None:
    """1000 bytes take 4.25 s, of which the link is occupied for 4 s. The host itself needs no link."""

    def work(fabric: Fabric) -> tuple[list[float], float]:
        fabric.join(BufferSpec(shared=spec(250)), "layout")
        shared, times = SharedVector(fabric, np.zeros(250, np.float32)), []
        fabric.stats.start()
        found = np.zeros(250, np.float32)
        for _ in range(2):
            shared.read(found)
            times.append(fabric.now())
            with shared.writing() as vector:
                vector += 1
            times.append(fabric.now())
        return times, fabric.stats.report()["seconds"]["waiting"]

    simulation = simulate(work, 3, parse(NODE))
    assert simulation.results == {
        0: ([4.25, 12.25, 20.25, 28.25], 28.25), 1: ([8.25, 16.25, 24.25, 32.25], 32.25), 2: ([0, 0, 0, 0], 0)
    }  # fmt: skip
    assert simulation.network.report()["host"]["bytes"] == 8000
    free = parse("\n".join(line for line in NODE.replace(', "cpu"', "").splitlines() if "host" not in line))
    assert simulate(work, 2, free).time == 0


def test_reads_during_a_write_are_counted() -> None:
    """Rank 0 writes from second 1 to 2. Rank 1 reads before, meanwhile and afterwards; rank 2 dies in a write."""

    def work(fabric: Fabric) -> tuple[int, float]:
        fabric.join(BufferSpec(shared=spec(3)), "layout")
        shared = SharedVector(fabric, np.zeros(3, np.float32))
        found = np.zeros(3, np.float32)

        def until(time: float) -> None:
            fabric.wait(lambda: fabric.now() >= time or None, (), "a moment", until=time)

        if fabric.rank == 1:
            for time in (0.5, 1.5, 2.5):
                until(time)
                shared.read(found)
        else:
            until(1.0 if fabric.rank == 0 else 1.9)
            with shared.writing() as center:
                center += 1
                until(2.0)
        return fabric.stats.overlaps, float(found[0])

    cluster = parse("""
devices.core = {flops = 1e6}
nodes = [{name = "a", devices = ["core", "core", "core"]}]
inside = {alpha = 1e-6}
deaths = [{rank = 2, time = 1.95}]
""")
    results = simulate(work, 3, cluster).results
    assert results == {0: (0, 0.0), 1: (1, 2.0)}


def test_several_nodes_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FAMILY:
        options = ["--method", name, "--ranks", "2", "--data", "digits", "--model", "mlp"]
        assert main([*options, "--out", str(tmp_path / "no")]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "ranks on 2 nodes share no memory: run it on one node" in line


@pytest.mark.parametrize("name", quick(FAMILY, "hogwild-easgd"))
def test_several_nodes_of_an_mpi_job_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    """With MINIDL_MPI_ONLY each rank counts as a node."""
    words = ["--data", "synthetic:96x2x2x1:2", "--model", "mlp", "--method", name, "--out", str(tmp_path / "no")]
    done = run_ranks(2, [], "-m", "minidl.train", *words, MINIDL_MPI_ONLY="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
    assert done.returncode == 2 and not done.stdout
    assert lines == ["minidl: error: this method needs memory that all replicas share: run it on one node"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", quick(FAMILY, "hogwild-easgd"))
def test_processes_share_weights_and_one_is_killed_while_it_writes(tmp_path: Path, name: str) -> None:
    where = "comm.vectors:VectorArithmetic.axpy" if name == "hogwild-easgd" else "comm.replica:Replica.update"
    code, [result], errors = killed(tmp_path / "run", 3, [1], where, "--method", name)
    assert code == 0 and result["replicas_alive"] == 2 and result["epochs"] == 4
    assert result["reads_overlapped"] >= 0 and "replica 1 was killed" in errors


# Whole runs.

ONE_NODE = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", devices = ["core", "core", "core", "core"]}]
inside = {alpha = 1e-3, rate = 1e8}
"""


@pytest.mark.parametrize("name", FAMILY)
def test_a_stopped_run_goes_on_from_the_shared_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the same and with another number of replicas."""
    monkeypatch.setattr("sessions.CLUSTER", ONE_NODE)
    began: list[np.ndarray] = []
    read = SharedVector.read

    def noted(self: SharedVector, out: np.ndarray) -> None:
        began.append(self.values.copy())
        read(self, out)

    for ranks in (3, 2):
        folder = tmp_path / f"run-{ranks}"
        run = Sessions(folder, 3, {}, stop=0.02, method=name, epochs=2)
        assert run.summary is None and not run.errors
        saved = run.last().vectors
        vector = "theta" if name == "hogwild-sgd" else "method.center"
        last = {saved[f"{rank}/{vector}"].tobytes() for rank in range(3)}
        assert len(last) == 1, "all have read the last weights"
        with monkeypatch.context() as patch:
            patch.setattr(SharedVector, "read", noted)
            again = Sessions(folder, ranks, {})
        assert again.summary and again.summary["replicas_alive"] == ranks
        assert name == "hogwild-sgd" or {began[0].tobytes()} == last
        began.clear()


@pytest.mark.parametrize("name", FAMILY)
def test_the_others_go_on_without_a_dead_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:  # fmt: skip
    monkeypatch.setattr("sessions.CLUSTER", ONE_NODE)
    run = Sessions(tmp_path / "run", 3, {1: 0.02}, method=name, epochs=2)
    run.check()
    assert run.summary and run.summary["replicas_alive"] == 2
