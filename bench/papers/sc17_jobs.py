"""The jobs of bench/papers/sc17.py: what each table needs, as a key and a function that computes the result.

A key names everything that the result depends on. So results in a file stay valid, and a changed cluster, seed,
learning rate or option makes a new job.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.papers import sc17_paper as paper
from bench.papers.costs import DATA_MOVES, WEIGHTS, run
from bench.papers.networks import Network, alexnet, googlenet, lenet, mlp, vgg19
from bench.papers.sc17_paper import Row, row
from bench.papers.sc17_store import Job, Jobs, Result
from bench.papers.sc17_training import REPLICAS, Until, train
from minidl.comm import cluster as clusters
from minidl.comm.cluster import Cluster, Link
from minidl.errors import ConfigError

HERE = Path(__file__).parent
RATES = "rates-sc17.json"  # the learning rate of each row, and what --tune found
KNL = "knl-aries"  # the cluster of weak scaling and of parts
STEPS, FITTING_STEPS = 24, 12
NETWORKS = {"GoogLeNet": googlenet, "VGG-19": vgg19}
GRID = tuple(float(f"{0.1 * 2 ** (k / 2):.3g}") for k in range(-14, 7))  # of learning rates, with a factor of sqrt(2)
TUNING_SEEDS = (1000, 1001)  # which no other table uses
SCALED = {"Sync EASGD": {"center": "copies", "overlap": True}, paper.OWN: paper.OWN_OPTIONS}


class Task(NamedTuple):
    """What is trained. network: its costs. every: images between two tests.

    tuning: images of a training that searches a learning rate; it is tested after two thirds of them, and at the end.
    paired: images after which the accuracies of the `paired` rows are compared.
    """

    data: str
    model: str
    network: Network
    batch: int
    epochs: int
    target: float
    every: int
    tuning: int
    paired: int


MNIST = Task("mnist", "lenet", lenet(), 16, 4, 0.988, 10_000, 60_000, 120_000)
DIGITS = Task("digits", "mlp", mlp(), 16, 6, 0.9, 1000, 3000, 4000)


# -- where the time goes ----------------------------------------------------------------------------------------------


def require_host(cluster: Cluster) -> None:
    """Raise ConfigError unless the cluster begins with 8 devices and their host, on one node."""
    place = cluster.place(REPLICAS + 1)
    hosts = [device.host for device in place.devices]
    if cluster.host is None or hosts != [False] * REPLICAS + [True] or len(place.groups) > 1:
        raise cluster.wrong(f"expected a node with {REPLICAS} devices and then their host, and a table [host], as in "
                            "the example gpu-node-8")  # fmt: skip


def step(row: Row, cluster: Cluster, network: Network, batch: int, steps: int = STEPS) -> Result:
    """Where the time of a step of all replicas goes, costs only."""
    found = run(row.name, row.options, REPLICAS, cluster, network, batch, steps)
    return {"milliseconds": 1e3 * found.seconds, "shares": found.shares, "links": found.links}


def communication(found: Mapping[str, Any]) -> float:
    """Return the fraction of its time in which a replica waits for weights or data."""
    return float(found["shares"][WEIGHTS] + found["shares"][DATA_MOVES])


def fitted(cluster: Cluster) -> float:
    """Return the rate of [host], in bit/s, with which Original EASGD communicates in 87% of its time."""
    low, high = 1e8, 1e12
    for _ in range(16):
        middle = (low * high) ** 0.5
        host = replace(cluster.host or Link(), beta=8 / middle)
        found = step(row(paper.ORIGINAL), replace(cluster, host=host), MNIST.network, MNIST.batch, FITTING_STEPS)
        more = communication(found) > paper.COMMUNICATION[paper.ORIGINAL]
        low, high = (middle, high) if more else (low, middle)
    return (low * high) ** 0.5


# -- weak scaling, and a chip in parts ---------------------------------------------------------------------------------


def scaling(network: str, options: Mapping[str, Any], nodes: int) -> Result:
    """The time of a step with so many nodes, each with an equal batch of 64 images, costs only."""
    given = {**paper.PLAIN, **options}
    found = run("sync-easgd", given, nodes, clusters.load(KNL), NETWORKS[network](), 64, 4)
    return {"seconds": found.seconds, "shares": found.shares}


def predicted_parts(number: int) -> Result:
    """The time of an image if a chip works in parts: each has its share of the cores and memory, and its own batch."""
    chip = clusters.load(KNL).devices["knl"]
    part = replace(chip, flops=chip.flops / number, memory=chip.memory / number)
    group = clusters.Group("chip", 1, ("part",) * number)
    inside = Link(alpha=2e-6, beta=number / chip.memory)  # a part copies with its share of the memory
    found = run("allreduce", paper.PLAIN, number, Cluster((group,), {"part": part}, inside), alexnet(), 64, 2)
    return {"milliseconds": 1e3 * found.seconds / (number * 64)}


def measured_parts() -> Result:
    """The time of a gradient of LeNet with one part and with two parts of this machine's cores (bench/parts.py)."""
    command = [sys.executable, str(HERE.parent / "parts.py"), "--json", "--batches", "128"]
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_NUM_THREADS"}  # all cores
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    rows = {row["name"]: row["value"] for row in json.loads(found[-1])["rows"]}
    return {"milliseconds": {parts: rows.get(f"lenet-b128-parts-{parts}") for parts in (1, 2)}}


