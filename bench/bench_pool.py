"""Speed of 2 x 2 max pooling, compared with PyTorch (channels last) and the fastest copy of an array of x's size."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip

from minidl.kernels.pool import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

LAST, LAST_BACKWARD = list(ladder.RUNGS)[-1], list(ladder.BACKWARD)[-1]


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    for n, height, width, channels in ((64, 28, 28, 32), (64, 14, 14, 64), (64, 32, 32, 64), (64, 32, 32, 3)):
        x = np.random.default_rng(0).standard_normal((n, height, width, channels), np.float32)
        y = np.empty((n, height // 2, width // 2, channels), np.float32)
        place, dx = np.empty(y.shape, np.uint8), np.empty_like(x)
        forward = measure.rungs(ladder.RUNGS, x, y, place)
        backward = measure.rungs(ladder.BACKWARD, y, place, dx)
        if torch is not None:
            torch.set_num_threads(report.threads)
            image = torch.from_numpy(x).permute(0, 3, 1, 2).requires_grad_()
            pooled = torch.nn.functional.max_pool2d(image, 2)
            dy = torch.randn_like(pooled)
            forward["PyTorch"] = lambda: torch.nn.functional.max_pool2d(image, 2)  # noqa: B023
            backward["PyTorch"] = lambda: torch.autograd.grad(pooled, image, dy, retain_graph=True)  # noqa: B023
        name, traffic = f"{n}x{height}x{width}x{channels}", x.nbytes + y.nbytes + place.nbytes
        for what, functions, last in (("forward", forward, LAST), ("backward", backward, LAST_BACKWARD)):
            share = report.ladder(f"max pool {what}, {name}", functions, traffic=traffic, bytes_=x.nbytes)
            report.row(f"max-pool-{what}-{name}", share[last], "% of copying", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
