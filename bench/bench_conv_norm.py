"""Batch norms merged with a convolution, compared with separate kernels: ResNet-20's sizes, odd ones, and depthwise.

    python bench/bench_conv_norm.py [--quick] [--json]

Forward: batch norm and relu, convolution, moments of the result. Backward: the gradients of the convolution's weight
and input, and of the batch norm before it. The moments of the first batch norm come from the convolution before it, so
the merged forward begins with its statistics. Here the arrays of a layer are in the third-level cache. In a step, those
of the forward pass are not. So the last lines compare the gradients of ResNet-20 with 128 images, recorded with and
without merged norms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip

from bench.bench_norm import SHAPES
from minidl import models, ops
from minidl.engine.device import Device
from minidl.program import table
from minidl.program.replay import Gradient

Way = dict[str, Callable[[], object]]
Shape = tuple[int, int, int, int]
LAYERS: list[tuple[Shape, int]] = [  # shape of x (N, H, W, C), groups
    *((shape, 1) for shape in SHAPES), ((37, 31, 31, 64), 1), ((8, 96, 96, 32), 32), ((37, 31, 31, 144), 144),
]  # fmt: skip


def ways(shape: Shape, groups: int) -> tuple[Way, Way]:
    """Return the (forward, backward) of both ways for a layer with as many channels in y as in x."""
    cpu, random, channels = Device("cpu"), np.random.default_rng(0), shape[3]
    x, dy = (random.standard_normal(shape, np.float32) for _ in range(2))
    w = random.standard_normal((3, 3, channels // groups, channels), np.float32)
    z, y, dz, dx, none, dw = (np.empty(s, np.float32) for s in (shape, shape, shape, shape, 0, w.shape))
    gamma, beta, mean, rstd = np.ones((4, channels), np.float32)
    running, var, dgamma, dbeta = np.ones((4, channels), np.float32)
    options = groups, (1, 1), (1, 1), (1, 1), True
    x_rows, y_rows, z_rows, dz_rows, dx_rows = (a.reshape(-1, channels) for a in (x, y, z, dz, dx))
    blocks = cpu.norm.parts(len(x_rows), channels)
    sums, next_sums = np.empty((2, blocks, 2, channels))
    cpu.norm._moments(x_rows, sums)
    separate, merged = (
        {
            kernel: np.empty(getattr(op, f"{kernel}_scratch")(x.shape, w.shape, *options), np.float32)
            for kernel in ("forward", "backward_input", "backward_weight")
        }
        for op in (cpu.conv, cpu.conv_norm)
    )
    norm = gamma, beta, mean, rstd

    def separate_forward() -> None:
        cpu.norm.batch_norm(x_rows, gamma, beta, 1e-5, 0.1, x_rows[:0], True, running, var, sums, mean, rstd, z_rows)
        cpu.conv.forward(z, w, none, none, none, none, False, *options, none, separate["forward"], y)
        cpu.norm._moments(y_rows, next_sums)

    def merged_forward() -> None:
        cpu.conv_norm.batch_norm(x_rows, gamma, beta, 1e-5, 0.1, x_rows[:0], True, sums, running, var, mean, rstd,
                                 x_rows[:0])  # fmt: skip
        cpu.conv_norm.forward(x, *norm, w, none, none, none, none, False, *options, none, merged["forward"], y,
                              next_sums)  # fmt: skip

    def separate_backward() -> None:
        cpu.conv.backward_weight(z, dy, *options, separate["backward_weight"], dw)
        cpu.conv.backward_input(dy, w, none, *options, separate["backward_input"], dz)
        cpu.norm.batch_norm_backward(dz_rows, x_rows, *norm, True, next_sums, dx_rows, dgamma, dbeta)

    def merged_backward() -> None:
        cpu.conv_norm.backward_weight(x, *norm, dy, *options, merged["backward_weight"], dw)
        cpu.conv_norm.backward_input(dy, w, none, x_rows, *norm, True, none, *options,
                                     merged["backward_input"], dz, next_sums)  # fmt: skip
        cpu.conv_norm.batch_norm_backward(dz_rows, x_rows, *norm, True, next_sums, dx_rows, dgamma, dbeta)

    return (
        {"separate": separate_forward, "merged": merged_forward},
        {"separate": separate_backward, "merged": merged_backward},
    )


def steps(images: int) -> Way:
    """Return the gradient of ResNet-20 both ways."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((images, 32, 32, 3), np.float32), random.integers(10, size=images)
    gradients = {}
    for way, merge in (("separate", lambda *_: None), ("merged", table.merge_norms)):
        gradients[way] = Gradient(models.resnet(), ops.cross_entropy)
        with patch.object(table, "merge_norms", merge):
            gradients[way](x, y)
    return {way: partial(gradient, x, y) for way, gradient in gradients.items()}


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    for shape, groups in LAYERS[2:3] if report.args.quick else LAYERS:
        name = "x".join(map(str, shape)) + (f"/{groups}" if groups > 1 else "")
        for what, functions in zip(("forward", "backward"), ways(shape, groups), strict=True):
            times = report.alternate(functions)
            for way, each in times.items():
                print(f"{what} {name:<20}{way:<10}{1e3 * each.median:>8.3f} ms, best {1e3 * each.best:.3f}, "
                      f"spread {each.spread:.0%}", flush=True)  # fmt: skip
            gain = times["separate"].median / times["merged"].median
            report.row(f"conv-norm-{what}-{name}", gain, "times separate kernels")
    times = measure.alternate(steps(8 if report.args.quick else 128), 20 * report.seconds)
    for way, each in times.items():
        print(f"ResNet-20 {way:<10}{1e3 * each.median:>8.1f} ms, best {1e3 * each.best:.1f}, spread {each.spread:.0%}")
    report.row("conv-norm-resnet20", times["separate"].median / times["merged"].median, "times separate kernels")
    report.finish()


if __name__ == "__main__":
    main()
