"""The command line: `python -m minidl.simulate`, also installed as `minidl-simulate`.

Training on a simulated cluster: this process computes for all replicas, and the description of a cluster determines
how long everything would take there (comm/cluster.py, comm/transport/sim.py). Seconds are virtual unless called real.
"""

from __future__ import annotations

import minidl.start  # noqa: F401 (before all others: see there)

# isort: split
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from minidl.cli.arguments import allow, check
from minidl.engine.environment import prepare
from minidl.errors import EXPECTED, ConfigError, explained, printable, report
from minidl.report import at_end
from minidl.resources import MOST_RANKS
from minidl.run.config import Config
from minidl.run.display import left_out
from minidl.run.help import Command, printed, show
from minidl.run.model_file import is_own
from minidl.run.options import HelpWanted, limits, option, options, parse
from minidl.run.signals import Signals, Stopped
from minidl.train import read_config

DESCRIPTION = "Train a neural network on a simulated cluster, with a virtual clock."
EXAMPLES = """
clusters that come with minidl: uniform, two-racks, stragglers, gpu-node-8, gpu-node-4,
knl-aries, infiniband-fdr, ethernet-10g, workstation, two-offices; or write your own
(see comm/cluster.py)

examples:
  python -m minidl.simulate --ranks 16
  python -m minidl.simulate --cluster two-racks --ranks 8 --method gossip --period 4
  python -m minidl.simulate --cluster mine.toml --measure --data mnist --model lenet
  python -m minidl.simulate --cluster mine.toml --ranks 1024 --data mnist --steps 100
  python -m minidl.simulate --resume runs/digits-lenet-1
  python -m minidl.simulate --scenario 4711
"""
# Options of training that do not apply: a simulation is one process, and saves only at its end.
LEFT_OUT = ("workers", "device", "devices", "precision", "max_workers", "parts", "keep", "stall", "join",
            "evaluate")  # fmt: skip


MOST_SEEDS = 2**53
REPEAT = "python -m minidl.simulate --scenario"


def _options() -> type:
    kinds = get_type_hints(Config)
    kept = [(entry.name, kinds[entry.name], field(default=entry.default, metadata=entry.metadata))
            for entry in fields(Config) if entry.name not in LEFT_OUT]  # fmt: skip
    own = [
        ("cluster", str, option("uniform", "a TOML file that describes the cluster, or the name of an example",
                                group="method")),
        ("ranks", int, option(8, "replicas, and servers if the method has any", group="method",
                              limits=limits(min=1, max=MOST_RANKS))),
        ("measure", bool, option(False, "only measure a gradient of this model on this machine, and write its time "
                                 "to the cluster's file", group="command", saved=False)),
        ("scenario", int, option(0, "test minidl: draw a cluster, a method and faults from this seed, train in a "
                                 "temporary folder, and check invariants", group="command", saved=False,
                                 limits=limits(min=0, max=MOST_SEEDS))),
    ]  # fmt: skip
    return make_dataclass("Options", [*kept, *own])


Options = _options()
COMMAND = Command("python -m minidl.simulate", Options, DESCRIPTION, EXAMPLES)
IN_A_SCENARIO = ("scenario", "quiet")
# Options that have an effect with --measure.
MEASURING = ("measure", "cluster", "data", "data_dir", "layout", "model", "model_hash", "conv", "batch_size", "seed",
             "threads", "config", "json", "quiet")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0, 1 if a scenario fails, 2 for an error, 129, 130 or 143 if stopped by a signal.
    """
    given: dict[str, Any] = {}
    with Signals() as signals:
        try:
            words = sys.argv[1:] if argv is None else list(argv)
            given = parse(Options, words)
            check(given)
            if "scenario" in given:
                return _scenario(given, signals)
            if given.get("measure"):
                allow(given, MEASURING, "--measure, which does not train")
            training = {name: value for name, value in given.items() if name in options(Config)}
            if given.get("ranks") == 1:
                training["workers"] = 1
            config = read_config(training, simulated=True)
            if config.reduce == "fast":
                raise ConfigError("reduce fast: a simulation has no MPI that computes sums; expected tree or ring")
            prepare(config.threads)
            from minidl.training.simulated import execute  # slow: imports NumPy and Numba

            signals.prepare()
            result = execute(config, given, signals)
            code = printed(json.dumps(result) if given.get("json") else _text(result), "the result")
            at_end(result.get("out"), given, config.model if is_own(config.model) else "")
        except HelpWanted as wanted:
            return show(COMMAND, wanted.topic)
        except Stopped as stopped:
            stopped.report()
            at_end(stopped.run, given)
            return stopped.code
        except EXPECTED as error:
            code = report(explained(error, "use fewer --ranks or a smaller model"))
            at_end(getattr(error, "run", None), given)
    return code


def _scenario(given: Mapping[str, Any], signals: Signals) -> int:
    """Play a scenario; print its description and how it ended."""
    allow(given, IN_A_SCENARIO, "--scenario, which draws all options from its seed")
    prepare(1)
    from minidl.training.invariants import Violation
    from minidl.training.playing import play
    from minidl.training.scenario import draw

    seed = given["scenario"]
    if not given.get("quiet"):
        print(draw(seed), flush=True)
    signals.prepare()  # from now on, there is a folder to remove
    try:
        outcomes = play(seed).outcomes
    except Violation as violation:
        signals.check()  # a rank may have raised Stopped
        words = " ".join(str(violation).split())
        print(f"minidl: scenario {seed} fails: {printable(words)}; to repeat it: {REPEAT} {seed}", file=sys.stderr)
        return 1
    signals.check()
    print(f"scenario {seed}: {', '.join(outcomes)}", flush=True)
    return 0


def _text(result: dict[str, Any]) -> str:
    """Return the result as readable text."""
    if "seconds_per_image" in result:
        return (f"{result['work']}: {result['seconds_per_image']:.3g} s for an image's gradient, "
                f"written to {result['cluster']}")  # fmt: skip
    center = f"{result['accuracy_center']:.2%} of the center, " if "accuracy_center" in result else ""
    return "\n".join([
        f"test accuracy {result['accuracy_average']:.2%} of the replicas' average, {center}"
        f"{result['accuracy_best']:.2%} of the best, {result['accuracy_worst']:.2%} of the worst; "
        f"test loss {result['test_loss']:.4f}",
        f"{result['workers']} replicas, {result['method']}, {result['steps']:,} steps: {result['seconds']:.4g} virtual "
        f"s, {result['wait_fraction']:.1%} of it waiting; {result['bytes_sent'] / 1e6:,.1f} MB in "
        f"{result['messages']:,} messages, {result['bytes_between_nodes'] / 1e6:,.1f} MB between nodes"
        f"{left_out(result)}",
        f"consensus distance {result['consensus_distance']:.4f} (how far the replicas' weights are from their average, "
        f"relative to it); simulated in {result['real_seconds']:.1f} real s, "
        f"{result['events']:,} events; all of it in {result['out']}",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
