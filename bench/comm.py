"""Communication of replicas: speed, time to an accuracy, and bitwise reproducibility.

    python bench/comm.py --data-dir ../shared/data                    all parts; --only NAME for one part:

    publish     publish a vector of 100 MB and mix it in another process, compared with one process that does both
    torn        count torn vectors (read while they were overwritten): all ranks exchange vectors with checksums as fast
                as possible
    gossip      images/s and waiting time of two gossiping replicas, compared with two independent ones
    ddp         images/s, and seconds to 99% on MNIST, compared with PyTorch's DistributedDataParallel and decent-dp
    two-hosts   seconds to 98.5% on MNIST, four replicas on two hosts with a link of 100 Mbit/s (needs root, MPICH)
    sim         cost of a simulation: time per event, and memory of 4,096 replicas
    bits        bitwise comparison of a run's losses on a virtual clock, in shared memory and under mpiexec

Accuracies are test accuracies of the average of the replicas. They are computed after the run, from copies of the
weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

import numpy as np

from bench import comm_jobs as jobs

LENET = ["--data", "mnist", "--model", "lenet", "--batch-size", "64", "--lr", "0.05"]


# -- moving vectors ----------------------------------------------------------------------------------------------------


def publish(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure publishing and mixing one vector between two processes, relative to one process."""
    size = 8_000_000 if args.quick else 100_000_000
    times = jobs.launched(2, "handoff", {"bytes": size, "turns": 5 if args.quick else 20})[0]
    middle = {name: statistics.median(each) for name, each in times.items()}
    for name in ("between", "both"):
        alone = "alone" if name == "between" else "both_alone"
        moved = 5 * size * (1 if name == "between" else 2)  # a copy reads 1 vector, writes 1; a mix reads 2, writes 1
        pairs = [b / a for a, b in zip(times[name], times[alone])]
        print(f"publish and mix {size / 1e6:.0f} MB, {name}: {1e3 * middle[name]:.2f} ms "
              f"({moved / middle[name] / 1e9:.1f} GB/s); in one process {1e3 * middle[alone]:.2f} ms; median of pairs "
              f"{statistics.median(pairs):.0%}", flush=True)  # fmt: skip
        title = "publish-and-mix" if name == "between" else "publish-and-mix-both-ways"
        report.row(title, 100 * statistics.median(pairs), "% of one process", ">= 80")


def torn(report: measure.Report, args: argparse.Namespace) -> None:
    """Count torn vectors among many exchanges."""
    goal = 2_000 if args.quick else 1_000_000
    for ranks, elements, exchanges in ((2, 1000, 0.9 * goal), (3, 1000, 0.1 * goal), (2, 1_000_000, 0.005 * goal)):
        counts = jobs.launched(ranks, "torn", {"elements": elements, "exchanges": exchanges}).values()
        names = ("seen", "torn", "published", "sent", "reads_missed")
        total = {name: sum(count[name] for count in counts) for name in names}
        print(f"torn: {ranks} ranks, up to {elements} elements: {total}", flush=True)
        report.row(f"exchanges-{ranks}-ranks-{elements}", total["seen"], "checked", "")
        report.row(f"torn-{ranks}-ranks-{elements}", total["torn"], "vectors", "0")


# -- two replicas on this machine --------------------------------------------------------------------------------------

# name: (options, goal in % of the speed of `local`)
GOSSIPS: dict[str, tuple[list[str], str]] = {
    "local": (["--method", "local"], ""),
    "period-8": (["--method", "gossip", "--period", "8"], ">= 95"),
    "period-1": (["--method", "gossip", "--period", "1"], ">= 80"),
}


