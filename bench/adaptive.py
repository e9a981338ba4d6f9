"""Adaptive communication: bytes and time over a slow link, and accuracy against other ways to choose the steps.

    python bench/adaptive.py --data-dir ../shared/data               all parts; --only NAME for one part:

    two-hosts       four replicas on two hosts with a link of 100 Mbit/s: seconds and bytes over the link until the
                    average has 90% on Fashion-MNIST (needs root and MPICH)
    equal-samples   accuracy of adaptive gossip minus that of D-PSGD with an exchange in each step, after the same
                    number of samples
    fixed-period    accuracy of adaptive gossip minus that of gossip with a fixed period, which sends as many messages

Adaptive gossip and that with a fixed period make the same swaps of int8 codes, mostly within a host; only the times of
their swaps differ. On two hosts, hierarchical gossip that sends models is measured, too.
The last two parts run in virtual time, on two hosts with such a link: both runs of a pair have the same seed. Their
rows are the mean difference and its 95% interval by Student's t distribution. If the interval contains 0, the
result is a tie. The options of the methods were chosen with seed 100, which no part uses. Only the rate of adaptive
gossip was set after a first run with seed 0, so that both kinds send as many messages.

Each run is a line in --out. A second start continues where the first one was stopped. With --quick, a small network
learns digits on this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

import numpy as np

from bench import comm
from bench import comm_jobs as jobs
from bench.papers.sc17_findings import interval
from bench.papers.sc17_store import Result, Store, work

GOSSIP = ["--method", "gossip", "--peer", "hierarchical"]
SWAPS = [*GOSSIP, "--inside", "0.75", "--exchange", "swap", "--compress", "int8"]
METHODS: dict[str, list[str]] = {
    # In virtual time this rate sends as many messages as `fixed-period`, to 5%.
    "adaptive": [*SWAPS, "--adaptive", "drift", "--exchange-rate", "0.31", "--threshold", "0.002"],
    "fixed-period": [*SWAPS, "--period", "4"],
    "hierarchical": [*GOSSIP, "--inside", "0.9", "--period", "4"],  # sends models, without swaps
    "each-step": ["--method", "dpsgd", "--topology", "one-peer-exponential"],  # it waits for the link
}
CLUSTER = """
devices.core = {{speed = 1, jitter = 0.05}}
nodes = [{{name = "host", count = 2, devices = ["core", "core"]}}]
inside = {{alpha = 1e-5, rate = 4e10}}
between = {{alpha = 2e-4, rate = 1e8}}  # 100 Mbit/s
measured = {{"{model} {data}" = {seconds}}}  # per image: two ranks of two-hosts share a core
"""


class Bench:
    """The runs, and what the store has of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        args.out.mkdir(parents=True, exist_ok=True)
        self.store = Store(args.out / ("quick.jsonl" if args.quick else "results.jsonl"))
        data_dir = ["--data-dir", args.data_dir] if args.data_dir else []
        self.task = ["--data", args.dataset, "--model", args.net, "--batch-size", str(args.batch), "--lr", "0.05",
                     *data_dir]  # fmt: skip

    def result(self, key: str, run: Callable[[], Result]) -> Result:
        """Return what the store has of a run; make it first if it has nothing."""
        work(self.store, lambda: [] if key in self.store.found else [(key, run)])
        return self.store.found[key]

    # -- two hosts -----------------------------------------------------------------------------------------------------

    def on_hosts(self, name: str, seed: int) -> Result:
        """Return seconds, steps of a replica and MB over the link until the target. steps: None if never."""
        if name != "each-step":
            run = self.result(f"hosts-{name}-{seed}", lambda: self.train(name, seed))
            found = {} if self.args.no_tests else self.result(f"hosts-{name}-{seed}-tests", lambda: self.test(run))
            at = found["steps"] // self.args.every - 1 if found.get("steps") else -1
            return {"steps": None, "accuracy": 0.0, **found, "seconds": run["seconds"][at],
                    "megabytes": run["bytes"][at] * run["interface"] / 1e6, "counted": run["counted"]}  # fmt: skip
        step = self.result(f"hosts-{name}-step", lambda: self.step(name))
        found = {} if self.args.no_tests else self.result(f"hosts-{name}-{seed}", lambda: self.steps_to(name, seed))
        found = {"steps": None, "accuracy": 0.0, **found}
        return {**found, "counted": step["counted"], **{key: (found["steps"] or 0) * step[key]
                                                        for key in ("seconds", "megabytes")}}  # fmt: skip

    def argv(self, name: str, seed: int) -> list[str]:
        return [*self.task, "--schedule", "constant", "--seed", str(seed), *METHODS[name]]

    def train(self, name: str, seed: int) -> Result:
        """Train over the link. Return the file of the averages, and seconds and counted bytes up to each of them."""
        file = self.args.out / f"{name}-{seed}.npy"
        with tempfile.TemporaryDirectory() as folder:
            argv = [*self.argv(name, seed), "--steps", str(self.args.hosts_steps)]
            ranks, ratios = self.over_the_link({"argv": argv, "every": self.args.every, "keep": folder})
            copies = [np.load(Path(folder) / f"{rank}.npy", mmap_mode="r") for rank in range(len(ranks))]
            np.save(file, [np.mean(each, axis=0) for each in zip(*copies)])
        began = min(rank["began"] for rank in ranks)
        return {"file": str(file), "seconds": [max(each) - began for each in zip(*(rank["times"] for rank in ranks))],
                "bytes": [sum(each) for each in zip(*(rank["between"] for rank in ranks))], **ratios}  # fmt: skip

    def test(self, run: Result) -> Result:
        """Test the averages of a run until one reaches the target, and the last one. Remove their file."""
        averages, test = np.load(run["file"]), comm.AverageTester(self.args)
        reached = next((k + 1 for k, theta in enumerate(averages) if test([theta]) >= self.args.target), None)
        final = test([averages[-1]])
        Path(run["file"]).unlink()
        return {"steps": reached and reached * self.args.every, "accuracy": final}

    def steps_to(self, name: str, seed: int) -> Result:
        """Count the steps of a synchronous method to the target, in shared memory: it computes the same bits there."""
        args = self.args
        steps, final = comm.steps_to(self.argv(name, seed), args.target, args.hosts_steps, args.every, args)
        return {"steps": steps, "accuracy": final}

    def step(self, name: str) -> Result:
        """Measure seconds and MB over the link of a step of a synchronous method."""
        made = self.args.link_steps
        ranks, ratios = self.over_the_link({"argv": [*self.argv(name, 0), "--steps", str(made)], "every": 1})
        seconds = max(rank["times"][-1] for rank in ranks) - min(rank["began"] for rank in ranks)
        between = sum(rank["between"][-1] for rank in ranks)
        return {"seconds": seconds / made, "megabytes": between * ratios["interface"] / 1e6 / made, **ratios}

    def over_the_link(self, job: dict[str, Any]) -> tuple[list[Any], dict[str, float]]:
        """Run a job. Return what the ranks found, and what the interface has counted relative to minidl.

        interface: all bytes. counted: those without the headers of packets.
        """
        if self.args.quick:
            found = jobs.launched(4, "train", job)
            return [found[rank] for rank in sorted(found)], {"interface": 1.0, "counted": 1.0}
        with jobs.TwoHosts("100mbit", self.args.mpich or sys.executable) as hosts:
            found, link = hosts.run(4, "train", job)
        ranks = [found[rank] for rank in sorted(found)]
        counted = next(rank["summary"] for rank in ranks if rank.get("summary"))["bytes_between_nodes"]
        return ranks, {"interface": link.bytes / counted, "counted": link.payload / counted}

    # -- virtual time --------------------------------------------------------------------------------------------------

    def simulated(self, name: str, seed: int) -> Result:
        return self.result(f"virtual-{name}-{seed}", lambda: self.simulate(name, seed))

    def simulate(self, name: str, seed: int) -> Result:
        from minidl.comm.cluster import parse as cluster
        from minidl.run.config import Config, resolve
        from minidl.run.folder import RunFolder
        from minidl.run.options import parse
        from minidl.run.signals import Signals
        from minidl.training.simulated import SimulatedRun

        args = self.args
        argv = [*self.task, *METHODS[name], "--epochs", str(args.epochs), "--seed", str(seed), "--quiet"]
        hosts = cluster(CLUSTER.format(model=args.net, data=args.dataset, seconds=args.image_seconds))
        with tempfile.TemporaryDirectory() as folder, Signals() as signals:
            config = resolve(parse(Config, [*argv, "--out", f"{folder}/run"]))
            run = SimulatedRun(config, hosts, 4, signals)
            result = run.begin(lambda: RunFolder.create(run.config))
        names = ("accuracy_average", "messages", "bytes_sent", "bytes_between_nodes", "seconds")
        return {name: result[name] for name in names}


