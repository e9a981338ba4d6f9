"""Convolutions: every version from plain loops to the micro-kernel, and layers of real networks beside PyTorch.

    python bench/bench_conv.py [--quick] [--json] [--threads 2]

Measures forward, data gradient and weight gradient of the direct kernels, without Winograd. The measurements alternate
with PyTorch (channels last), and with the upper limit: a loop of multiply-adds on registers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

import numpy as np

from minidl.engine import jit
from minidl.kernels.conv import cpu, ladder
from minidl.ops.conv import output_length, pair

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Call = Callable[[], object]
PASSES = ("forward", "backward_input", "backward_weight")
# name: x (N, H, W, C), kernel, outputs, stride, padding, dilation, groups
LAYERS = {
    "lenet-1": ((64, 28, 28, 1), 5, 32, 1, 2, 1, 1),
    "lenet-2": ((64, 14, 14, 32), 5, 64, 1, 2, 1, 1),
    "vgg-1": ((64, 32, 32, 3), 3, 64, 1, 1, 1, 1),
    "vgg-2": ((64, 32, 32, 64), 3, 64, 1, 1, 1, 1),
    "vgg-3": ((64, 16, 16, 64), 3, 128, 1, 1, 1, 1),
    "vgg-4": ((64, 16, 16, 128), 3, 128, 1, 1, 1, 1),
    "vgg-5": ((64, 8, 8, 128), 3, 256, 1, 1, 1, 1),
    "vgg-6": ((64, 8, 8, 256), 3, 256, 1, 1, 1, 1),
    "resnet-1": ((128, 32, 32, 3), 3, 16, 1, 1, 1, 1),
    "resnet-16": ((128, 32, 32, 16), 3, 16, 1, 1, 1, 1),
    "resnet-32-stride": ((128, 32, 32, 16), 3, 32, 2, 1, 1, 1),
    "resnet-32": ((128, 16, 16, 32), 3, 32, 1, 1, 1, 1),
    "resnet-64-stride": ((128, 16, 16, 32), 3, 64, 2, 1, 1, 1),
    "resnet-64": ((128, 8, 8, 64), 3, 64, 1, 1, 1, 1),
    "1x1-stride": ((128, 32, 32, 16), 1, 32, 2, 0, 1, 1),
    "lenet-5-1": ((64, 28, 28, 1), 5, 6, 1, 2, 1, 1),
    "lenet-5-2": ((64, 14, 14, 6), 5, 16, 1, 0, 1, 1),
    "odd-5-7": ((32, 29, 31, 5), 3, 7, 1, 1, 1, 1),
    "odd-48-96-stride-3": ((32, 30, 30, 48), 3, 96, 3, 1, 1, 1),
    "dilation-2": ((32, 28, 28, 48), 3, 48, 1, 2, 2, 1),
    "batch-37": ((37, 28, 28, 40), 3, 48, 2, 1, 1, 1),
    "1x1-24-72": ((37, 15, 15, 24), 1, 72, 1, 0, 1, 1),
    "groups-4": ((32, 16, 16, 48), 3, 48, 1, 1, 1, 4),
    "groups-2": ((32, 16, 16, 64), 3, 64, 1, 1, 1, 2),
    "depthwise-stride": ((37, 28, 28, 48), 3, 48, 2, 1, 1, 48),
    "depthwise": ((32, 32, 32, 64), 3, 64, 1, 1, 1, 64),
}
QUICK = ("lenet-2", "resnet-16", "depthwise")


def calls(layer: tuple[tuple[int, int, int, int], int, int, int, int, int, int]) -> tuple[dict[str, Call], float]:
    """Return (the passes of one layer in minidl and PyTorch, the number of operations of a pass)."""
    x_shape, kernel, outputs, stride, padding, dilation, groups = layer
    out = tuple(output_length(x_shape[i], kernel, stride, padding, dilation) for i in (1, 2))
    random = np.random.default_rng(0)
    x = random.standard_normal(x_shape, np.float32)
    weight = random.standard_normal((kernel, kernel, x_shape[3] // groups, outputs), np.float32)
    dy = random.standard_normal((x_shape[0], *out, outputs), np.float32)
    y, dx, dw, none = np.empty_like(dy), np.empty_like(x), np.empty_like(weight), np.empty(0, np.float32)
    options = groups, pair(stride), pair(padding), pair(dilation), False
    scratch = {name: measure.aligned(getattr(cpu, f"{name}_scratch")(x.shape, weight.shape, *options))
               for name in PASSES}  # fmt: skip
    found: dict[str, Call] = {
        "forward": lambda: cpu.forward(x, weight, none, none, none, none, False, *options, none, scratch["forward"], y),
        "backward_input": lambda: cpu.backward_input(dy, weight, none, *options, scratch["backward_input"], dx),
        "backward_weight": lambda: cpu.backward_weight(x, dy, *options, scratch["backward_weight"], dw),
    }
    if torch is not None:
        image, kernels, gradient = (torch.from_numpy(a) for a in (x, weight, dy))
        image, gradient = image.permute(0, 3, 1, 2), gradient.permute(0, 3, 1, 2)
        kernels = kernels.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        geometry = [stride] * 2, [padding] * 2, [dilation] * 2
        found["PyTorch forward"] = lambda: torch.conv2d(image, kernels, None, *geometry, groups)
        for name, mask in (("backward_input", [True, False, False]), ("backward_weight", [False, True, False])):
            found[f"PyTorch {name}"] = lambda mask=mask: torch.ops.aten.convolution_backward(  # type: ignore[misc]
                gradient, image, kernels, None, *geometry, False, [0, 0], groups, mask
            )
    return found, 2.0 * dy.size * weight.size / outputs


def rungs() -> tuple[dict[str, Call], float]:
    """Return (the versions in kernels/conv/ladder.py, the number of operations of each)."""
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(shape, np.float32) for shape in ((16, 16, 16, 64), (3, 3, 64, 64)))
    found: dict[str, Call] = {}
    for name, rung in ladder.RUNGS.items():
        y = np.empty_like(x)
        found[name] = lambda rung=rung, y=y: rung(x, weight, y)  # type: ignore[misc]
    return found, 2.0 * x.size * 9 * 64


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    threads = report.threads
    jit.set_threads(1)
    report.threads = 1
    report.ladder("the ladder: 3 x 3, 64 -> 64 channels, 16 images of 16 x 16, one thread", *rungs())
    jit.set_threads(threads)
    report.threads = threads
    report.seconds /= 2  # less time for each layer, because there are many
    if torch is not None:
        torch.set_num_threads(threads)
    for name in QUICK if report.args.quick else LAYERS:
        found, flops = calls(LAYERS[name])
        share = report.ladder(f"{name}: {LAYERS[name]}", found, flops)
        for kind in PASSES:
            goal = ">= 85" if name.startswith(("lenet", "vgg", "resnet")) else ""
            report.row(f"{name}-{kind}", share[kind], "% of peak", goal)
    report.finish()


if __name__ == "__main__":
    main()