def gossip(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure images/s and the waiting time of gossip, alternating with `local` (independent replicas)."""
    argv = [*mnist_options(args), "--steps", str(args.steps)]
    runs = {
        name: partial(jobs.launched, 2, "train", {"argv": [*argv, *options]}) for name, (options, _) in GOSSIPS.items()
    }
    speeds, waits = jobs.take_turns(runs, args.turns)
    for name, (_, goal) in GOSSIPS.items():
        report.row(f"gossip-{name}-speed", statistics.median(speeds[name]), "images/s")
        if name != "local":
            shares = [100 * a / b for a, b in zip(speeds[name], speeds["local"])]
            report.row(f"gossip-{name}", statistics.median(shares), "% of local", goal)
            report.row(f"gossip-{name}-waiting", 100 * statistics.median(waits[name]), "% of time", "< 1")


def mnist_options(args: argparse.Namespace) -> list[str]:
    """Return the options of a run of LeNet on MNIST."""
    return [*LENET, *(["--data-dir", args.data_dir] if args.data_dir else [])]


OURS = {
    "allreduce": ["--method", "allreduce"],
    "dpsgd": ["--method", "dpsgd"],
    "gossip": ["--method", "gossip", "--period", "8"],
}


def ddp(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure images/s in turns, then the time to the target accuracy in a complete run of each method."""
    from bench import ddp_twin

    steps = args.steps
    settings = {"every": 0, "lr": 0.05, "batch": 64, "data_dir": args.data_dir, "target": args.target, "steps": steps}
    last, contiguous = {**settings, "channels_last": True}, {**settings, "channels_last": False}
    pair = {**contiguous, "topology": "complete"}
    theirs: dict[str, Twin] = {
        "ddp, channels last": ("ddp", last, sys.executable),
        "ddp, contiguous": ("ddp", contiguous, sys.executable),
        "ddp, defaults": ("ddp", {**contiguous, "tuned": False}, sys.executable),
        "two alone": ("alone", last, sys.executable),
    }
    if args.decent_dp:
        theirs["decent-dp"] = ("decent-dp", pair, args.decent_dp)
    speeds: dict[str, list[float]] = {name: [] for name in (*OURS, *theirs)}
    for turn in range(args.turns):
        for name in speeds:
            if name in OURS:
                argv = [*mnist_options(args), *OURS[name], "--steps", str(steps)]
                found = jobs.launched(2, "train", {"argv": argv})
                speeds[name].append(sum(one["speed"] for one in found.values()))
            elif turn < 2 or name != "two alone":
                kind, options, python = theirs[name]
                speeds[name].append(sum(one["speed"] for one in ddp_twin.run(kind, options, python)))
            print(f"{name}: {speeds[name][-1]:,.0f} images/s", flush=True)
    middle = {name: statistics.median(each) for name, each in speeds.items()}
    for name, value in middle.items():
        report.row(f"speed-{row_name(name)}", value, "images/s")
    best = max((name for name in theirs if name.startswith("ddp")), key=middle.__getitem__)
    for name in OURS:
        report.row(f"{name}-against-ddp", middle[name] / middle[best], "x images/s", ">= 3")
        if args.decent_dp:
            report.row(f"{name}-against-decent-dp", middle[name] / middle["decent-dp"], "x images/s", ">= 3")
    if args.epochs:
        others = {"decent-dp": theirs["decent-dp"]} if args.decent_dp else {}
        time_to_accuracy(report, args, {"ddp": theirs[best], **others})


Twin = tuple[str, dict[str, Any], str]  # kind, options, Python


def time_to_accuracy(report: measure.Report, args: argparse.Namespace, theirs: Mapping[str, Twin]) -> None:
    """Measure the seconds to a test accuracy with a cosine schedule over --epochs, tested every 30 steps."""
    from bench import ddp_twin

    total = args.epochs * (60_000 // 128)
    for name, options in OURS.items():
        argv = [*mnist_options(args), *options, "--steps", str(total)]
        seconds, final = timed(lambda job: jobs.launched(2, "train", job), argv, args.target, 30, args)
        report_time(report, f"{name}-to-{100 * args.target:g}", seconds, final, "<= ddp's")
    for name, (kind, options, python) in theirs.items():
        found = ddp_twin.run(kind, {**options, "steps": total, "every": 30}, python)[0]
        report_time(report, f"{name}-to-{100 * args.target:g}", found["reached"] or None, found["accuracy"], "")


def report_time(report: measure.Report, name: str, seconds: float | None, final: float, goal: str) -> None:
    """Add a row with the seconds to the target accuracy, or with the final accuracy if the target was not reached."""
    if seconds is None:
        print(f"{name}: not reached, {final:.2%} at the end", flush=True)
        report.row(f"{name}-not-reached", 100 * final, "% at the end", goal)
    else:
        print(f"{name}: {seconds:.2f} s (then {final:.2%})", flush=True)
        report.row(name, seconds, "s", goal)


class AverageTester:
    """Tests the average of several replicas: `tester(thetas)` returns its accuracy on `args.dataset` (MNIST)."""

    def __init__(self, args: argparse.Namespace) -> None:
        from minidl import data, models, nn
        from minidl.comm.replica import Engine
        from minidl.run.config import resolve

        name, net = getattr(args, "dataset", "mnist"), getattr(args, "net", "lenet")
        config = resolve({"data": name, "model": net} | ({"data_dir": args.data_dir} if args.data_dir else {}))
        self.data = data.load(name, config.data_dir or None, 0.0, 0)
        nn.seed(0)
        model = models.build(net, self.data.input_shape, self.data.classes)
        self.engine = Engine(model, config)

    def __call__(self, thetas: Sequence[np.ndarray]) -> float:
        from minidl.run.evaluation import evaluate
        from minidl.training.replica_state import mean_and_distance

        engine = self.engine
        engine.arena.theta[:], _ = mean_and_distance(thetas)
        engine.arena.touch()
        return evaluate(engine.model, self.data.x_test, self.data.y_test, prediction=engine.prediction).accuracy


def timed(
    start: Callable[[dict[str, Any]], jobs.Found], argv: list[str], target: float, every: int, args: argparse.Namespace,
) -> tuple[float | None, float]:  # fmt: skip
    """Run training; return (seconds until the average reaches the target, None if never; accuracy at the end)."""
    reached, final = until(start, argv, target, every, args)
    return (reached[0] if reached else None), final


def until(
    start: Callable[[dict[str, Any]], jobs.Found], argv: list[str], target: float, every: int, args: argparse.Namespace,
) -> tuple[tuple[float, int] | None, float]:  # fmt: skip
    """Run training; return ((seconds, steps of a replica) until the target, None if never; accuracy at the end).

    start: a function that runs the job with given options. every: number of steps between two copies of a replica's
    weights. The k-th average is that of the replicas' k-th copies. Its time runs from the first step of any replica
    until all replicas have made their k-th copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = start({"argv": argv, "every": every, "keep": folder})
        copies = [np.load(Path(folder) / f"{rank}.npy", mmap_mode="r") for rank in sorted(found)]
        test, ranks = AverageTester(args), [found[rank] for rank in sorted(found)]
        began, reached = min(rank["began"] for rank in ranks), None
        for k in range(min(map(len, copies))):
            if test([copy[k] for copy in copies]) >= target:
                reached = max(rank["times"][k] for rank in ranks) - began, (k + 1) * every
                print(f"    reached after {reached[1]} steps of {len(ranks)} replicas", flush=True)
                break
        return reached, test([copy[-1] for copy in copies])


# -- two hosts ---------------------------------------------------------------------------------------------------------

HOST_METHODS: dict[str, list[str]] = {  # the last three wait for other replicas
    "hierarchical": ["--method", "gossip", "--peer", "hierarchical", "--period", "4", "--inside", "0.9"],
    "gossip-mass": ["--method", "gossip", "--peer", "hierarchical", "--period", "4", "--mix", "mass"],
    "local": ["--method", "local"],
    "local-sgd": ["--method", "local-sgd", "--period", "32"],
    "one-peer-exponential": ["--method", "dpsgd", "--topology", "one-peer-exponential"],
    "allreduce": ["--method", "allreduce"],
}
EACH_STEP = ("one-peer-exponential", "allreduce")  # methods that use the link in every step


def two_hosts(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure the seconds to the target accuracy for four replicas on two hosts.

    The methods of EACH_STEP wait for the link in each step. For these methods, a run in shared memory, which computes
    the same bits, counts the steps to the target. A run over the link, of at most --link-steps steps, measures the time
    of a step. The reported time is the product of both.
    """
    steps, every = (20, 10) if args.quick else (args.hosts_steps, 10)
    base = [*mnist_options(args), "--schedule", "constant", "--seed", "1"]
    goal = args.hosts_target
    if not args.quick and not args.no_single:
        argv = [*base, "--steps", str(3 * steps)]
        found = timed(lambda options: jobs.alone("train", options), argv, goal, every, args)
        report_time(report, f"one-replica-to-{100 * goal:g}", found[0], found[1], "")
    with jobs.TwoHosts(args.rate, args.mpich or sys.executable) as hosts:
        for shards in args.shards:
            for name in args.hosts_methods or HOST_METHODS:
                argv = [*base, "--shards", shards, *HOST_METHODS[name]]
                traffic: list[Any] = []

                def over_the_link(options: dict[str, Any], traffic: list[Any] = traffic) -> jobs.Found:
                    found, link = hosts.run(4, "train", options)
                    traffic += [link, found[0]["summary"]["bytes_between_nodes"]]
                    return found

                title = f"{name}-{shards.partition(':')[0]}"
                if name in EACH_STEP:
                    result = time_of_synchronous(over_the_link, argv, goal, 2 if args.quick else steps, every, args)
                else:
                    result = timed(over_the_link, [*argv, "--steps", str(steps)], goal, every, args)
                report_time(report, f"{title}-to-{100 * goal:g}", *result, "")
                link, counted = traffic
                print(f"    on the link {link.bytes / 1e6:.1f} MB ({link.payload / 1e6:.1f} without headers); minidl "
                      f"counted {counted / 1e6:.1f}", flush=True)  # fmt: skip
                report.row(f"{title}-link", 100 * link.bytes / counted, "% of the bytes counted", "95 to 105")


def time_of_synchronous(
    over_the_link: Callable[[dict[str, Any]], jobs.Found], argv: list[str], target: float, steps: int, every: int,
    args: argparse.Namespace,
) -> tuple[float | None, float]:  # fmt: skip
    """Return (seconds to the target accuracy over the link, None if never; accuracy at the end). See `two_hosts`."""
    needed, final = steps_to(argv, target, steps, every, args)
    made = min(needed or steps, args.link_steps or steps)
    found = over_the_link({"argv": [*argv, "--steps", str(made)], "every": 1 if made < every else every})
    seconds = max(one["times"][-1] for one in found.values()) - min(one["began"] for one in found.values())
    per_step = seconds / (len(found[0]["times"]) * (1 if made < every else every))
    print(f"    {needed} steps of {per_step:.2f} s, {made} made over the link", flush=True)
    return (needed * per_step if needed else None), final


def steps_to(
    argv: list[str], target: float, steps: int, every: int, args: argparse.Namespace
) -> tuple[int | None, float]:  # fmt: skip
    """Make a synchronous run. Return (steps until the average reaches the target, None if never; final accuracy)."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"argv": [*argv, "--steps", str(steps)], "every": min(every, steps), "keep": folder}
        found = jobs.launched(4, "train", options)
        copies = [np.load(Path(folder) / f"{rank}.npy", mmap_mode="r") for rank in sorted(found)]
        test = AverageTester(args)
        for k in range(len(copies[0])):
            if test([copy[k] for copy in copies]) >= target:
                return (k + 1) * options["every"], test([copy[-1] for copy in copies])
        return None, test([copy[-1] for copy in copies])


# -- simulations -------------------------------------------------------------------------------------------------------


def sim(report: measure.Report, args: argparse.Namespace) -> None:
    """Measure the time per event of a simulation and the memory of many replicas."""
    from bench.comm_sim import event_cost

    ranks = 64 if args.quick else 1024
    for method in ("gossip", "dpsgd", "allreduce"):
        event_cost(4, method, 2)  # compiles
        micros, events = event_cost(ranks, method, 2 if args.quick else 5)
        print(f"sim: {ranks} replicas, {method}: {events:,} events, {micros:.1f} us each", flush=True)
        report.row(f"sim-event-{method}", micros, "us", "<= 30")
    many = 128 if args.quick else 4096
    command = [sys.executable, "-m", "bench.comm_sim", str(many)]  # a separate process, to measure its peak memory
    done = subprocess.run(command, env=jobs.environment(1), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"sim: {many} replicas of {found['parameters']:,} parameters, 3 steps: {found['peak'] / 1e9:.2f} GB "
          "at the peak, "
          f"{found['events']:,} events in {found['real_seconds']:.1f} s", flush=True)  # fmt: skip
    report.row("sim-memory", found["peak"] / 2**30, "GiB", "< 8")


def row_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


# -- the same bits -----------------------------------------------------------------------------------------------------


def bits(report: measure.Report, args: argparse.Namespace) -> None:
    """Compare the losses of runs with different transports and numbers of threads bit by bit."""
    from minidl.engine.jit import set_threads, threads

    steps = 10 if args.quick else 100
    for method in ("dpsgd", "allreduce"):
        argv = ["--data", "digits", "--model", "lenet", "--batch-size", "16", "--steps", str(steps), "--method", method]
        before, runs = threads(), {}
        for count in (1, 2):
            set_threads(min(count, before))
            runs[f"sim, {count} threads"] = jobs.simulated(4, argv)
            runs[f"shm, {count} threads"] = jobs.launched(4, "train", {"argv": argv}, count)
            if jobs.mpiexec():
                runs[f"mpi, {count} threads"] = jobs.mpi(4, "train", {"argv": argv}, count)
        set_threads(before)
        expected = jobs.losses(next(iter(runs.values())))
        same = [name for name, run in runs.items() if jobs.losses(run) == expected]
        print(f"bits, {method}, {steps} steps: the same in {', '.join(same)}", flush=True)
        report.row(f"bits-{method}", 100 * len(same) / len(runs), "% of runs agree", "100")


PARTS: jobs.Parts = {
    "publish": publish, "torn": torn, "gossip": gossip, "ddp": ddp, "two-hosts": two_hosts, "sim": sim, "bits": bits,
}  # fmt: skip


def main() -> None:
    parser = jobs.arguments(__doc__, PARTS)
    parser.add_argument("--epochs", type=int, default=3, help="ddp: epochs of the runs to an accuracy; 0: none")
    parser.add_argument("--target", type=float, default=0.99, help="ddp: target accuracy")
    parser.add_argument("--decent-dp", metavar="PYTHON", help="a Python with decent-dp installed")
    hosts = parser.add_argument_group("two-hosts")
    hosts.add_argument("--mpich", metavar="PYTHON", help="a Python with MPICH in the same folder (default: this one)")
    hosts.add_argument("--rate", default="100mbit", help="rate of the link")
    hosts.add_argument("--hosts-target", type=float, default=0.985, help="target accuracy of the average")
    hosts.add_argument("--hosts-steps", type=int, default=500, help="steps of a replica")
    hosts.add_argument("--link-steps", type=int, default=0, help="limit for methods that wait in each step; 0: none")
    hosts.add_argument("--hosts-methods", nargs="+", choices=list(HOST_METHODS))
    hosts.add_argument("--no-single", action="store_true", help="omit the run of a single replica")
    hosts.add_argument("--shards", nargs="+", default=["iid", "skewed:0.3"])
    jobs.run_parts(parser, PARTS)


if __name__ == "__main__":
    main()
