"""Adaptive communication: bytes and time over a slow link, and accuracy against other ways to choose the steps.

    python bench/adaptive.py --data-dir ../shared/data               all parts; --only NAME for one part:

    two-hosts       four replicas on two hosts with a link of 100 Mbit/s: seconds and bytes over the link until the
                    average has 90% on Fashion-MNIST (needs root and MPICH)
    equal-samples   accuracy of adaptive gossip minus that of D-PSGD with an exchange in each step, after the same
                    number of samples
    fixed-period    accuracy of adaptive gossip minus that of gossip with a fixed period, which sends as many messages

The last two run in virtual time, on two hosts with such a link: both runs of a pair have the same seed. Their rows are
the mean difference and its 95% interval by Student's t distribution. If the interval contains 0, the result is a tie.
The options of the methods were chosen with seed 100, which no part uses.

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

from bench import comm
from bench import comm_jobs as jobs
from bench.papers.sc17_findings import interval
from bench.papers.sc17_store import Result, Store, work

GOSSIP = ["--method", "gossip", "--peer", "hierarchical"]
PERIOD = 3
METHODS: dict[str, list[str]] = {
    "adaptive": [*GOSSIP, "--inside", "0.9", "--adaptive", "drift", "--exchange-rate", f"{1 / PERIOD:.4f}"],
    "hierarchical-period-4": [*GOSSIP, "--inside", "0.9", "--period", "4"],
    "fixed-period": [*GOSSIP, "--inside", "0.9", "--period", str(PERIOD)],
    "each-step": ["--method", "dpsgd", "--topology", "one-peer-exponential"],  # it waits for the link
}
ON_HOSTS = ("adaptive", "hierarchical-period-4", "each-step")
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
        """Return seconds, steps of a replica and MB over the link until the target. seconds: None if never."""
        if name != "each-step":
            return self.result(f"hosts-{name}-{seed}", lambda: self.until(name, seed))
        needed = self.result(f"hosts-{name}-{seed}", lambda: self.steps_to(name, seed))
        step = self.result(f"hosts-{name}-step", lambda: self.step(name))
        steps = needed["steps"]
        return {**needed, "seconds": steps and steps * step["seconds"], "megabytes": (steps or 0) * step["megabytes"]}

    def argv(self, name: str, seed: int) -> list[str]:
        return [*self.task, "--schedule", "constant", "--seed", str(seed), *METHODS[name]]

    def until(self, name: str, seed: int) -> Result:
        """Train over the link; find where the average reaches the target."""
        args = self.args
        argv, ratio = [*self.argv(name, seed), "--steps", str(args.hosts_steps)], [1.0]

        def start(job: dict[str, Any]) -> jobs.Found:
            found, ratio[0] = self.over_the_link(job)
            return found

        reached, final = comm.until(start, argv, args.target, args.every, args)
        if not reached:
            return {"seconds": None, "steps": None, "megabytes": None, "ratio": ratio[0], "accuracy": final}
        return {"seconds": reached.seconds, "steps": reached.steps, "megabytes": reached.bytes * ratio[0] / 1e6,
                "ratio": ratio[0], "accuracy": final}  # fmt: skip

    def steps_to(self, name: str, seed: int) -> Result:
        """Count the steps of a synchronous method to the target, in shared memory: it computes the same bits there."""
        args = self.args
        steps, final = comm.steps_to(self.argv(name, seed), args.target, args.hosts_steps, args.every, args)
        return {"steps": steps, "accuracy": final}

    def step(self, name: str) -> Result:
        """Measure seconds and MB over the link of a step of a synchronous method."""
        made = self.args.link_steps
        found, ratio = self.over_the_link({"argv": [*self.argv(name, 0), "--steps", str(made)], "every": 1})
        seconds = max(one["times"][-1] for one in found.values()) - min(one["began"] for one in found.values())
        between = sum(one["between"][-1] for one in found.values())
        return {"seconds": seconds / made, "megabytes": between * ratio / 1e6 / made, "ratio": ratio}

    def over_the_link(self, job: dict[str, Any]) -> tuple[jobs.Found, float]:
        """Run a job; return what the ranks found, and the interface's bytes relative to those that minidl counted."""
        if self.args.quick:
            return jobs.launched(4, "train", job), 1.0
        with jobs.TwoHosts("100mbit", self.args.mpich or sys.executable) as hosts:
            found, link = hosts.run(4, "train", job)
        counted = next(one["summary"] for one in found.values() if one.get("summary"))["bytes_between_nodes"]
        return found, link.bytes / counted

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
            reached = f"{one['seconds']:.1f} s, {one['megabytes']:.1f} MB" if one["steps"] else "not reached"
            print(f"{name}, seed {seed}: {one['steps']} steps, {reached}; {one['accuracy']:.2%} at the end", flush=True)
        if all(one["steps"] for one in found):
            seconds[name] = statistics.mean(one["seconds"] for one in found)
            megabytes[name] = statistics.mean(one["megabytes"] for one in found)
            report.row(f"{name}-steps", statistics.mean(one["steps"] for one in found), "steps of a replica")
            report.row(f"{name}-seconds", seconds[name], "s")
            report.row(f"{name}-link", megabytes[name], "MB over the link")
        counted = [bench.store.found[f"hosts-{name}-step"]] if name == "each-step" else found
        report.row(f"{name}-counted", 100 * statistics.mean(one["ratio"] for one in counted),
                   "% of the bytes counted", "95 to 105")  # fmt: skip
    if {"adaptive", "each-step"} <= seconds.keys():
        report.row("adaptive-link-share", 100 * megabytes["adaptive"] / megabytes["each-step"], "% of each-step",
                   "<= 8")  # fmt: skip
        report.row("adaptive-time-share", 100 * seconds["adaptive"] / seconds["each-step"], "% of each-step", "<= 16.7")
    if {"adaptive", "hierarchical-period-4"} <= seconds.keys():
        share = seconds["adaptive"] / seconds["hierarchical-period-4"]
        report.row("adaptive-against-hierarchical", 100 * share, "% of its time", "<= 100")


