"""Shares by speed, for real: how much of the sum of the speeds of unequal replicas does a run reach?

    python bench/balance.py [--workers cpu:1,cpu:0.25] [--batch-size 64] [--steps 100] [--turns 3]

In each turn, `allreduce` trains with equal batches, then with --balance dynamic. The sum is that of `--method local`,
in which no replica waits, before and after the turn. In the middle of the dynamic run, replica 0 is made twice as slow:
another process stops it for half of each 20 ms, and lets it go on (SIGSTOP, SIGCONT).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np

HALF = 0.01  # seconds for which replica 0 is stopped, and then runs
WINDOW = 4  # steps over which a speed is measured after the slow-down


def slow_down(process: int) -> None:
    """Stop a process for half of the time, until it ends."""
    with suppress(ProcessLookupError):
        while os.getppid() == process:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(process, signum)
                time.sleep(HALF)
        os.kill(process, signal.SIGCONT)


def replica(log: Path, slowed: int, arguments: list[str]) -> int:
    """Train as one replica. Write when each step ended, and its images. slowed: the step before the slow-down, or 0."""
    from minidl.train import main
    from minidl.training.trainer import Trainer

    settle, steps = Trainer._settle, []

    def noted(self: Trainer, loss: float, correct: int, images: int) -> None:
        settle(self, loss, correct, images)
        steps.append((time.monotonic(), images, self.replica.seconds))
        if slowed == len(steps) and self.fabric.rank == 0:
            subprocess.Popen([sys.executable, __file__, "slow", str(os.getpid())])

    Trainer._settle = noted  # type: ignore[method-assign]
    with redirect_stdout(None):
        code = main(arguments)
    (log / f"{time.monotonic_ns()}.json").write_text(json.dumps(steps))
    return code


def run(workers: str, batch_size: int, steps: int, *options: str, slowed: int = 0) -> list[np.ndarray]:
    """Train; return for each replica an array (steps, 3): the end of each step, its images, seconds of its gradient."""
    from minidl.comm.launch import local
    from minidl.run.shares import parse_devices

    threads = [one.threads for one in parse_devices(workers)]
    images = len(threads) * batch_size * (steps + 1)  # a run is less than one epoch: it saves nothing in between
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--data", f"synthetic:{images}x32x32x3:10", "--model", "resnet20", "--batch-size", str(batch_size),
                     "--workers", workers, "--steps", str(steps), "--out", f"{folder}/run", "--quiet",
                     *options]  # fmt: skip
        program = [__file__, "replica", folder, str(slowed)]
        assert local.run(arguments, len(threads), threads, quiet=True, program=program) == 0
        return [np.array(json.loads(file.read_text())) for file in sorted(Path(folder).glob("*.json"))]


def speed(each: list[np.ndarray], start: int, stop: int) -> float:
    """Return the images per second of all replicas in steps start to stop of a synchronous run."""
    images = sum(one[start:stop, 1].sum() for one in each)
    return float(images / (each[0][stop - 1, 0] - each[0][start - 1, 0]))


def alone(workers: str, batch_size: int) -> list[float]:
    """Return the images per second of each replica when none waits for another: the fastest first."""
    free = run(workers, batch_size, 24, "--method", "local")
    return sorted((float((len(one) - 4) * batch_size / (one[-1, 0] - one[3, 0])) for one in free), reverse=True)


def main(options: Any) -> None:
    workers, batch_size, steps = options.workers, options.batch_size, options.steps
    half, found = steps // 2, dict[str, list[float]]()
    before = alone(workers, batch_size)
    for turn in range(options.turns):
        equal = run(workers, batch_size, 24, "--method", "allreduce")
        dynamic = run(workers, batch_size, steps, "--method", "allreduce", "--balance", "dynamic", slowed=half)
        after = alone(workers, batch_size)
        speeds = [(one + other) / 2 for one, other in zip(before, after)]
        slower = sum(speeds) - speeds[0] / 2
        later = [100 * speed(dynamic, half + k, half + k + WINDOW) / slower for k in range(steps - half - WINDOW)]
        values = {
            "equal batches, % of the sum": 100 * speed(equal, 4, 24) / sum(speeds),
            "dynamic, % of the sum": 100 * speed(dynamic, 20, half) / sum(speeds),
            "slowed: % of the new sum from the 20th step on": 100 * speed(dynamic, half + 20, steps) / slower,
            "slowed: first step with 90%": next((k for k, part in enumerate(later) if part >= 90), steps),
            "ms of a dynamic step": 1e3 * float(np.diff(dynamic[0][:, 0])[20:half].mean()),
            "sizes of batches": len({int(images) for one in dynamic for images in one[:-1, 1]}),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        print(f"turn {turn}: alone {', '.join(f'{one:.0f}' for one in speeds)} images/s; slowed, % of the new sum by "
              f"{WINDOW} steps: {' '.join(f'{part:.0f}' for part in later[::WINDOW])}", flush=True)  # fmt: skip
        before = after
    print(f"\n{workers}, resnet20, batch {batch_size}: median, and each turn")
    for name, each in found.items():
        print(f"{name:48} {np.median(each):6.1f}   {' '.join(f'{one:.1f}' for one in each)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["replica"]:
        sys.exit(replica(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    if sys.argv[1:2] == ["slow"]:
        slow_down(int(sys.argv[2]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="cpu:1,cpu:0.25")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    main(parser.parse_args())
