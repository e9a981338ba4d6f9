"""Speed of activations: in the L1 cache, each version of tanh (kernels/activation/ladder.py), and all kernels.

    python bench/bench_activation.py [--quick] [--json] [--threads 1]

Reports GB/s (read and written) and the percentage of the fastest copy in the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from minidl.engine.device import Device
from minidl.kernels.activation import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

NAMES = ("relu", "tanh", "sigmoid", "silu", "gelu")
FLOOR = 4096  # elements (16 KB): input and output fit into the L1 cache


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    kernels = Device("cpu").activation
    if torch is not None:
        torch.set_num_threads(report.threads)
    x, y = measure.aligned(FLOOR), measure.aligned(FLOOR)
    vectors = 100 * FLOOR / measure.LANES
    floors = report.alternate({name: measure.replay(getattr(kernels, name), x, y, calls=100) for name in NAMES})
    print(f"\nns per vector of {measure.LANES} numbers, one thread, data in the L1 cache: ", end="")
    print(", ".join(f"{name} {1e9 * times.best / vectors:.2f}" for name, times in floors.items()))
    for bytes_ in (measure.SMALL, measure.LARGE):
        size = bytes_ // 4 // 64 * 64
        x, y, dx = (measure.aligned(size) for _ in range(3))
        x[:] = np.random.default_rng(0).standard_normal(size, np.float32)
        steps = measure.rungs(ladder.RUNGS, x, y)
        report.ladder(f"the ladder: tanh, {bytes_ / 1e6:.3g} MB", steps, traffic=8.0 * size, bytes_=bytes_)
        for name in NAMES:
            functions = {"minidl": measure.replay(getattr(kernels, name), x, y)}
            if torch is not None:
                tx, ty = torch.from_numpy(x), torch.from_numpy(y)
                operator = getattr(torch.ops.aten, name).out
                functions["PyTorch"] = lambda operator=operator, tx=tx, ty=ty: operator(tx, out=ty)
            where = f"{name}, {bytes_ / 1e6:.3g} MB"
            shares = report.ladder(where, functions, traffic=8.0 * size, bytes_=bytes_)
            report.row(where, shares["minidl"], "% of copy", ">= 90")
            backward = {"minidl": measure.replay(getattr(kernels, f"{name}_backward"), x, y, dx)}
            shares = report.ladder(f"{where}, backward", backward, traffic=12.0 * size, bytes_=bytes_)
            report.row(f"{where}, backward", shares["minidl"], "% of copy", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
