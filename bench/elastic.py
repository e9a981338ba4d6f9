"""Elastic averaging for real: speed and accuracy of two replicas on this machine, and of four on two hosts.

    python bench/elastic.py --data-dir ../shared/data                 all parts; --only NAME for one part:

    speed       images/s of two replicas of LeNet on MNIST, relative to two replicas that do not communicate (`local`)
    accuracy    test accuracy of the center and of the average after --epochs epochs
    two-hosts   seconds to 98.5%, four replicas on two hosts with a link of 100 Mbit/s (needs root and MPICH)

The methods take turns. The center is beside replica 0, so two processes share two cores; only `ps` has a third process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

from bench import comm
from bench import comm_jobs as jobs

SYNC = ["--method", "sync-easgd", "--overlap"]
# name: (options, processes, goal in % of the speed of `local`)
METHODS: dict[str, tuple[list[str], int, str]] = {
    "local": (["--method", "local"], 2, ""),
    "sync-easgd-3": ([*SYNC, "--center", "beside", "--period", "1"], 2, ">= 75"),
    "sync-easgd-3-period-4": ([*SYNC, "--center", "beside", "--period", "4"], 2, ">= 90"),
    "sync-easgd-copies-period-4": ([*SYNC, "--center", "copies", "--period", "4"], 2, ">= 90"),
    "async-easgd-period-4": (["--method", "async-easgd", "--period", "4"], 2, ">= 75"),
    "eamsgd-period-4": (["--method", "eamsgd", "--period", "4"], 2, ">= 75"),
    "hogwild-easgd-period-4": (["--method", "hogwild-easgd", "--period", "4"], 2, ">= 75"),
    "easgd-period-4": (["--method", "easgd", "--period", "4"], 2, "round robin: replicas wait"),
    "easgd-overlap-period-4": (["--method", "easgd", "--overlap", "--period", "4"], 2, "round robin: replicas wait"),
    "hogwild-sgd": (["--method", "hogwild-sgd"], 2, "at each step"),
    "ps": (["--method", "ps", "--lr", "0.02"], 3, "at each step, three processes"),
}
QUICK = "async-easgd-period-4"  # with --quick, the only method beside `local`
COPIES = [*SYNC, "--center", "copies"]
HOST_METHODS: dict[str, list[str]] = {
    "sync-easgd-period-8": [*COPIES, "--period", "8"],
    "sync-easgd-bf16-period-8": [*COPIES, "--period", "8", "--compress", "bf16"],
    "sync-easgd-int8-period-8": [*COPIES, "--period", "8", "--compress", "int8"],
    "local-sgd-period-8": ["--method", "local-sgd", "--period", "8"],
    "sync-easgd-period-16": [*COPIES, "--period", "16"],
    "sync-easgd-bf16-period-16": [*COPIES, "--period", "16", "--compress", "bf16"],
    "sync-easgd-int8-period-16": [*COPIES, "--period", "16", "--compress", "int8"],
    "local-sgd-period-16": ["--method", "local-sgd", "--period", "16"],
    "allreduce": ["--method", "allreduce"],
}


def methods(args: argparse.Namespace) -> list[str]:
    """Return the names of the methods to measure."""
    return list(args.methods or (["local", QUICK] if args.quick else METHODS))


def run(args: argparse.Namespace, name: str, *more: str) -> jobs.Found:
    """Train with a method of METHODS on this machine. Return what each rank found."""
    options, processes, _ = METHODS[name]
    return jobs.launched(processes, "train", {"argv": [*comm.mnist_options(args), *options, *more]}, timeout=3600)


def speed(report: measure.Report, args: argparse.Namespace) -> None:
    names = list(dict.fromkeys(["local", *methods(args)]))
    runs = {name: partial(run, args, name, "--steps", str(args.steps)) for name in names}
    speeds, waits = jobs.take_turns(runs, args.turns)
    for name in names:
        report.row(f"{name}-speed", statistics.median(speeds[name]), "images/s")
        if name == "local":
            continue
        shares = [100 * a / b for a, b in zip(speeds[name], speeds["local"], strict=True)]
        report.row(f"{name}-of-local", statistics.median(shares), "% of local", METHODS[name][2])
        print(f"{name}: {min(shares):.0f} to {max(shares):.0f}% of local, waiting "
              f"{statistics.median(waits[name]):.1%}", flush=True)  # fmt: skip


def accuracy(report: measure.Report, args: argparse.Namespace) -> None:
    length = ["--steps", str(args.steps)] if args.quick else ["--epochs", str(args.epochs)]
    for name in methods(args):
        found = run(args, name, *length)
        summary = next(one["summary"] for one in found.values() if one.get("summary"))
        center = summary.get("accuracy_center")
        report.row(f"{name}-accuracy", 100 * summary["accuracy_average"], "% (average)", ">= 98.8")
        if center is not None:
            report.row(f"{name}-center-accuracy", 100 * center, "% (center)", ">= 98.8")


def two_hosts(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure the seconds to 98.5%. For `allreduce` see `time_of_synchronous` in bench/comm.py."""
    steps = args.steps if args.quick else args.hosts_steps
    base = [*comm.mnist_options(args), "--schedule", "constant", "--seed", str(args.seed)]
    with jobs.TwoHosts("100mbit", sys.executable) as hosts:
        for name in args.hosts_methods:

            def over_the_link(job: dict[str, Any]) -> jobs.Found:
                found, link = hosts.run(4, "train", job)
                print(f"    {link.bytes / 1e6:.1f} MB on the link", flush=True)
                return found

            argv = [*base, *HOST_METHODS[name]]
            if name == "allreduce":
                result = comm.time_of_synchronous(over_the_link, argv, 0.985, steps, 8, args)
            else:
                argv += ["--steps", str(steps)]
                result = comm.timed(over_the_link, argv, 0.985, 8, args)
            comm.report_time(report, f"{name}-to-98.5", *result, "")


PARTS: jobs.Parts = {"speed": speed, "accuracy": accuracy, "two-hosts": two_hosts}


def main() -> None:
    parser = jobs.arguments(__doc__, PARTS)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all; speed: `local` as well")
    parser.add_argument("--epochs", type=int, default=4, help="accuracy: epochs")
    parser.add_argument("--hosts-methods", nargs="+", choices=list(HOST_METHODS), default=list(HOST_METHODS))
    parser.add_argument("--hosts-steps", type=int, default=500, help="two-hosts: steps of a replica")
    parser.add_argument("--link-steps", type=int, default=30, help="two-hosts: steps of `allreduce` over the link")
    parser.add_argument("--seed", type=int, default=1)
    jobs.run_parts(parser, PARTS)


if __name__ == "__main__":
    main()
