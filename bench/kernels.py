"""Kernel speed relative to the limits of this machine, measured in the same run.

    python bench/kernels.py                             all parts
    python bench/kernels.py --quick --only gemm threads

gemm       matrix products                  percentage of the rate of a loop of multiply-adds on registers
conv       direct convolution               as for gemm; layers of LeNet, VGG (batch 64) and of ResNet-20 (batch 128)
stream     optimizers, mixing, activations  percentage of the rate of the fastest copy; vectors of 2.7 MB and 256 MB
threads    convolutions                     speed with all threads, relative to one thread

Kernels are called as in a recorded step: from a table of addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from bench.training import KEEP_MEMORY, Worker, installed
from minidl.engine import jit
from minidl.engine.device import Device

CPU = Device("cpu")
Function = Callable[[], object]


class Layer(NamedTuple):
    images: int
    size: int  # height and width
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1

    def __str__(self) -> str:
        name = f"{self.kernel}x{self.kernel}-{self.inputs}-{self.outputs}-on-{self.size}"
        return name + (f"-stride-{self.stride}" if self.stride > 1 else "")


NETS = {
    "lenet": [Layer(64, 28, 1, 32, 5), Layer(64, 14, 32, 64, 5)],
    "vgg": [Layer(64, 32, 3, 64, 3), Layer(64, 32, 64, 64, 3), Layer(64, 16, 64, 128, 3), Layer(64, 16, 128, 128, 3),
            Layer(64, 8, 128, 256, 3), Layer(64, 8, 256, 256, 3)],
    "resnet20": [Layer(128, 32, 3, 16, 3), Layer(128, 32, 16, 16, 3), Layer(128, 32, 16, 32, 3, 2),
                 Layer(128, 16, 32, 32, 3), Layer(128, 16, 32, 64, 3, 2), Layer(128, 8, 64, 64, 3)],
}  # fmt: skip
PASSES = ("forward", "backward_input", "backward_weight")


def empty(*shape: int) -> np.ndarray:
    """Return memory as the engine allocates it for kernels: aligned to a cache line."""
    return CPU.empty(shape, np.float32)


def numbers(*shape: int) -> np.ndarray:
    array = empty(*shape)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=array)
    return array


def gemm(report: measure.Report) -> None:
    for n in (128, 256, 512, 1024):
        a, b, out, no_bias = numbers(n, n), numbers(n, n), empty(n, n), empty(0)
        matmul = CPU.matmul
        calls = max(1, round((256 / n) ** 3 * 4))
        products = {}
        for name, before in (("nn", (no_bias, False, no_bias)), ("nt", ()), ("tn", ())):
            scratch = empty(getattr(matmul, f"{name}_scratch")(n, n, n))
            kernel = getattr(matmul, name)
            products[name] = measure.replay(kernel, a, b, *before, scratch, out, calls=calls)
        shares = report.ladder(f"matrix products, {n} x {n} x {n}, {calls} calls", products, flops=calls * 2 * n**3)
        for name, share in shares.items():
            report.row(f"gemm-{name}-{n}", share, "% of peak", ">= 75" if n == 128 else ">= 92")


def convolution(layer: Layer, which: str, winograd: bool) -> tuple[Function, float]:
    """Return (one pass of a convolution, its number of floating-point operations)."""
    n, size, inputs, outputs, k, stride = layer
    to = (size - 1) // stride + 1
    x, weight, y = numbers(n, size, size, inputs), numbers(k, k, inputs, outputs), numbers(n, to, to, outputs)
    where = 1, (stride, stride), (k // 2, k // 2), (1, 1), winograd
    needed = 0
    for threads in range(1, jit.threads() + 1):  # scratch space for any number of threads
        jit.set_threads(threads)
        needed = max(needed, getattr(CPU.conv, f"{which}_scratch")(x.shape, weight.shape, *where))
    scratch = empty(needed)
    if which == "forward":
        nothing = empty(0)
        arguments: tuple[Any, ...] = (x, weight, nothing, nothing, nothing, nothing, False, *where, nothing, scratch, y)
    elif which == "backward_input":
        arguments = y, weight, empty(0), *where, scratch, x
    else:
        arguments = x, y, *where, scratch, weight
    return measure.replay(getattr(CPU.conv, which), *arguments), 2.0 * y.size * k * k * inputs


def conv(report: measure.Report) -> None:
    for net, layers in NETS.items():
        total_seconds, total_flops = 0.0, 0.0  # only their ratio is used, so the unit of time does not matter
        for number, layer in enumerate(layers):
            passes = {}
            for which in PASSES:
                if which != "backward_input" or number:  # the first layer needs no gradient of its input
                    passes[which], flops = convolution(layer, which, winograd=False)
            for which, share in report.ladder(f"{net}, {layer}, direct", passes, flops=flops).items():
                report.row(f"conv-{net}-{layer}-{which}", share, "% of peak", ">= 85")
                total_flops += flops
                total_seconds += flops / share
        report.row(f"conv-{net}", total_flops / total_seconds, "% of peak", ">= 85")


def stream(report: measure.Report) -> None:
    for bytes_ in (measure.SMALL, measure.LARGE):
        where = f"{bytes_ / 1e6:.3g}MB"
        size = bytes_ // 4 // 64 * 64
        a, b, c, d = (measure.aligned(size, 0.1) for _ in range(4))
        segments = np.array([0]), np.array([size]), np.array([1e-3]), np.array([0.0])
        kernels: dict[str, tuple[Any, int]] = {  # (kernel with arguments, number of vectors read or written)
            "sgd": ((CPU.optim.sgd, a, b, c, *segments, 0.9, False, False, 1.0), 5),
            "adam": ((CPU.optim.adam, a, b, c, d, *segments, 0.9, 0.999, 1e-8, 10, False, 1.0), 7),
            "mix": ((CPU.mix.mix, a, b, 0.5), 3),
            "relu": ((CPU.activation.relu, a, b), 2),
            "relu_backward": ((CPU.activation.relu_backward, a, b, c), 3),
            "gelu": ((CPU.activation.gelu, a, b), 2),
            "silu": ((CPU.activation.silu, a, b), 2),
            "tanh": ((CPU.activation.tanh, a, b), 2),
            "sigmoid": ((CPU.activation.sigmoid, a, b), 2),
        }
        for name, (call, vectors) in kernels.items():
            function = measure.replay(*call)
            shares = report.ladder(f"{name}, {where}", {name: function}, traffic=4.0 * vectors * size, bytes_=bytes_)
            report.row(f"{name}-{where}", shares[name], "% of copy", ">= 90")
        if installed("torch"):
            against_pytorch(report, bytes_, measure.replay(*kernels["sgd"][0]))


def against_pytorch(report: measure.Report, bytes_: int, ours: Function) -> None:
    """Measure SGD, alternating with PyTorch's fused kernel, which runs in a separate process."""
    theirs: list[float] = []
    own: list[float] = []
    options = {"channels_last": False, "compile": False, "threads": report.threads}
    with Worker("pytorch", report.threads, **KEEP_MEMORY) as worker:
        worker.build("sgd", bytes_, False, **options)
        for _ in range(measure.TURNS):
            own += measure.alternate({"": ours}, 0.0, 5)[""].turns
            theirs += worker.steps(20)[10:]
    ratio = measure.Times(tuple(theirs)).median / measure.Times(tuple(own)).median
    report.row(f"sgd-{bytes_ / 1e6:.3g}MB-pytorch-fused", ratio, "x PyTorch", ">= 1")


def threads(report: measure.Report) -> None:
    """Compare all threads with one, on the passes of all layers of each net."""
    every = report.threads
    for winograd in (False, True):
        kind = "as trained" if winograd else "direct"
        for net, layers in NETS.items():
            passes = [convolution(layer, which, winograd)[0] for layer in layers for which in PASSES]

            def on(threads: int, passes: list[Function] = passes) -> None:
                jit.set_threads(threads)
                for run in passes:
                    run()

            times = report.alternate({"1": lambda on=on: on(1), "all": lambda on=on: on(every)})
            jit.set_threads(every)
            ratio = times["1"].median / times["all"].median
            one, all_ = 1e3 * times["1"].median, 1e3 * times["all"].median
            print(f"{net}, {kind}: 1 thread {one:.4g} ms, {every} {all_:.4g} ms, {ratio:.2f} times as fast", flush=True)
            report.row(f"threads-{every}-{net}-{kind.replace(' ', '-')}", ratio, "x", ">= 1.85" if every == 2 else "")


PARTS = {"gemm": gemm, "conv": conv, "stream": stream, "threads": threads}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    report = measure.Report(args)
    for name in args.only:
        PARTS[name](report)
    report.finish()


if __name__ == "__main__":
    main()
