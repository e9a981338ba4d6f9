"""Replicas of unequal speed, for real: how much of the sum of their speeds does a run reach?

    python bench/unequal.py [method] [replicas]

Replica 0 makes a step every SLOW seconds, the others every FAST seconds: each sleeps for the rest of its step, so the
figure does not depend on the cores of the machine. A replica's speed is 1 / the mean duration of its steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAST, SLOW, STEPS = 0.05, 0.2, 660  # STEPS: of a replica, on average
ARGUMENTS = ["--data", "synthetic:4000x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--steps", str(STEPS),
             "--quiet"]  # fmt: skip


def replica(arguments: list[str]) -> int:
    from minidl.train import main
    from minidl.training.trainer import Trainer

    step, durations = Trainer.step, []

    def slowed(self: Trainer, x: Any, y: Any) -> tuple[float, int]:
        began = time.monotonic()
        result = step(self, x, y)
        time.sleep(max(0.0, (FAST if self.fabric.rank else SLOW) - (time.monotonic() - began)))
        durations.append(time.monotonic() - began)
        return result

    Trainer.step = slowed  # type: ignore[method-assign]
    began = time.monotonic()
    code = main(arguments)
    out = Path(arguments[arguments.index("--out") + 1])
    facts = {"steps": len(durations), "busy": sum(durations), "seconds": time.monotonic() - began}
    (out / f"replica-{time.monotonic_ns()}.json").write_text(json.dumps(facts))
    return code


def measure(method: str, replicas: int) -> None:
    from minidl.comm.launch import local

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        arguments = [*ARGUMENTS, "--method", method, "--out", str(out)]
        assert local.run(arguments, replicas, threads=1, quiet=True, program=[__file__, "replica"]) == 0
        each = [json.loads(file.read_text()) for file in out.glob("replica-*.json")]
        summary = json.loads((out / "summary.json").read_text())
    steps, speeds = sum(one["steps"] for one in each), sum(one["steps"] / one["busy"] for one in each)
    print(f"{method}: {sorted(one['steps'] for one in each)} steps in {summary['seconds']:.2f} s: "
          f"{steps / summary['seconds'] / speeds:.1%} of the sum of the speeds; "
          f"idle at the end: {summary['idle_seconds']:.2f} s, summed over the replicas")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["replica"]:
        sys.exit(replica(sys.argv[2:]))
    measure(sys.argv[1] if len(sys.argv) > 1 else "gossip", int(sys.argv[2]) if len(sys.argv) > 2 else 4)
