"""Gradients that count by shares, unequal workers, and the options of both: --weighting, --workers LIST, --shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_mpi as jobs
from launching import PATIENCE
from sessions import Sessions
from toy_replicas import LINK, config_of

from minidl import models, nn, ops
from minidl.cli.arguments import with_devices
from minidl.comm.balance import per_step
from minidl.comm.cluster import parse, uniform
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods import method
from minidl.comm.replica import Engine, Replica
from minidl.comm.transport.cycle import DutyCycle
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.sim import Simulation
from minidl.comm.vectors import VectorArithmetic
from minidl.errors import ConfigError
from minidl.run.config import Config, resolve
from minidl.run.folder import RunFolder
from minidl.run.options import parse as parse_words
from minidl.run.shares import Worker, parse_devices, parse_shares
from minidl.run.signals import Signals
from minidl.train import main, read_config
from minidl.training.simulated import SimulatedRun

SMALL = ["--data", "synthetic:200x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--quiet"]


# -- the gradient of the union batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("sizes", [(14, 5, 1), (9, 0, 3), (7, 7)])
def test_weighted_gradients_add_up_to_that_of_the_union(
    dtype: Any, tolerance: float, sizes: tuple[int, ...]
) -> None:
    nn.seed(1)
    model = models.mlp((12, 12, 1), 5, hidden=(30,))
    if dtype is np.float64:
        for parameter in model.parameters():
            parameter._data = parameter._data.astype(np.float64)
    engine = Engine(model, config_of("local"), lambda logits, y: ops.cross_entropy(logits, y))
    replica = Replica(engine, Fabric(LoopbackTransport()))
    rng, whole = np.random.default_rng(2), sum(sizes)
    x, y = rng.standard_normal((whole, 12, 12, 1)).astype(dtype), rng.integers(5, size=whole)
    replica.gradient((x, y))
    assert replica.grad.dtype == dtype
    expected, total = replica.grad.copy(), np.zeros(replica.grad.size, dtype)
    for start, size in zip(np.cumsum((0, *sizes)), sizes):
        replica.weight = len(sizes) * size / whole
        replica.gradient((x[start : start + size], y[start : start + size]))
        total += replica.grad / len(sizes)
    assert np.abs(total - expected).max() <= tolerance * np.abs(expected).max()


def test_runs_with_unequal_shares_equal_one_replica(tmp_path: Path) -> None:
    """allreduce with --weighting share makes the same steps, whatever the division; plain makes others."""
    cluster = 'devices.core = {flops = 1e6}\nnodes = [{name = "n", devices = ["core", "core", "core"]}]\n' \
              "inside = {alpha = 1e-6, rate = 1e12}"  # fmt: skip

    def theta(name: str, **options: Any) -> np.ndarray:
        values = dict(data="synthetic:96x4x4x1:4", model="mlp", batch_size=8, epochs=2, quiet=True, method="allreduce")
        config = resolve({**values, "out": str(tmp_path / name), **options})
        run = SimulatedRun(config, parse(cluster), 3, Signals())
        run.begin(lambda: RunFolder.create(run.config, "", cluster))
        return run.sessions[0].trainer.replica.theta.astype(np.float64)

    static = {"balance": "static", "weighting": "share"}
    one = theta("one", shares="0.34,0.33,0.33", **static)
    other = theta("other", shares="0.8,0.1,0.1", **static)
    plain = theta("plain", shares="0.8,0.1,0.1", balance="static")
    assert np.abs(other - one).max() < 1e-5 < np.abs(plain - one).max()


# -- least squares on unequal shards -----------------------------------------------------------------------------------

SHARES = (0.7, 0.2, 0.1)


class LeastSquares(VectorArithmetic):
    """What a method uses of a replica: weights of least squares on a shard, in float64, with exact gradients."""

    def __init__(self, fabric: Fabric, weight: float, shares: tuple[float, ...]) -> None:
        self.fabric, self.weight, self.shares, self.lr, self.steps = fabric, weight, shares, 0.02, 0
        self.theta, self.grad, self.images = np.zeros(3), np.zeros(3), 0
        self.state = {"velocity": np.zeros(3)}

    def gradient(self, batch: Any) -> float:
        a, b = batch
        self.grad[:] = self.weight * a.T @ (a @ self.theta - b) / len(b)
        self.fabric.elapse("gradient", 8)
        return 0.0

    def layers(self) -> list[tuple[int, int]]:
        return [(0, 3)]

    def update(self, theta: np.ndarray | None = None) -> None:
        self.theta -= self.lr * self.grad
        self.steps += 1

    def mix(self, other: np.ndarray, weight: float, start: int = 0) -> None:
        self.mix_into(self.theta, other, weight)

    def outgoing(self) -> np.ndarray:
        return self.theta

    def touch(self) -> None:
        """There are no other forms of the weights."""


def distance(name: str, weighted: bool, mixing: bool, factors: tuple[float, ...] = (1, 1, 1), **options: Any) -> float:
    """Train on shards of these SHARES; return how far the mean of all is from the pooled solution.

    factors: by which each replica is slower.
    """
    rng = np.random.default_rng(5)
    rows = [int(100 * share) for share in SHARES]
    shards = [(rng.standard_normal((n, 3)), 3.0 * rank + rng.standard_normal(n)) for rank, n in enumerate(rows)]
    shards = [(a, a @ (np.arange(3.0) * (1 + rank)) + b) for rank, (a, b) in enumerate(shards)]
    pooled = np.linalg.lstsq(np.vstack([a for a, _ in shards]), np.concatenate([b for _, b in shards]), rcond=None)[0]
    weighting = "mixing" if mixing else "share" if weighted else "plain"
    config = config_of(name, weight_decay=0.0, momentum=0.0, weighting=weighting, **options)
    simulation = Simulation(uniform(3, 3, **LINK), 3, 0, flops=1e4)
    for rank, factor in enumerate(factors):
        simulation.image_seconds[rank] *= factor
    end: dict[int, np.ndarray] = {}

    def work(rank: int) -> None:
        fabric = Fabric(simulation.transport(rank))
        kind: Any = method(name)
        fabric.join(kind.buffers(6, config), "least squares")
        replica: Any = LeastSquares(fabric, 3 * SHARES[rank] if weighted else 1.0, SHARES)
        acting = kind(replica, fabric, config)
        fabric.set_status(Column.STATE, State.TRAINING)
        longest = 400 * 8 * max(simulation.image_seconds)
        while replica.steps < 400 if kind.synchronous else fabric.now() < longest:
            fabric.begin_step(replica.steps, kind.synchronous)
            replica.lr = 0.1 / (1 + (replica.steps if kind.synchronous else 400 * fabric.now() / longest) / 30)
            if not kind.synchronous and weighted:
                replica.weight = per_step(3 * SHARES[rank], fabric.status[:, Column.STEP], rank)
            acting.step(shards[rank])
        fabric.set_status(Column.STATE, State.PAUSED)
        acting.pause()
        end[rank] = replica.theta

    simulation.run({rank: lambda rank=rank: work(rank) for rank in range(3)})
    return float(np.linalg.norm(np.mean([*end.values()], axis=0) - pooled))


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_least_squares_on_unequal_shards(topology: str) -> None:
    """Weights of gradients, or a mixing matrix by shares, reach the pooled solution. Both, or neither, do not."""
    reached = {(w, m): distance("dpsgd", w, m, topology=topology) for w in (True, False) for m in (True, False)}
    assert reached[True, False] < 0.01 and reached[False, True] < 0.01, reached
    assert reached[True, True] > 0.1 and reached[False, False] > 0.1, reached


def test_free_running_replicas_divide_by_their_step_rate() -> None:
    """Gossip, with steps that take 1, 2 and 4 times as long: without weights, the fast replica counts too much."""
    plain = distance("gossip", False, False, (4, 2, 1))
    weighted = distance("gossip", True, False, (4, 2, 1))
    assert weighted < 0.15 * plain and weighted < 0.3, (weighted, plain)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ("--method allreduce --balance static --shares 0.7,0.2", "sums to 0.9: expected 1"),
    ("--method allreduce --balance static --shares 0.7,0.3,x", "got 'x'"),
    ("--method allreduce --balance static --shares 1.7,-0.7", "got '1.7'"),
    ("--method allreduce --balance static --shares nan,1", "got 'nan'"),
    ("--method allreduce --balance static --shares 0.5,0.25,0.25 --workers 2", "3 numbers for 2 replicas"),
    ("--method allreduce --balance dynamic --shares 0.5,0.5", "only with balance static"),
    ("--method allreduce --balance dynamic --shards skewed:0.3", "each replica has its own"),
    ("--method allreduce --balance quick", "unknown balance 'quick'"),
    ("--method ps --balance dynamic", "not of ps"),
    ("--method gossip --balance dynamic", "unknown balance 'dynamic'"),
    ("--method allreduce --weighting mixing", "unknown weighting 'mixing'"),
    ("--method gossip --weighting share --optimizer adam", "expected optimizer sgd"),
    ("--method dpsgd --weighting share --optimizer adam --workers 2", "expected optimizer sgd"),
    ("--method dpsgd --weighting mixing --workers 2", "one undirected graph"),
    ("--method dpsgd --weighting mixing --topology ring --compress int8 --workers 2", "no compression"),
    ("--workers cpu:1,gpu:0", "'gpu:0' is no worker"),
    ("--workers cpu:1,cpu:0", "'cpu:0': expected 1 to 4096 threads"),
    ("--workers cpu:1,cpu:1.5", "'cpu:1.5': expected 1 to 4096 threads"),
    ("--workers cpu:1,cpu:nan", "'cpu:nan'"),
    ("--workers cpu:1,", "'' is no worker"),
    ("--workers cpu:0.5", "a list of one worker"),
    ("--workers 1,2", "'1' is no worker"),
    ("--workers two", "'two' is no worker; expected a whole number, or cpu:THREADS"),
    ("--workers cpu", "'cpu' is no worker; expected a whole number, or cpu:THREADS"),
    ("--method gossip --balance queue --shards skewed:0.3 --workers 2", "balance has an effect only with shards iid"),
    ("--workers cpu:1,cpu:0.5 --threads 2", "exclude each other"),
    ("--join somewhere --workers cpu:1,cpu:0.5", "a list is for a job that begins"),
])  # fmt: skip
def test_bad_options_are_one_line(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*options.split(), *SMALL[:-1]]) == 2
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error
    assert not list(tmp_path.iterdir()), "nothing was trained"


def test_a_simulation_takes_no_list(capsys: pytest.CaptureFixture[str]) -> None:
    from minidl.simulate import main as simulate

    assert simulate(["--workers", "cpu:1,cpu:0.5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_lists_are_parsed() -> None:
    assert parse_devices("cpu:2,cpu:0.5") == (Worker(2), Worker(1, 0.5))
    assert parse_shares("0.7,0.25,0.05", 3) == (0.7, 0.25, 0.05) and parse_shares("") == ()
    with pytest.raises(ConfigError):
        parse_shares("0.5, 0.5")


def test_a_resumed_run_has_the_same_devices(tmp_path: Path) -> None:
    """Each line of options continues the run of the lines before it."""

    def read(words: str) -> Config:
        return read_config(parse_words(Config, with_devices(words.split())))

    began = read(f"--workers cpu:2,cpu:0.5 --method gossip --out {tmp_path / 'run'}")
    assert (began.workers, began.devices, began.threads) == (2, "cpu:2,cpu:0.5", None)
    with RunFolder.create(began) as folder:
        path = folder.folder
    for words, expected in [
        ("", (2, "cpu:2,cpu:0.5", None)),
        ("--workers 3", (3, "", 0)),
        ("--workers=cpu:1,cpu:1,cpu:3", (3, "cpu:1,cpu:1,cpu:3", None)),
        ("--threads 4", (2, "", 4)),
    ]:
        found = read(f"--resume {path} {words}")
        assert (found.workers, found.devices or "", found.threads) == expected, words
    with pytest.raises(ConfigError, match="2 devices for 3 workers"):
        replace(began, workers=3)


# -- a duty cycle ------------------------------------------------------------------------------------------------------


def test_a_duty_cycle_sleeps_in_proportion_and_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides: the thread has used 0.3 s, and sleeps for 0.9 s in slices."""
    clock, slept, beats = [100.0], [0.0], [0]
    cpu = iter([1.0, 1.3, 1.3, 1.3])

    def sleep(seconds: float) -> None:
        slept[0] += seconds
        clock[0] += seconds

    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    cycle = DutyCycle(0.25, lambda: beats.__setitem__(0, beats[0] + 1))
    cycle.begin()
    cycle.rest()
    assert slept[0] == pytest.approx(0.9) and beats[0] >= 45


def test_processes_of_unequal_speed(tmp_path: Path) -> None:
    """Shared memory: the slower replica gets the smaller share, and all images are trained."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "minidl.train", *SMALL, "--method", "allreduce", "--balance", "dynamic", "--json",
               "--workers", "cpu:1,cpu:0.1", "--epochs", "3", "--out", str(out), "--batch-size", "64", "--data",
               "synthetic:2048x16x16x1:4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["samples"] == 3 * 2048 and result["images_left_out"] == 0
    first, second = shares_of(out)
    assert first > second


@pytest.mark.slow
def test_mpiexec(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*jobs.mpiexec(), "-n", "2", sys.executable, "-m", "minidl.train", *SMALL, "--method", "dpsgd",
               "--balance", "dynamic", "--workers", "cpu:1,cpu:0.1", "--epochs", "3", "--json", "--out", str(out),
               "--batch-size", "64", "--data", "synthetic:2048x16x16x1:4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=jobs.environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 3 * 2048
    first, second = shares_of(out)
    assert first > second


def shares_of(out: Path) -> list[int]:
    """Return the last division of a run."""
    return list(Sessions.last_of(out).state["work"]["balance"]["division"])
