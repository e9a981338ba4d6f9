"""Repeat the comparison of You, Buluc and Demmel (SC 2017) in a simulation, and print its tables beside the paper's.

    python -m bench.papers.sc17 --out runs/sc17 --data-dir ../shared/data     all parts, 5 seeds; repeat it to go on
    python -m bench.papers.sc17 --quick                                       digits instead of MNIST, 1 seed
    python -m bench.papers.sc17 --only breakdown --cluster mine.toml          one part, on other hardware
    python -m bench.papers.sc17 --fit                                         the rate of [host] for 87% communication
    python -m bench.papers.sc17 --tune --data-dir ../shared/data              search learning rates, on other seeds

Each result is appended to results.jsonl in the folder --out. A second call computes only those that are missing, so a
run that was killed goes on. Methods that this version of minidl lacks are left out of the tables.

Calibrated, that is, put in: the rate of [host] in clusters/gpu-node-8.toml, so that Original EASGD communicates in 87%
of its time. Everything else comes out of the simulation, and is called predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.papers import sc17_paper as paper
from bench.papers.costs import DATA_MOVES, WEIGHTS, config_of, run
from bench.papers.networks import alexnet, googlenet, lenet, vgg19
from bench.papers.sc17_figures import draw
from bench.papers.sc17_tables import tables
from minidl.comm import cluster as clusters
from minidl.comm.cluster import Cluster, Link
from minidl.comm.methods import METHODS, method
from minidl.run.folder import RunFolder
from minidl.run.signals import Signals, Stopped
from minidl.training.simulated import SimulatedRun

HERE = Path(__file__).parent
RATES = HERE / "rates-sc17.json"  # title of a row -> its learning rate, found by --tune
GRID = (0.0125, 0.025, 0.05, 0.1, 0.2)
TUNING = (1000, 1001)  # seeds, which no table uses
PARTS = ("breakdown", "accuracy", "scaling", "parts")
REPLICAS, BATCH, STEPS = 8, 64, 8
Result = dict[str, Any]
Job = Callable[[], Result]


class Store:
    """Results that are kept in a file, one line for each: {"key": ..., ...}."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Result] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                result = json.loads(line)
            except ValueError:  # the process was killed while it wrote this line
                continue
            self.found[result["key"]] = result

    def get(self, key: str, job: Job) -> Result:
        """Return the result of a job. If the file lacks it, do the job."""
        if key not in self.found:
            result = {"key": key, **job()}
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n" * self.torn() + json.dumps(result) + "\n")
            self.found[key] = result
            print(f"  {key}", flush=True)
        return self.found[key]

    def torn(self) -> bool:
        """Return whether the file ends within a line."""
        text = self.file.read_bytes() if self.file.exists() else b""
        return bool(text) and not text.endswith(b"\n")


def available() -> list[paper.Row]:
    return [row for row in paper.ROWS if row.name in METHODS]


# -- the parts of the comparison -------------------------------------------------------------------------------------


def breakdown(row: paper.Row, cluster: Cluster) -> Result:
    """Where the time of a step goes: LeNet, 8 replicas, costs only."""
    found = run(row.name, row.options, REPLICAS, cluster, lenet(), BATCH, STEPS)
    return {"milliseconds": 1e3 * found.seconds, "shares": found.shares, "links": found.links}


def communication(found: Mapping[str, Any]) -> float:
    """Return the fraction of the time in which only weights or data moved."""
    return found["shares"][WEIGHTS] + found["shares"][DATA_MOVES]


def fitted(cluster: Cluster) -> float:
    """Return the rate of [host], in bit/s, with which Original EASGD communicates in 87% of its time."""
    original = next(row for row in paper.ROWS if row.title == paper.ORIGINAL)
    low, high = 1e8, 1e12
    for _ in range(20):
        middle = (low * high) ** 0.5
        host = replace(cluster.host or Link(), beta=8 / middle)
        share = communication(breakdown(original, replace(cluster, host=host)))
        low, high = (middle, high) if share > paper.COMMUNICATION[paper.ORIGINAL] else (low, middle)
    return (low * high) ** 0.5


