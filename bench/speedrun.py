"""CIFAR-10 to 94%: the recipe of --preset speedrun with several seeds, and a t-test of its mean test accuracy.

    python bench/speedrun.py --out speedrun --data-dir ../shared/data                   10 seeds, one replica
    python bench/speedrun.py --out gossip --seeds 3 -- --workers 2 --method gossip      other options of minidl.train
    python bench/speedrun.py --out speedrun --torch                                     also PyTorch, one seed
    python bench/speedrun.py --quick                                                    4 steps on the digits

Each seed is a separate process, `python -m minidl.train`. A second call with the same --out skips the seeds that are
finished, and resumes an unfinished one. The hypothesis that is tested: the mean accuracy is at most --target (one-sided
t-test, scipy). `seconds` is the time from the first step to the last one, without compilation and the final test.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from minidl.run.config import Config, resolve  # noqa: E402

QUICK = ["--data", "digits", "--steps", "4", "--batch-size", "96", "--augment", "translate,alternating-flip"]
Result = dict[str, Any]


def train(folder: Path, seed: int, options: Sequence[str]) -> Result:
    """Return the summary of the run in this folder, which is begun, resumed, or already finished."""
    if (folder / "config.toml").exists():
        argv = ["--resume", str(folder)]
    else:
        argv = ["--preset", "speedrun", "--seed", str(seed), "--out", str(folder), *options]
    command = [sys.executable, "-m", "minidl.train", *argv, "--quiet", "--json"]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            out = process.communicate()[0]
        except KeyboardInterrupt:  # the run has received it, too, and saves its state
            process.communicate()
            raise
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(out.splitlines()[-1]) | {"wall_seconds": time.perf_counter() - began}


def verdict(accuracies: Sequence[float], target: float) -> Result:
    """Return the mean, its standard error, and the p-value of "the mean is at most `target`". NaN for one seed."""
    from scipy import stats

    several = len(accuracies) > 1 and len(set(accuracies)) > 1
    spread = statistics.stdev(accuracies) if several else math.nan
    p = float(stats.ttest_1samp(accuracies, target, alternative="greater").pvalue) if several else math.nan
    return {"mean": statistics.fmean(accuracies), "std": spread, "error": spread / math.sqrt(len(accuracies)), "p": p,
            "seeds": len(accuracies)}  # fmt: skip


def train_pytorch(config: Config, seed: int) -> Result:
    """Train PyTorch's twin with the same recipe: initial weights, batches, rates, Muon in float32, views."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from bench.pytorch_twins import TWINS
    from minidl import data, models, nn, schedules
    from minidl.data.views import averaged

    dataset = data.load(config.data, config.data_dir or None, seed=seed)
    nn.seed(seed)
    ours = models.build(config.model, dataset.input_shape, dataset.classes)
    nn.fit_whitening(ours, dataset.x_train)
    model = TWINS[config.model](dataset.input_shape, dataset.classes)
    state = {name: torch.from_numpy(value) for name, value in ours.state_dict().items()}
    model.load_state_dict(state, strict=False)  # without num_batches_tracked
    model = model.to(memory_format=torch.channels_last)
    trained = [p for p in model.parameters() if p.requires_grad]
    filters, biases = [p for p in trained if p.ndim == 4], [p for p in trained if p.ndim == 1]
    groups = [{"params": [model.head.weight], "lr": config.head_lr, "weight_decay": config.weight_decay},
              {"params": biases, "lr": config.bias_lr, "weight_decay": config.bias_decay}]  # fmt: skip
    others = torch.optim.SGD(groups, momentum=config.sgd_momentum, nesterov=True)
    velocity = [torch.zeros_like(p) for p in filters]
    loader = data.Loader(dataset.x_train, dataset.y_train, config.batch_size, seed,
                         augment=data.Augment(config.augment, dataset.black))  # fmt: skip
    total = config.steps or config.epochs * len(loader)
    schedule, step, began = schedules.build(config.schedule, total), 0, time.perf_counter()
    for epoch in range(-(-total // len(loader))):
        model.train()
        for x, y in loader.epoch(epoch):
            if step == total:
                break
            factor = schedule(step)
            for group, rate in zip(others.param_groups, (config.head_lr, config.bias_lr), strict=True):
                group["lr"] = rate * factor
            model.zero_grad(set_to_none=True)
            images = torch.from_numpy(x).permute(0, 3, 1, 2)
            F.cross_entropy(model(images), torch.from_numpy(y), label_smoothing=config.label_smoothing).backward()
            with torch.no_grad():
                for p, v in zip(filters, velocity, strict=True):
                    _muon(torch, p, v, config.lr * factor, config)
            others.step()
            step += 1
    seconds = time.perf_counter() - began

    def outputs(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    model.eval()
    parts = [slice(start, start + 500) for start in range(0, len(dataset.x_test), 500)]
    right = [averaged(outputs, config.views, dataset.x_test[part]).argmax(1) == dataset.y_test[part] for part in parts]
    return {"test_accuracy": float(np.concatenate(right).mean()), "seconds": seconds, "steps": step}


def _muon(torch: Any, p: Any, velocity: Any, rate: float, config: Config) -> None:
    """Update a filter as minidl/optim/muon.py does with `normalise`."""
    from minidl.optim.muon import EPS, A, B, C

    velocity.mul_(config.momentum).add_(p.grad)
    x = (p.grad + config.momentum * velocity).reshape(len(p), -1)
    x = x / (x.norm() + EPS)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(config.ns_steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    x = (x if wide else x.T).reshape(p.shape)
    p.mul_((1 - rate * config.weight_decay) * len(p) ** 0.5 / p.norm())
    p.sub_(x, alpha=rate * max(1, len(p) / p[0].numel()) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("speedrun"), help="a folder for the runs (default: speedrun)")
    parser.add_argument("--data-dir", default="", help="the folder of CIFAR-10")
    parser.add_argument("--seeds", type=int, default=10, help="how many: first, first + 1, ... (default: 10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--target", type=float, default=0.94, help="the accuracy to exceed (default: 0.94)")
    parser.add_argument("--torch", action="store_true", help="also train PyTorch's twin with the first seed")
    parser.add_argument("--quick", action="store_true", help="two seeds, a few steps on the digits")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    parser.add_argument("options", nargs="*", help="after --: further options of minidl.train")
    args = parser.parse_args()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            args.out, args.seeds, args.options = Path(folder), 2, [*QUICK, *args.options]
            measure(args)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    options = [*args.options, *(["--data-dir", args.data_dir] if args.data_dir else [])]
    runs: list[Result] = []
    for seed in range(args.first, args.first + args.seeds):
        run = train((args.out / f"seed-{seed}").absolute(), seed, options) | {"seed": seed}
        runs.append(run)
        print(f"seed {seed}: {run['test_accuracy']:.2%} after {run['seconds']:.0f} s, {run['steps']} steps", flush=True)
    result = verdict([run["test_accuracy"] for run in runs], args.target)
    result["seconds"] = statistics.fmean(run["seconds"] for run in runs)
    print(f"mean {result['mean']:.3%}, standard error {result['error']:.3%}, p = {result['p']:.2g} that it is at most "
          f"{args.target:.1%}; {result['seconds']:.0f} s per run")  # fmt: skip
    if args.torch:
        result["torch"] = _torch_once(args, options)
        print(f"PyTorch, seed {args.first}: {result['torch']['test_accuracy']:.2%} after "
              f"{result['torch']['seconds']:.0f} s")  # fmt: skip
    if args.json:
        print(json.dumps({**result, "runs": runs}))


def _torch_once(args: argparse.Namespace, options: Sequence[str]) -> Result:
    """Return PyTorch's result, from the folder --out if it is there."""
    from minidl.run.options import parse

    file = args.out / "torch.json"
    if file.exists():
        return json.loads(file.read_text())
    config = resolve(parse(Config, ["--preset", "speedrun", *options]))
    found = train_pytorch(config, args.first)
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