# -- the parts ---------------------------------------------------------------------------------------------------------


def two_hosts(report: measure.Report, bench: Bench) -> None:
    """Report the means over --hosts-seeds. For `each-step` see `time_of_synchronous` in comm.py."""
    seconds, megabytes = {}, {}
    for name in bench.args.hosts_methods:
        found = [bench.on_hosts(name, seed) for seed in bench.args.hosts_seeds]
        for seed, one in zip(bench.args.hosts_seeds, found, strict=True):
            reached = "" if one["steps"] else "not "
            print(f"{name}, seed {seed}: target {reached}reached after {one['steps']} steps, {one['seconds']:.1f} s, "
                  f"{one['megabytes']:.1f} MB; {one['accuracy']:.2%} at the end", flush=True)  # fmt: skip
        if all(one["steps"] for one in found):
            seconds[name] = statistics.mean(one["seconds"] for one in found)
            megabytes[name] = statistics.mean(one["megabytes"] for one in found)
            report.row(f"{name}-steps", statistics.mean(one["steps"] for one in found), "steps of a replica")
            report.row(f"{name}-seconds", seconds[name], "s")
            report.row(f"{name}-link", megabytes[name], "MB over the link")
        report.row(f"{name}-counted", 100 * statistics.mean(one["counted"] for one in found),
                   "% of the bytes that minidl counted", "99 to 101")  # fmt: skip
    if {"adaptive", "each-step"} <= seconds.keys():
        report.row("adaptive-link-share", 100 * megabytes["adaptive"] / megabytes["each-step"], "% of each-step",
                   "<= 8")  # fmt: skip
        report.row("adaptive-time-share", 100 * seconds["adaptive"] / seconds["each-step"], "% of each-step", "<= 16.7")
    for other in ("fixed-period", "hierarchical"):
        if {"adaptive", other} <= seconds.keys():
            share = 100 * seconds["adaptive"] / seconds[other]
            report.row(f"adaptive-against-{other}", share, "% of its time", "<= 100")