# -- keys ------------------------------------------------------------------------------------------------------------


class Plan:
    """All jobs of a call of the command. check: called often during a training; it may raise an exception."""

    def __init__(
        self, path: str, cluster: Cluster, task: Task, data_dir: str, seeds: range, quick: bool, cpu: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.where = version(path)
        self.cluster, self.task, self.data_dir, self.seeds, self.quick = cluster, task, data_dir, seeds, quick
        self.cpu, self.check = cpu, check
        self.nodes = (1, 2, 4, 8) if quick else (1, 2, 4, 8, 16, 32, 64)  # weak scaling
        self.numbers = (1, 4) if quick else (1, 2, 4, 8, 16)  # of parts

    def costs(self) -> dict[str, Jobs]:
        """Return the jobs that compute no gradient, by the part of the comparison."""
        here = self.where, MNIST.batch
        steps = [(key("breakdown", row.title, *here, row.options),
                  partial(step, row, self.cluster, lenet(), MNIST.batch)) for row in paper.ROWS]  # fmt: skip
        derived = [(self.step_key(row), partial(step, row, self.cluster, self.task.network, self.task.batch))
                   for row in paper.ROWS if row.bits_of]  # fmt: skip
        scaled = [(self.scaling_key(network, title, nodes), partial(scaling, network, options, nodes))
                  for network in NETWORKS for title, options in SCALED.items() for nodes in self.nodes]  # fmt: skip
        parts = [(self.parts_key(number), partial(predicted_parts, number)) for number in self.numbers]
        return {
            "breakdown": steps,
            "accuracy": derived,
            "scaling": scaled,
            "parts": [*parts, (self.parts_key("measured"), measured_parts)],
        }

    def scaling_key(self, network: str, title: str, nodes: int) -> str:
        return key("scaling", network, title, nodes, SCALED[title], version(KNL))

    def parts_key(self, number: int | str) -> str:
        return key("parts", number, self.cpu if number == "measured" else version(KNL))

    def key_of(self, row: Row, seed: int) -> str:
        """Return the key of a training for the tables."""
        return self.training(row, seed, rates()[row.title])[0]

    def step_key(self, row: Row) -> str:
        return key("step", row.title, self.where, self.task.network.name, self.task.batch, row.options)

    def training(self, row: Row, seed: int, rate: float, tuning: bool = False) -> tuple[str, Job]:
        task = self.task
        options = {"data": task.data, "model": task.model, "epochs": task.epochs, "batch_size": task.batch,
                   "seed": seed, "lr": rate}  # fmt: skip
        until = Until(task.target, task.every, task.paired if row.paired else 0)
        if tuning:
            until = Until(0.0, task.tuning // 3, task.tuning)
        folder = {"data_dir": self.data_dir} if self.data_dir else {}
        job = partial(train, row, self.cluster, {**options, **folder}, until, self.check)
        return key("tune" if tuning else "accuracy", row.title, self.where, row.options, options, until), job

    def trainings(self) -> list[tuple[str, Job]]:
        """Return the trainings of all seeds. Those with the same seed come together."""
        found = rates()
        return [self.training(each, seed, found[each.title]) for seed in self.seeds
                for each in paper.ROWS if each.trained and not each.bits_of]  # fmt: skip

    def missing_rates(self, results: Mapping[str, Result]) -> list[tuple[str, Job]]:
        """Return, for each row, the next training that the search of its learning rate needs."""
        found = []
        for each in tuned():
            rate = climb(partial(self.tried, each, results), rates()[each.title])[1]
            if rate is not None:
                found += [job for seed in TUNING_SEEDS
                          if (job := self.training(each, seed, rate, tuning=True))[0] not in results]  # fmt: skip
        return found

    def tried(self, row: Row, results: Mapping[str, Result], rate: float) -> float | None:
        """Return the accuracy with this learning rate: the mean over the seeds, and over the two last tests of each.

        If a training has diverged, it is -rate, so the search goes on downward. None before all are trained.
        """
        every = [results.get(self.training(row, seed, rate, tuning=True)[0]) for seed in TUNING_SEEDS]
        if not all(every):
            return None
        if any(result.get("diverged") for result in every if result):
            return -rate
        ends = [accuracy for result in every if result for _, _, accuracy in result["curve"][-2:]]
        return sum(ends) / len(ends)


def climb(value: Callable[[float], float | None], start: float) -> tuple[float | None, float | None]:
    """Search GRID from the rate next to `start` upward, else downward, while the value grows.

    Returns (the best rate, None), or (None, the next rate whose value is needed).
    """
    at = min(range(len(GRID)), key=lambda place: abs(math.log(GRID[place] / start)))
    for direction in (1, -1):
        while 0 <= at + direction < len(GRID):
            here, there = value(GRID[at]), value(GRID[at + direction])
            if here is None:
                return None, GRID[at]
            if there is None:
                return None, GRID[at + direction]
            if there <= here:
                break
            at += direction
    return GRID[at], None


def with_margin(rate: float, tried: Mapping[float, float | None]) -> float:
    """Return the rate to train with: the best one, or the next lower one of the grid if the next higher one diverges.

    tried: the accuracy of each rate; None for one that diverges. A training until the target is longer than one of the
    search, and may diverge although all of the search with this rate have not.
    """
    at = GRID.index(rate)
    diverges = at + 1 < len(GRID) and tried.get(GRID[at + 1], 0.0) is None
    return GRID[at - 1] if diverges and at else rate


def tuned() -> list[Row]:
    return [each for each in paper.ROWS if each.trained and not each.bits_of]


def searched() -> dict[str, Any]:
    """Return what `write_rates` has written beside this file: {"cluster", "seeds", "images", "rows": {title: row}}.

    A row: {"rate": the one to train with, "accuracy": {rate: accuracy}}; the accuracy of a rate that diverges is null.
    """
    found: dict[str, Any] = json.loads((HERE / RATES).read_text(encoding="utf-8"))
    return found


def rates() -> dict[str, float]:
    """Return the learning rate of each row, which --tune found."""
    found = searched()["rows"]
    return {each.title: found[each.bits_of or each.title]["rate"] for each in paper.ROWS if each.trained}


def write_rates(plan: Plan, results: Mapping[str, Result], folder: Path) -> None:
    """Write the best rate of each row, and all accuracies, to the file RATES in a folder."""
    found = {}
    for each in tuned():
        tried = partial(plan.tried, each, results)
        values = {rate: value for rate in GRID if (value := tried(rate)) is not None}
        shown = {rate: round(value, 6) if value > 0 else None for rate, value in values.items()}
        best = climb(tried, rates()[each.title])[0]
        assert best is not None
        found[each.title] = {"rate": with_margin(best, shown),
                             "accuracy": {f"{rate:g}": value for rate, value in shown.items()}}  # fmt: skip
    file = {"cluster": plan.where, "seeds": TUNING_SEEDS, "images": plan.task.tuning, "rows": found}
    (folder / RATES).write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")


def version(cluster: str) -> str:
    """Return the name of a cluster, with a number that changes with its file."""
    return f"{cluster} {zlib.crc32(clusters.read(cluster).encode()):08x}"


def key(*parts: object) -> str:
    """Return a key of these parts. A mapping becomes its options, and a tuple its values."""
    return " | ".join(_text(part) for part in parts)


def _text(part: object) -> str:
    if isinstance(part, Mapping):
        return ", ".join(f"{name} {value}" for name, value in part.items())
    return ", ".join(map(str, part)) if isinstance(part, tuple) else str(part)


__all__ = ["ConfigError", "Plan", "Task"]
