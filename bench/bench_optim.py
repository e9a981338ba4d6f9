"""Speed of parameter updates, relative to memory bandwidth and to PyTorch's fused kernels.

    python bench/bench_optim.py [--quick] [--json] [--threads 1]

Reports GB/s (read and written) and the percentage of the fastest copy in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from minidl.engine.device import Device
from minidl.kernels.optim import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def fused(name: str, theta: np.ndarray, grad: np.ndarray) -> Callable[[], Any]:
    """Return a step of PyTorch's fused optimizer `name` on the vectors theta and grad."""
    parameter = torch.from_numpy(theta).requires_grad_()
    parameter.grad = torch.from_numpy(grad)
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)([parameter], lr=1e-3, fused=True, **options).step  # type: ignore[no-any-return]


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    optim = Device("cpu").optim
    if torch is not None:
        torch.set_num_threads(report.threads)
    for bytes_ in (measure.SMALL, measure.LARGE):
        where = f"{bytes_ / 1e6:.3g} MB"
        size = bytes_ // 4 // 64 * 64
        theta, grad, velocity, second = (measure.aligned(size, 0.1) for _ in range(4))
        segments = np.array([0]), np.array([size])
        rates = np.array([1e-3]), np.array([0.0])
        sgd = measure.rungs(ladder.RUNGS, theta, grad, velocity)
        sgd["minidl"] = measure.replay(
            optim.sgd, theta, grad, velocity, *segments, *rates, 0.9, False, False, 1.0
        )  # fmt: skip
        adam = {
            "minidl": measure.replay(
                optim.adam, theta, grad, velocity, second, *segments, *rates, 0.9, 0.999, 1e-8, 10, False, 1.0
            )
        }
        if torch is not None:
            sgd["PyTorch, fused"] = fused("SGD", theta, grad)
            adam["PyTorch, fused"] = fused("Adam", theta, grad)
        one = np.ones(1)
        lars = {
            "minidl": measure.replay(
                optim.lars, theta, grad, velocity, *segments, *rates, np.array([True]), 0.9, 0.001, one, one, 1.0
            )
        }
        partial = np.zeros(optim.norms_partial(1))
        norms = {"minidl": measure.replay(optim.norms, theta, *segments, partial, np.zeros(1))}
        for name, functions, vectors in (("sgd", sgd, 5), ("adam", adam, 7), ("lars", lars, 5), ("norms", norms, 1)):
            shares = report.ladder(f"{name}, {where}", functions, traffic=4.0 * vectors * size, bytes_=bytes_)
            report.row(f"{name}, {where}", shares["minidl"], "% of copy", ">= 90")
            if "PyTorch, fused" in shares:
                ratio = shares["minidl"] / shares["PyTorch, fused"]
                report.row(f"{name}, {where}, against PyTorch", ratio, "x PyTorch", ">= 1")
    report.finish()


if __name__ == "__main__":
    main()