def compare(report: measure.Report, bench: Bench, other: str, goal: str, messages_goal: str = "") -> None:
    """Report the accuracy of adaptive gossip minus that of another method, and its messages relative to the other's."""
    differences, messages = [], []
    for seed in bench.args.seeds:
        found, against = (bench.simulated(name, seed) for name in ("adaptive", other))
        differences.append(100 * (found["accuracy_average"] - against["accuracy_average"]))
        messages.append(found["messages"] / against["messages"])
        print(f"seed {seed}: adaptive {found['accuracy_average']:.2%}, {other} {against['accuracy_average']:.2%}, "
              f"{messages[-1]:.3f} times its messages", flush=True)  # fmt: skip
    mean, error = interval(differences)
    tie = " A tie: the interval contains 0." if abs(mean) <= error else ""
    print(f"adaptive minus {other}: {mean:+.2f} ± {error:.2f} points.{tie}", flush=True)
    report.row(f"adaptive-minus-{other}", mean, f"± {error:.2f} points", goal)
    report.row(f"messages-of-{other}", 100 * sum(messages) / len(messages), "% (adaptive)", messages_goal)


def equal_samples(report: measure.Report, bench: Bench) -> None:
    compare(report, bench, "each-step", ">= -0.3")


def fixed_period(report: measure.Report, bench: Bench) -> None:
    compare(report, bench, "fixed-period", "> 0", "95 to 105")


PARTS = {"two-hosts": two_hosts, "equal-samples": equal_samples, "fixed-period": fixed_period}
QUICK = dict(data_dir="", dataset="digits", net="mlp", batch=32, target=0.5, hosts_steps=40, every=10,
             link_steps=5, hosts_seeds=[1], epochs=2, seeds=[0, 1])  # fmt: skip


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data-dir", default=os.environ.get("MINIDL_DATA", ""), help="folder with Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=Path("runs/adaptive"), help="folder of the results")
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--net", default="lenet")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--target", type=float, default=0.9, help="two-hosts: accuracy")
    parser.add_argument("--mpich", default="", help="two-hosts: a Python with MPICH (default: this one)")
    parser.add_argument("--hosts-methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--hosts-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--hosts-steps", type=int, default=1200, help="two-hosts: steps of a replica")
    parser.add_argument("--link-steps", type=int, default=30, help="two-hosts: steps of `each-step` over the link")
    parser.add_argument("--every", type=int, default=20, help="two-hosts: steps between two tests")
    parser.add_argument("--no-tests", action="store_true", help="two-hosts: only what needs a quiet machine")
    parser.add_argument("--epochs", type=int, default=15, help="virtual time: of all replicas together")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="virtual time")
    parser.add_argument("--image-seconds", type=float, default=1.4e-3, help="virtual time: of a gradient")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    args.data_dir, args.out = os.path.abspath(args.data_dir) if args.data_dir else "", args.out.resolve()
    report, bench = measure.Report(args), Bench(args)
    for name in args.only or PARTS:
        print(f"\n{name}", flush=True)
        PARTS[name](report, bench)
    report.finish()


if __name__ == "__main__":
    main()
