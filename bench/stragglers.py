"""64 virtual replicas, of which some are slow at times: images/s and accuracy of local, allreduce, dpsgd and gossip.

    python bench/stragglers.py --data-dir ../shared/data

Every gradient takes ten times as long with a probability of 2%, so in most steps of 64 replicas one is slow. Replicas
that wait for all others in each step wait for the slowest. `local` exchanges nothing: its images/s are 100%. Time is
virtual, so the load of this machine does not matter; the arithmetic is real. The accuracy is that of the replicas'
average; for local, whose replicas have nothing in common, it is that of the best one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.papers.sc17_findings import interval

RANKS = 64
CLUSTER = """
repeat = true
[devices.core]
flops = 0.5e9      # FLOP/s: a batch of 16 images takes about 0.1 s
jitter = 0.1
[[nodes]]
name = "node"
devices = ["core"]
[between]
alpha = 100e-6     # s
rate = 1e9         # bit/s
[stragglers]
probability = 0.02
factor = 10
"""
METHODS: dict[str, list[str]] = {
    "local": ["--method", "local"],
    "allreduce": ["--method", "allreduce"],
    "dpsgd, one-peer exponential": ["--method", "dpsgd", "--topology", "one-peer-exponential"],
    "gossip": ["--method", "gossip"],
}
GOALS = {"allreduce": "at most 27%", "gossip": "at least 88%"}


def simulate(words: list[str], seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of `python -m minidl.simulate`."""
    data = ["--data-dir", args.data_dir] if args.data_dir else []
    command = [sys.executable, "-m", "minidl.simulate", "--cluster", str(folder / "cluster.toml"),
               "--ranks", str(args.ranks), "--data", args.data, *data, "--model", "mlp", "--batch-size", "16",
               "--epochs", str(args.epochs), "--lr", str(args.lr), "--seed", str(seed), "--threads", "1", "--quiet",
               "--json", *words, "--out", str(folder / f"{words[1]}-{seed}")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="few replicas, the digits")
    args = parser.parse_args()
    if args.quick:
        args.data, args.data_dir, args.ranks, args.epochs, args.seeds = "digits", "", 8, 2, [0, 1]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cluster.toml").write_text(CLUSTER)
        for seed in args.seeds:
            for name, words in METHODS.items():
                found[name].append(simulate(words, seed, Path(folder), args))
                print(f"seed {seed}: {name}: {found[name][-1]['images_per_second']:,.0f} images/s", flush=True)
    print(f"\n{args.ranks} replicas, {args.data}, {args.epochs} epochs, seeds {args.seeds}\n")
    print("| method | images/s of local | accuracy | less that of allreduce, points | goal |")
    print("| --- | --- | --- | --- | --- |")
    for name, results in found.items():
        key = "accuracy_best" if name == "local" else "accuracy_average"
        pairs = zip(results, found["local"], found["allreduce"], strict=True)
        rows = [(one["images_per_second"] / local["images_per_second"], one[key],
                 100 * (one[key] - all_["accuracy_average"])) for one, local, all_ in pairs]  # fmt: skip
        speeds, accuracies, gaps = zip(*rows, strict=True)
        gap = interval(gaps)
        print(f"| {name} | {mean(speeds):.1%} | {mean(accuracies):.2%} | {gap.mean:+.2f} ± {gap.half:.2f} | "
              f"{GOALS.get(name, '')} |")  # fmt: skip


if __name__ == "__main__":
    main()
