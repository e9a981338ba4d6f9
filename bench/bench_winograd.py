"""Speed of Winograd's convolution, compared with direct kernels and PyTorch: layers of LeNet, VGG, ResNet-20, others.

    python bench/bench_winograd.py [--quick] [--json] [--threads 2]

All rates count the operations of the direct convolution, so they are comparable. The upper limit for F(4x4,3x3) is
therefore four times the machine's peak. The last table lists the rounding errors, relative to float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

import numpy as np

from minidl.engine import jit
from minidl.kernels.conv import cpu, winograd, winograd_gradient
from minidl.kernels.conv.choice import (
    F1X4_1X3,
    F2X2_3X3,
    F2X2_7X7,
    F3X3_4X4,
    F4X1_5X1,
    F4X1_7X1,
    F4X4_3X3,
    F4X4_5X5,
    F5X5_2X2,
    STRIDE2_3X3,
    STRIDE2_4X4,
    form_of_dx,
)
from minidl.kernels.conv.forms import stride_of, tile_of
from minidl.kernels.conv.norms import no_norms
from minidl.kernels.conv.reference import Pair, output_size

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Call = Callable[[], object]
NAMES = {F4X4_3X3: "F(4x4,3x3)", F2X2_3X3: "F(2x2,3x3)", F4X4_5X5: "F(4x4,5x5)", F5X5_2X2: "F(5x5,2x2)",
         F3X3_4X4: "F(3x3,4x4)", F2X2_7X7: "F(2x2,7x7)", F1X4_1X3: "F(1x4,1x3)", F4X1_5X1: "F(4x1,5x1)",
         F4X1_7X1: "F(4x1,7x1)", STRIDE2_3X3: "3x3, stride 2", STRIDE2_4X4: "4x4, stride 2"}  # fmt: skip
PASSES = ("forward", "backward_input", "backward_weight")
LAYERS = {  # N, height and width, C, O, kernel size r (taps in a square, or the height and width), stride
    "lenet-2": (64, 14, 32, 64, 5, 1),
    "vgg-2": (64, 32, 64, 64, 3, 1),
    "vgg-3": (64, 16, 64, 128, 3, 1),
    "vgg-4": (64, 16, 128, 128, 3, 1),
    "vgg-5": (64, 8, 128, 256, 3, 1),
    "vgg-6": (64, 8, 256, 256, 3, 1),
    "resnet-16": (128, 32, 16, 16, 3, 1),
    "resnet-32": (128, 16, 32, 32, 3, 1),
    "resnet-64": (128, 8, 64, 64, 3, 1),
    "wide-5x5": (16, 7, 512, 512, 5, 1),
    "resnet-16-32": (128, 32, 16, 32, 3, 2),
    "resnet-32-64": (128, 16, 32, 64, 3, 2),
    "stride-64": (64, 32, 64, 64, 3, 2),
    "stride-192": (64, 16, 192, 192, 3, 2),
    "stride-4x4": (64, 16, 64, 128, 4, 2),
    "even-2x2": (64, 16, 64, 64, 2, 1),
    "even-4x4": (64, 16, 64, 64, 4, 1),
    "wide-7x7": (64, 16, 64, 64, 7, 1),
    "line-1x3": (64, 16, 64, 64, (1, 3), 1),
    "line-3x1": (64, 16, 128, 128, (3, 1), 1),
    "line-5x1": (64, 16, 64, 64, (5, 1), 1),
    "line-1x7": (64, 16, 128, 128, (1, 7), 1),
    "line-7x1": (64, 31, 24, 40, (7, 1), 1),
}
QUICK = ("lenet-2", "resnet-32", "resnet-32-64")
ACCURACY = [*((form, 8, 16, 64) for form in NAMES), (F4X4_5X5, 2, 7, 512)]  # form, N, height and width, C = O


def pair(r: int | Pair) -> Pair:
    return (r, r) if isinstance(r, int) else r


def padding_of(r: int | Pair) -> Pair:
    high, wide = pair(r)
    return (high - 1) // 2, (wide - 1) // 2


def calls(layer: tuple[Any, ...]) -> dict[str, dict[str, Call]]:
    """Return, for each pass, functions for Winograd (minidl selects the form), the direct kernel, and PyTorch."""
    n, size, channels, outputs, r, stride = layer
    steps, pad, random = (stride, stride), padding_of(r), np.random.default_rng(0)
    high, wide = output_size((n, size, size, channels), (*pair(r), channels, outputs), steps, pad, (1, 1))
    x = measure.aligned(n * size * size * channels).reshape(n, size, size, channels)
    dy = measure.aligned(n * high * wide * outputs).reshape(n, high, wide, outputs)
    for array in (x, dy):
        array[...] = random.standard_normal(array.shape, np.float32)
    weight = random.standard_normal((*pair(r), channels, outputs), np.float32)
    y, dx, dw, none = np.empty_like(dy), np.empty_like(x), np.empty_like(weight), np.empty(0, np.float32)
    found: dict[str, dict[str, Call]] = {name: {} for name in PASSES}
    for way, allowed in (("winograd", True), ("direct", False)):
        o = 1, steps, pad, (1, 1), allowed
        s = {p: measure.aligned(getattr(cpu, f"{p}_scratch")(x.shape, weight.shape, *o)) for p in PASSES}
        found["forward"][way] = lambda o=o, s=s["forward"]: cpu.forward(  # type: ignore[misc]
            x, weight, none, none, none, none, False, *o, none, s, y
        )
        found["backward_input"][way] = lambda o=o, s=s["backward_input"]: cpu.backward_input(  # type: ignore[misc]
            dy, weight, none, *o, s, dx
        )
        found["backward_weight"][way] = lambda o=o, s=s["backward_weight"]: cpu.backward_weight(  # type: ignore[misc]
            x, dy, *o, s, dw
        )
    if torch is not None:
        image, gradient = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, dy))
        kernels = torch.from_numpy(weight).permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        geometry = list(steps), list(pad), [1, 1]
        found["forward"]["PyTorch"] = lambda: torch.conv2d(image, kernels, None, *geometry)
        for name, mask in (("backward_input", [True, False, False]), ("backward_weight", [False, True, False])):
            found[name]["PyTorch"] = lambda mask=mask: torch.ops.aten.convolution_backward(  # type: ignore[misc]
                gradient, image, kernels, None, *geometry, False, [0, 0], 1, mask
            )
    return found


def _float64(image: np.ndarray, kernel: np.ndarray, dy: np.ndarray, stride: int) -> tuple[np.ndarray, ...]:
    """Return y, dx and dweight from PyTorch in float64. (minidl's float64 takes a minute to compile.)"""
    x = torch.from_numpy(image).double().permute(0, 3, 1, 2).requires_grad_()
    weight = torch.from_numpy(kernel).double().permute(3, 2, 0, 1).requires_grad_()
    y = torch.nn.functional.conv2d(x, weight, None, stride, padding_of(kernel.shape[:2]))
    y.backward(torch.from_numpy(dy).double().permute(0, 3, 1, 2))
    y, dx = (each.detach().permute(0, 2, 3, 1).numpy() for each in (y, x.grad))
    return y, dx, weight.grad.permute(2, 3, 1, 0).numpy()


def accuracy() -> None:
    """Print the errors of each form on normally distributed data, with 64 channels or more.

    largest: the largest error, relative to the largest exact value. L2: the relative error in the L2 norm.
    """
    print(f"\n{'float32 against float64':<34}{'largest':>10}{'L2':>10}")
    random = np.random.default_rng(0)
    for form, n, size, channels in ACCURACY:
        r, steps, of_dx = tile_of(form)[1], stride_of(form), form_of_dx(form)
        name = f"{NAMES[form]} {channels}"
        image = random.standard_normal((n, size * steps[0], size * steps[0], channels), np.float32)
        kernel = random.standard_normal((*r, channels, channels), np.float32)
        pad, none = padding_of(r), np.empty(0, np.float32)
        out = output_size(image.shape, kernel.shape, steps, pad, (1, 1))
        dy = random.standard_normal((n, *out, channels), np.float32)
        y, dx, dw = np.empty_like(dy), np.empty_like(image), np.empty_like(kernel)
        shapes = image.shape, kernel.shape, steps
        sizes = (
            winograd.forward_scratch(form, *shapes, pad, (1, 1)),
            winograd.backward_input_scratch(of_dx, *shapes, (1, 1)),
            winograd_gradient.backward_weight_scratch(form, *shapes, pad, (1, 1)),
        )
        scratch = [np.empty(size, np.float32) for size in sizes]
        norms = no_norms(none)
        winograd.forward(form, image, kernel, none, none, none, none, False, steps, pad, (1, 1), none, scratch[0], y,
                         norms)  # fmt: skip
        winograd.backward_input(of_dx, dy, kernel, none, steps, pad, (1, 1), scratch[1], dx, norms)
        winograd_gradient.backward_weight(form, image, dy, steps, pad, (1, 1), norms.before, scratch[2], dw)
        found = (y, dx, dw), _float64(image, kernel, dy, steps[0])
        for kind, ours, exact in zip(PASSES, *found, strict=True):
            error = ours - exact
            largest, l2 = abs(error).max() / abs(exact).max(), np.linalg.norm(error) / np.linalg.norm(exact)
            print(f"{name + ' ' + kind:<34}{largest:>10.1e}{l2:>10.1e}")


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    report.seconds = min(report.seconds, 0.5)  # less time for each of the 51 tables
    jit.set_threads(report.threads)
    if torch is not None:
        torch.set_num_threads(report.threads)
    for name in QUICK if report.args.quick else LAYERS:
        n, size, channels, outputs, r, stride = LAYERS[name]
        taps, steps, none = pair(r), (stride, stride), (1, 1)
        high, wide = output_size((n, size, size, channels), (*taps, channels, outputs), steps, padding_of(r), none)
        for kind, ways in calls(LAYERS[name]).items():
            title = f"{name}: {channels} -> {outputs} on {size} x {size}, {taps[0]} x {taps[1]}"
            title += f", stride {stride}, batch {n}: {kind}"
            share = report.ladder(title, ways, 2.0 * n * high * wide * channels * outputs * taps[0] * taps[1])
            report.row(f"{name}-{kind}", share["winograd"] / share["direct"], "x direct")
    if torch is not None:
        accuracy()
    report.finish()


if __name__ == "__main__":
    main()
