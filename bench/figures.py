"""Figures of the command line: accuracy of standard runs, and how long a user waits.

    python bench/figures.py                                  digits: 5 seeds, cold and warm start, --help
    python bench/figures.py --data-dir ../shared/data        also MNIST and Fashion-MNIST

Each run is a separate process, started as a user starts it: `python -m minidl.train ... --json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def train(*options: str, cache: str | None = None) -> dict[str, float]:
    """Return the result of one run; its item "wall" is the duration of the command in seconds.

    cache: folder for compiled kernels; None uses the default cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "minidl.train", *options, "--out", f"{folder}/run", "--json", "--quiet"]
        environment = os.environ | ({"XDG_CACHE_HOME": cache} if cache else {})
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        wall = time.perf_counter() - began
    return json.loads(done.stdout.splitlines()[-1]) | {"wall": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder that contains mnist/ and fashion-mnist/")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, digits only")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []

    def add_row(name: str, value: float, unit: str, goal: str) -> None:
        rows.append({"name": name, "value": round(value, 4), "unit": unit, "goal": goal})
        print(f"{name:<44} {value:>9.4g} {unit:<4} goal {goal}", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        add_row("digits, command to prompt, nothing compiled yet", train(cache=cache)["wall"], "s", "< 60")
    runs = [train("--seed", str(seed)) for seed in range(1 if args.quick else args.seeds)]
    add_row("digits, command to prompt, warm (median)", statistics.median(run["wall"] for run in runs), "s", "< 20")
    accuracy = [100 * run["test_accuracy"] for run in runs]
    add_row(f"digits, test accuracy, mean of {len(runs)} splits", statistics.mean(accuracy), "%", ">= 98")
    add_row("digits, test accuracy, worst split", min(accuracy), "%", "")
    waits = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "minidl.train", "--help"], cwd=ROOT, capture_output=True, check=True)
        waits.append(time.perf_counter() - began)
    add_row("--help (median of 5)", statistics.median(waits), "s", "< 0.5")
    if args.data_dir and not args.quick:
        for data, model, goal in (("mnist", "lenet", 99.2), ("mnist", "mlp", 98.3), ("fashion-mnist", "lenet", 92.0)):
            run = train("--data", data, "--model", model, "--data-dir", args.data_dir)
            add_row(f"{model} on {data}, test accuracy", 100 * run["test_accuracy"], "%", f">= {goal}")
            add_row(f"{model} on {data}, images/s", run["images_per_second"], "/s", "")
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
