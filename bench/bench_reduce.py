"""Speed of sums, relative to the fastest copy of x: bias gradient, global average, sum of all elements."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip

from minidl.engine.device import Device
from minidl.kernels.reduce import ladder
from minidl.ops.arrays import partial_sums, reduce_sum

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

CASES = {"bias gradient": (0, 1, 2), "global average": (1, 2), "everything": (0, 1, 2, 3)}


def measure_ladder(report: measure.Report) -> None:
    """Measure speed and relative error of each version of the sum over the middle axis."""
    numbers = np.random.default_rng(0).random(1 << 21, np.float32)
    for x in (numbers.reshape(1, -1, 1), numbers.reshape(1, -1, 16)):
        partial, out = partial_sums(Device("cpu"), x.shape[1], 1, x.shape[2]), np.empty(x.shape[::2], np.float32)
        steps = measure.rungs(ladder.RUNGS, x, partial, out)
        steps["NumPy"] = lambda x=x, out=out: np.sum(x, 1, out=out)
        report.ladder(f"the ladder: sums of {x.shape[1:]}", steps, traffic=x.nbytes, bytes_=x.nbytes)
        exact = x.sum(1, dtype=np.float64)
        for name, step in steps.items():
            step()
            print(f"{name:<40}{np.max(abs(out / exact - 1)):>10.0e} relative error")


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    measure_ladder(report)
    device, x = Device("cpu"), np.random.default_rng(0).standard_normal((128, 32, 32, 16), np.float32)
    for name, axes in CASES.items():
        functions = {"wide rows": lambda: reduce_sum(device, x, axes)}  # noqa: B023
        if torch is not None:
            torch.set_num_threads(report.threads)
            tensor = torch.from_numpy(x)
            functions["PyTorch"] = lambda: tensor.sum(axes)  # noqa: B023
        share = report.ladder(f"{name}, 128x32x32x16", functions, traffic=x.nbytes, bytes_=x.nbytes)
        report.row(f"sum-{name.replace(' ', '-')}", share["wide rows"], "% of copying", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