def compare(report: measure.Report, bench: Bench, other: str, goal: str) -> None:
    """Report the difference between the accuracies of `adaptive` and of another method, over all seeds."""
    differences, messages = [], []
    for seed in range(bench.args.seeds):
        found, against = (bench.simulated(name, seed) for name in ("adaptive", other))
        differences.append(100 * (found["accuracy_average"] - against["accuracy_average"]))
        messages.append(found["messages"] / against["messages"])
        print(f"seed {seed}: adaptive {found['accuracy_average']:.2%}, {other} {against['accuracy_average']:.2%}, "
              f"{messages[-1]:.3f} times its messages", flush=True)  # fmt: skip
    mean, error = interval(differences)
    tie = " A tie: the interval contains 0." if abs(mean) <= error else ""
    print(f"adaptive minus {other}: {mean:+.2f} ± {error:.2f} points.{tie}", flush=True)
    report.row(f"adaptive-minus-{other}", mean, f"± {error:.2f} points", goal)
    report.row(f"messages-of-{other}", 100 * sum(messages) / len(messages), "% (adaptive)",
               "95 to 105" if other == "fixed-period" else "")  # fmt: skip


def equal_samples(report: measure.Report, bench: Bench) -> None:
    compare(report, bench, "each-step", ">= -0.3")


def fixed_period(report: measure.Report, bench: Bench) -> None:
    compare(report, bench, "fixed-period", "> 0")


PARTS = {"two-hosts": two_hosts, "equal-samples": equal_samples, "fixed-period": fixed_period}
QUICK = dict(data_dir="", dataset="digits", net="mlp", batch=32, target=0.5, hosts_steps=40, every=10,
             link_steps=5, hosts_seeds=[1], epochs=2, seeds=2)  # fmt: skip


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
    parser.add_argument("--hosts-methods", nargs="+", choices=ON_HOSTS, default=list(ON_HOSTS))
    parser.add_argument("--hosts-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--hosts-steps", type=int, default=1200, help="two-hosts: steps of a replica")
    parser.add_argument("--link-steps", type=int, default=30, help="two-hosts: steps of `each-step` over the link")
    parser.add_argument("--every", type=int, default=20, help="two-hosts: steps between two tests")
    parser.add_argument("--epochs", type=int, default=2, help="virtual time: epochs of all replicas together")
    parser.add_argument("--seeds", type=int, default=5, help="virtual time: pairs of runs")
    parser.add_argument("--image-seconds", type=float, default=9e-4, help="virtual time: of a gradient")
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