def accuracy(row: paper.Row, cluster: Cluster, options: Mapping[str, Any]) -> Result:
    """Train with 8 replicas in virtual time. Returns [virtual seconds, test accuracy] after each epoch."""
    config = config_of(row.name, {**row.options, **options})
    ranks = REPLICAS + len(method(row.name).roles(REPLICAS + 1, config).servers)
    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
        simulated = SimulatedRun(replace(config, out=f"{folder}/run"), cluster, ranks, signals)
        summary = simulated.begin(lambda: RunFolder.create(simulated.config))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [entry for entry in map(json.loads, lines) if entry.get("event") == "epoch"]
    curve = [[entry["time"], entry["accuracy_average"]] for entry in epochs]
    return {"curve": curve, "seconds": summary["seconds"], "steps": summary["steps"]}


def scaling(nodes: int, network: str) -> Result:
    """The time of a step with so many nodes, each with an equal batch, costs only."""
    chosen = googlenet() if network == "GoogLeNet" else vgg19()
    name, options = ("sync-easgd", {"center": "copies", "overlap": True}) if "sync-easgd" in METHODS else (
        "local-sgd", {"period": 1})  # fmt: skip
    found = run(name, {**paper.PLAIN, **options}, nodes, clusters.load("knl-aries"), chosen, BATCH, 4)
    return {"seconds": found.seconds, "method": name, "shares": found.shares}


def parts(number: int) -> Result:
    """The time of an image if a chip works in parts: each has its share of the cores and memory, and its own batch."""
    chip = clusters.load("knl-aries").devices["knl"]
    part = replace(chip, flops=chip.flops / number, memory=chip.memory / number)
    group = clusters.Group("chip", 1, ("part",) * number)
    inside = Link(alpha=2e-6, beta=number / chip.memory)  # a part copies with its share of the memory
    found = run("allreduce", paper.PLAIN, number, Cluster((group,), {"part": part}, inside), alexnet(), BATCH, 2)
    return {"milliseconds": 1e3 * found.seconds / (number * BATCH)}


# -- the command -------------------------------------------------------------------------------------------------------


