"""Shares by speed, for real: how much of the sum of the speeds of unequal replicas does a run reach?

    python bench/balance.py [--workers cpu:1,cpu:0.25] [--batch-size 64] [--steps 100]

The sum is that of `--method local`, in which no replica waits. Then come `allreduce` with equal batches, and with
--balance dynamic. In the middle of the last run, replica 0 is made twice as slow: another process stops it for half of
each 20 ms, and lets it go on (SIGSTOP, SIGCONT).
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


def main(options: Any) -> None:
    workers, batch_size, steps = options.workers, options.batch_size, options.steps
    free = run(workers, batch_size, 24, "--method", "local")
    speeds = sorted((float((len(one) - 4) * batch_size / (one[-1, 0] - one[3, 0])) for one in free), reverse=True)
    whole = sum(speeds)
    print(f"{workers}, resnet20, batch {batch_size}: {', '.join(f'{one:.0f}' for one in speeds)} images/s alone")
    equal = run(workers, batch_size, 24, "--method", "allreduce")
    print(f"allreduce, equal batches: {speed(equal, 4, 24) / whole:.1%} of the sum")
    found = run(workers, batch_size, steps, "--method", "allreduce", "--balance", "dynamic", slowed=steps // 2)
    half = steps // 2
    milliseconds = 1e3 * np.diff(found[0][:, 0])[20:half].mean()
    print(f"dynamic: {speed(found, 20, half) / whole:.1%} of the sum, steps of {milliseconds:.0f} ms, "
          f"{len({int(images) for one in found for images in one[:-1, 1]})} sizes of batches")  # fmt: skip
    slower = whole - speeds[0] / 2
    after = [speed(found, half + k, half + k + WINDOW) / slower for k in range(steps - half - WINDOW)]
    back = next((k for k, part in enumerate(after) if part >= 0.9), -1)
    print(f"replica 0 twice as slow: from the 20th step on {speed(found, half + 20, steps) / slower:.1%} "
          f"of the new sum; 90% from step {back} on; by {WINDOW} steps: "
          f"{' '.join(f'{part:.0%}' for part in after[::WINDOW])}")  # fmt: skip


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
    main(parser.parse_args())
