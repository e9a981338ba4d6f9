"""Train each model on each data set with the presets (minidl/run/presets.py), and print a table for RESULTS.md.

    python bench/presets.py --out presets --data-dir ../shared/data               4 models on 4 data sets
    python bench/presets.py --out presets --data-dir ../shared/data --steps 200   also the first steps of deep ResNets

Each run is a separate process with the default options of its data set and model. A short run before it measures the
speed. If the preset's epochs would take longer than --minutes, the run gets as many epochs as fit, and the schedule
is for this number. Results are kept in results.json in the folder --out. A second call skips the runs in this file,
and resumes an unfinished run.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from minidl.run.config import resolve  # noqa: E402
from minidl.run.folder import write  # noqa: E402
from minidl.run.presets import preset  # noqa: E402

DATA = {"digits": 1438, "mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}  # training images
MODELS = ("mlp", "lenet", "vgg", "resnet20")
DEEP = ("resnet32", "resnet44", "resnet56", "resnet110")
PILOT = 40  # steps of the run that measures the speed
Result = dict[str, Any]


def train(argv: list[str], seconds: float) -> Result:
    """Run a training to its end, or for a number of seconds. Returns its result, or {"error": its message}."""
    command = [sys.executable, "-m", "minidl.train", *argv, "--quiet", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate()
    if process.returncode:
        return {"error": (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
    return json.loads(out.splitlines()[-1])


def measure(data: str, model: str, args: argparse.Namespace) -> Result:
    """Train with the preset, or with as many epochs as fit into --minutes."""
    folder = args.out / f"{data}-{model}"
    base = ["--data", data, "--model", model, *_common(args, data)]
    epochs = resolve({"data": data, "model": model}).epochs
    limit = 60 * args.minutes
    if (folder / "config.toml").exists():
        return {**train(["--resume", str(folder)], 2 * limit), "preset_epochs": epochs}
    with tempfile.TemporaryDirectory() as pilot_folder:
        pilot = train([*base, "--steps", str(PILOT), "--out", f"{pilot_folder}/run"], limit)
    if "error" in pilot:
        return {**pilot, "preset_epochs": epochs}
    fit = max(1, min(epochs, int(limit * pilot["images_per_second"] / DATA[data])))
    found = train([*base, "--epochs", str(fit), "--out", str(folder)], 2 * limit)
    return {**found, "preset_epochs": epochs}


def first_steps(model: str, args: argparse.Namespace) -> Result:
    """Train for --steps steps on CIFAR-10 with the preset: enough to see whether it diverges."""
    folder = args.out / f"first-{model}"
    if (folder / "config.toml").exists():
        return train(["--resume", str(folder)], 3600.0)
    argv = ["--data", "cifar10", "--model", model, "--steps", str(args.steps), "--out", str(folder)]
    return train([*argv, *_common(args, "cifar10")], 3600.0)


def _common(args: argparse.Namespace, data: str) -> list[str]:
    return (["--data-dir", args.data_dir] if args.data_dir and data != "digits" else []) + (
        ["--workers", str(args.workers)] if args.workers else [])  # fmt: skip


def table(results: dict[str, Result]) -> list[str]:
    """Return the results as lines of Markdown."""
    lines = ["| data | model | preset | epochs | test accuracy | seconds |", "|---|---|---|---|---|---|"]
    for data in DATA:
        for model in MODELS:
            if found := results.get(f"{data} {model}"):
                lines.append(_row(data, model, found))
    deep = [model for model in DEEP if f"first {model}" in results]
    if deep:
        lines += ["", "| model | first steps on CIFAR-10 | training loss |", "|---|---|---|"]
        for model in deep:
            found = results[f"first {model}"]
            loss = f"{found['train_loss']:.3f}" if "train_loss" in found else found["error"]
            lines.append(f"| {model} | {found.get('steps', '')} | {loss} |")
    return lines


def _row(data: str, model: str, found: Result) -> str:
    config = resolve({"data": data, "model": model})
    values = preset(vars(config))
    words = ", ".join(f"{name} {_text(values[name])}" for name in ("lr", "schedule", "batch_size", "augment")
                      if name in values)  # fmt: skip
    if "error" in found:
        return f"| {data} | {model} | {words} | | {found['error']} | |"
    return (f"| {data} | {model} | {words} | {found['epochs']} of {found['preset_epochs']} | "
            f"{found['test_accuracy']:.2%} | {found['seconds']:.0f} |")  # fmt: skip


def _text(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else f"{value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs and of results.json")
    parser.add_argument("--data-dir", default="", help="folder that contains mnist/, fashion-mnist/, cifar10/")
    parser.add_argument("--minutes", type=float, default=10.0, help="the most for a run (default: 10)")
    parser.add_argument("--workers", type=int, default=0, help="replicas (default: minidl's)")
    parser.add_argument("--steps", type=int, default=0, help="also train the deep ResNets for this many steps")
    parser.add_argument("--only", default="", help='one combination, such as "mnist vgg"')
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.data_dir = args.data_dir and str(Path(args.data_dir).absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / "results.json"
    results: dict[str, Result] = json.loads(state.read_text()) if state.exists() else {}
    jobs = [(f"{data} {model}", measure, (data, model, args)) for data in DATA for model in MODELS]
    jobs += [(f"first {model}", first_steps, (model, args)) for model in DEEP if args.steps]
    for name, job, arguments in jobs:
        if name not in results and args.only in ("", name):
            results[name] = job(*arguments)  # type: ignore[operator]
            print(f"{name}: {results[name]}", flush=True)
            write(state, json.dumps(results, indent=1).encode())
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