def rates() -> dict[str, float]:
    found: dict[str, float] = json.loads(RATES.read_text(encoding="utf-8")) if RATES.exists() else {}
    return {row.title: found.get(row.title, 0.05) for row in paper.ROWS}


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of all runs that measure the time to an accuracy."""
    task = {"data": "digits", "model": "mlp", "epochs": 6} if args.quick else {
        "data": "mnist", "model": "lenet", "epochs": args.epochs}  # fmt: skip
    where = {"data_dir": args.data_dir} if args.data_dir else {}
    return {**task, **where, "batch_size": 16 if args.quick else BATCH, "schedule": "constant"}


def jobs(args: argparse.Namespace, cluster: Cluster) -> Iterator[tuple[str, Job]]:
    """Yield (key, job) of all results that the tables need."""
    where = named(args.cluster)
    for row in available():
        yield f"breakdown | {where} | {row.title}", lambda row=row: breakdown(row, cluster)
    for seed in range(args.first_seed, args.first_seed + (1 if args.quick else args.seeds)):
        for row in available():
            options = {**training(args), "seed": seed, "lr": rates()[row.title]}
            key = f"accuracy | {where} | {row.title} | {told(options)}"
            yield key, lambda row=row, options=options: accuracy(row, cluster, options)
    for network in ("GoogLeNet", "VGG-19"):
        for nodes in (1, 2, 4, 8) if args.quick else (1, 2, 4, 8, 16, 32, 64):
            yield f"scaling | {network} | {nodes}", lambda network=network, nodes=nodes: scaling(nodes, network)
    for number in (1, 4) if args.quick else (1, 2, 4, 8, 16):
        yield f"parts | {number}", lambda number=number: parts(number)


def named(path: str) -> str:
    """Return the name of a cluster, and a number that changes with its file."""
    return f"{path} {zlib.crc32(clusters.read(path).encode()):08x}"


def told(options: Mapping[str, Any]) -> str:
    """Return what distinguishes the runs of a row."""
    return ", ".join(f"{name} {options[name]}" for name in ("data", "model", "batch_size", "epochs", "lr", "seed"))


def tune(args: argparse.Namespace, store: Store, cluster: Cluster) -> None:
    """Choose each row's learning rate: the one with the shortest median time to the accuracy. Write them to RATES."""
    found = {}
    for row in available():
        times = {}
        for rate in GRID:
            every = []
            for seed in TUNING:
                options = {**training(args), "seed": seed, "lr": rate}
                key = f"tune | {named(args.cluster)} | {row.title} | {told(options)}"
                result = store.get(key, lambda row=row, options=options: _or_diverged(row, cluster, options))
                every.append(reached(result["curve"], args.target) or float("inf"))
            times[rate] = statistics.median(every)
        found[row.title] = min(times, key=lambda rate: times[rate])
        print(f"{row.title:<30}" + "".join(f"  {rate:g}: {time:.4g} s" for rate, time in times.items()), flush=True)
    RATES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _or_diverged(row: paper.Row, cluster: Cluster, options: Mapping[str, Any]) -> Result:
    from minidl.errors import DivergedError

    try:
        return accuracy(row, cluster, options)
    except DivergedError:
        return {"curve": []}


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Return when the accuracy reaches the target, between two epochs by linear interpolation; None if it does not."""
    before, less = 0.0, 0.0
    for time, value in curve:
        if value >= target:
            return before + (time - before) * (target - less) / (value - less)
        before, less = time, value
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sc17"), help="folder of results.jsonl and the figures")
    parser.add_argument("--cluster", default="gpu-node-8", help="a cluster file or example with 8 devices and a host")
    parser.add_argument("--data-dir", help="folder that contains mnist/")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="digits, one seed, up to 8 nodes")
    parser.add_argument("--fit", action="store_true", help="only print the rate of [host] for 87%% communication")
    parser.add_argument("--tune", action="store_true", help="only search the learning rates")
    parser.add_argument("--write", action="store_true", help="write the tables to RESULTS-sc17.md")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    args.target = 0.9 if args.quick else 0.988
    cluster = clusters.load(args.cluster)
    if args.fit:
        print(f"[host] rate = {fitted(cluster):.3g} bit/s")
        return
    store = Store(args.out / "results.jsonl")
    results: dict[str, Result] = {}
    try:
        if args.tune:
            tune(args, store, cluster)
            return
        for key, job in jobs(args, cluster):
            if key.partition(" | ")[0] in (args.only or PARTS):
                results[key] = store.get(key, job)
    except Stopped as stopped:
        print("sc17: stopped; repeat the command to go on", file=sys.stderr)
        sys.exit(stopped.code)
    until = partial(reached, target=args.target)
    text = tables(results, args.target, until)
    print(text)
    print("\n" + ", ".join(map(str, draw(results, args.target, until, args.out))))
    if args.write:
        (HERE / "RESULTS-sc17.md").write_text(text + "\n", encoding="utf-8")
    if args.json:
        rows = [{"name": key, "value": value, "unit": "ms", "goal": ""} for key, value in steps(results)]
        print(json.dumps({"rows": rows}))


def steps(results: Mapping[str, Result]) -> Iterator[tuple[str, float]]:
    """Yield (key, milliseconds) of all results that are the time of a step."""
    for key, result in results.items():
        if "milliseconds" in result:
            yield key, result["milliseconds"]


if __name__ == "__main__":
    main()

