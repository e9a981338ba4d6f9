"""Speed of batch norm with ReLU at ResNet-20's sizes, compared with the fastest copy and PyTorch (channels last).

    python bench/bench_norm.py [--quick] [--json]

Bytes are counted as if forward read x twice and wrote y, and backward read dy and x twice each and wrote dx.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip
from numpy import ndarray

from minidl.engine.device import Device
from minidl.kernels.norm import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

OURS = "3 blocks of rows, all threads"
Passes = tuple[Callable[[], object], Callable[[], object]]  # forward, backward
Norm = Callable[..., Any]
SHAPES = ((128, 32, 32, 16), (128, 16, 16, 32), (128, 8, 8, 64))


def ours(x: ndarray, dy: ndarray) -> Passes:
    """Return minidl's (forward, backward) for x, dy (rows, channels)."""
    device = Device("cpu")
    rows, channels = x.shape
    weight, bias = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    mean, rstd, running_mean, running_var, dweight, dbias = (weight.copy() for _ in range(6))
    partial = np.empty((device.norm.parts(rows, channels), 2, channels))
    y, dx = np.empty_like(x), np.empty_like(x)
    return (
        lambda: device.norm.batch_norm(
            x, weight, bias, 1e-5, 0.1, x[:0], True, running_mean, running_var, partial, mean, rstd, y
        ),
        lambda: device.norm.batch_norm_backward(dy, x, weight, bias, mean, rstd, True, partial, dx, dweight, dbias),
    )


def theirs(shape: tuple[int, ...], threads: int, norm: Norm | None = None) -> Passes:
    """Return PyTorch's (forward, backward) for random images of this shape (N, H, W, C).

    norm(x, weight, bias): the normalisation before relu; the default is batch norm.
    """
    torch.set_num_threads(threads)
    n, height, width, channels = shape
    x = torch.randn(n, channels, height, width).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    mean, var = torch.zeros(channels), torch.ones(channels)
    normalise = norm or (lambda *given: torch.nn.functional.batch_norm(given[0], mean, var, *given[1:], True))

    def forward() -> torch.Tensor:
        return torch.nn.functional.relu(normalise(x, weight, bias), inplace=True)

    y, dy = forward(), torch.randn_like(x)
    return forward, lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    random = np.random.default_rng(0)
    for shape in SHAPES[-1:] if report.args.quick else SHAPES:
        x, dy = (random.standard_normal((int(np.prod(shape[:3])), shape[3]), np.float32) for _ in range(2))
        weight, bias, y = np.ones(shape[3], np.float32), np.zeros(shape[3], np.float32), np.empty_like(x)
        forward, backward = ours(x, dy)
        steps = measure.rungs(ladder.RUNGS, x, weight, bias, y) | {OURS: forward}
        other: dict[str, Callable[[], object]] = {OURS: backward}
        if torch is not None:
            steps["PyTorch"], other["PyTorch"] = theirs(shape, report.threads)
        name = "x".join(map(str, shape))
        for what, functions, passes in (("forward", steps, 3), ("backward", other, 5)):
            share = report.ladder(
                f"batch norm + relu {what}, {name}", functions, traffic=passes * x.nbytes, bytes_=x.nbytes
            )
            report.row(f"batch-norm-{what}-{name}", share[OURS], "% of copying", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
