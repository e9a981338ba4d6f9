"""Accuracy of SPARTA and of sparse differences against DiLoCo, when each sends 1% of the bytes of per-step exchange.

    python bench/outer.py --data-dir ../shared/data

    diloco        all replicas agree every 100 steps, as published. In each step: local SGD with period 1
    diloco-mild   the same with a smaller outer momentum: 5 outer steps are few for a momentum of 0.9
    local-sgd     the same without an outer optimizer
    sparta        a random 1% of the weights in each step
    sparse        D-PSGD on a ring, with codes of the largest differences. In each step: D-PSGD on a ring

Four replicas of LeNet (--model mlp: of an MLP) train on Fashion-MNIST in virtual time. For each method the learning
rate with the highest mean accuracy on the seeds of TUNING is chosen; then it trains with the seeds of PAIRED. The
difference to DiLoCo with the same seed is a pair: the result is the mean of the pairs, with a 95% interval (Student's
t).

Each training is a line in --out. A second start continues where the first one was stopped, and several processes share
the work (papers/sc17_store.py).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

from bench.papers.sc17_findings import interval
from bench.papers.sc17_store import Job, Result, Store, work
from minidl import simulate

RANKS, PERIOD = 4, 100
RATES = ("0.025", "0.05", "0.1")
TUNING, PAIRED = (100, 101), tuple(range(15))
PER_STEP = "--method local-sgd --period 1"
# name: (options, options of the exchange in each step)
METHODS: dict[str, tuple[str, str]] = {
    "diloco": ("--method diloco --period {period}", PER_STEP),
    "sparta": ("--method sparta --mask {share}", PER_STEP),
    # A code has 6 bytes for each number that is sent, and a model 4 bytes for each of its numbers.
    "sparse": ("--method dpsgd --topology ring --compress topk:{code}", "--method dpsgd --topology ring"),
    "diloco-mild": ("--method diloco --period {period} --outer-momentum 0.5", PER_STEP),
    "local-sgd": ("--method local-sgd --period {period}", PER_STEP),
}
AGREEING = ("diloco", "diloco-mild", "local-sgd")  # the others are compared with each of them
GOAL = 0.5  # points


class Bench:
    """The trainings, and what they found. steps: of each replica."""

    def __init__(self, args: argparse.Namespace) -> None:
        quick = args.quick
        self.steps, period = (20, 10) if quick else (500, PERIOD)
        chosen = (RATES[1:], TUNING[:1], PAIRED[:2]) if quick else (RATES, args.tuning, PAIRED)
        self.rates, self.tuning, self.paired = chosen
        task = "--data digits --model mlp --batch-size 16" if quick else (
            f"--data fashion-mnist --data-dir {args.data_dir} --model {args.model} --batch-size 64")  # fmt: skip
        self.common = [*task.split(), "--ranks", str(RANKS), "--quiet", "--json"]
        values = {"period": period, "share": 1 / period, "code": round(2 / (3 * period), 6)}
        self.options = {name: METHODS[name][0].format(**values).split() for name in args.methods}
        file = args.out / ("quick" if quick else args.model) / "results.jsonl"
        self.store = Store(file, lambda key: print(key, flush=True))

    def train(self, options: Sequence[str]) -> Result:
        """Train; return what the bench needs of the result."""
        output = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
            code = simulate.main([*self.common, *options, "--out", f"{folder}/run"])
        if code:
            raise SystemExit(f"{' '.join(options)} ended with exit code {code}")
        found = json.loads(output.getvalue().splitlines()[-1])
        return {name: found[name] for name in ("accuracy_average", "bytes_sent", "steps", "seconds", "real_seconds")}

    def job(self, key: str, *options: str) -> tuple[str, Job]:
        return key, lambda: self.train(options)

    def with_rate(self, name: str, rate: str, seed: int) -> tuple[str, Job]:
        given = [*self.options[name], "--steps", str(self.steps), "--lr", rate, "--seed", str(seed)]
        return self.job(f"{name}-{rate}-{seed}", *given)

    def jobs(self) -> Iterator[tuple[str, Job]]:
        """Yield all trainings that are possible now: the paired seeds follow the choice of a rate."""
        for name in self.options:
            yield self.job(f"{name}-each-step", *METHODS[name][1].split(), "--steps", "5")
            yield from (self.with_rate(name, rate, seed) for rate in self.rates for seed in self.tuning)
            if rate := self.rate(name):
                yield from (self.with_rate(name, rate, seed) for seed in self.paired)

    def pending(self) -> list[tuple[str, Job]]:
        return [(key, job) for key, job in self.jobs() if key not in self.store.found]

    def rate(self, name: str) -> str:
        """Return the learning rate with the highest mean accuracy, or "" while trainings are missing."""
        found = {rate: [self.store.found.get(f"{name}-{rate}-{seed}") for seed in self.tuning] for rate in self.rates}
        if any(one is None for some in found.values() for one in some):
            return ""
        return max(found, key=lambda rate: statistics.mean(one["accuracy_average"] for one in found[rate] if one))

    def accuracies(self, name: str) -> list[float]:
        """Return the accuracies with the paired seeds, in %."""
        rate = self.rate(name)
        return [100 * self.store.found[f"{name}-{rate}-{seed}"]["accuracy_average"] for seed in self.paired]

    def share(self, name: str) -> float:
        """Return the bytes of a step in % of those of an exchange in each step."""
        one = self.store.found[f"{name}-{self.rate(name)}-{self.paired[0]}"]
        whole = self.store.found[f"{name}-each-step"]
        return 100.0 * (one["bytes_sent"] / one["steps"]) / (whole["bytes_sent"] / whole["steps"])


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).parent.parent.parent / "shared" / "data")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--tuning", nargs="+", type=int, default=TUNING, help="seeds with which the rate is chosen")
    parser.add_argument("--model", choices=("lenet", "mlp"), default="lenet")
    parser.add_argument("--out", type=Path, default=Path("runs/outer"), help="folder of the results")
    args = parser.parse_args()
    args.data_dir, args.out = args.data_dir.resolve(), args.out.resolve()
    report, bench = measure.Report(args), Bench(args)
    work(bench.store, bench.pending)
    found = {name: bench.accuracies(name) for name in args.methods}
    for name, accuracies in found.items():
        report.row(f"{name}-accuracy", statistics.mean(accuracies), "%")
        report.row(f"{name}-rate", float(bench.rate(name)), "learning rate")
        report.row(f"{name}-bytes", bench.share(name), "% of an exchange in each step", "<= 1")
    for name, other in itertools.product(sorted(found.keys() - AGREEING), sorted(found.keys() & AGREEING)):
        mean, half = interval([one - base for one, base in zip(found[name], found[other], strict=True)])
        verdict = "better than" if mean > half else "worse than" if mean < -half else "a tie with"
        print(f"{name} is {verdict} {other}: {mean:+.2f} +- {half:.2f} points; the goal, at most {GOAL} worse, is "
              f"{'reached' if mean - half >= -GOAL else 'not shown'}", flush=True)  # fmt: skip
    report.finish()


if __name__ == "__main__":
    main()
