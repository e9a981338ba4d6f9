"""Operations beside PyTorch: which of them stands out?

    python bench/ops.py [--quick] [--json] [--only NAMES ...]

The other benchmarks of operations (bench_*.py) compare the steps of a lesson with the machine's limit, at a few sizes.
Here a model is one operation on one or two parameters. Convolutions, products, batch and group norm are left out, and
measured there. minidl's times are those of the calls in its recorded step. PyTorch runs the operation eagerly, which
costs it a few us of Python. Its gradients of sums, transposes and concat are views: nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip
import torch
import torch.nn.functional as F
from numpy import ndarray

from minidl import nn, ops
from minidl.engine.parameter import Parameter
from minidl.program.call import run
from minidl.program.replay import Gradient

IMAGES, ROWS, SCORES, NONE = (37, 29, 31, 32), (4096, 256), (512, 1000), (1,)  # images have the channels last
Op = Callable[[Any, Any], Any]


def channels_second(op: Callable[[Any], Any]) -> Op:
    """Return PyTorch's operation, which wants (N, C, H, W), as a function of channels-last images."""
    return lambda x, w: op(x.permute(0, 3, 1, 2))


# name -> (shape of x, shape of w, minidl's operation of x and w, PyTorch's)
OPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Op, Op]] = {
    "layer-norm": (ROWS, (256,), lambda x, w: ops.layer_norm(x, w, w), lambda x, w: F.layer_norm(x, (256,), w, w)),
    "softmax": (SCORES, NONE, lambda x, w: ops.softmax(x), lambda x, w: F.softmax(x, -1)),
    "log-softmax": (SCORES, NONE, lambda x, w: ops.log_softmax(x), lambda x, w: F.log_softmax(x, -1)),
    "sum-of-rows": (ROWS, NONE, lambda x, w: ops.sum(x, 1), lambda x, w: x.sum(1)),
    "sum-over-rows": (ROWS, NONE, lambda x, w: ops.sum(x, 0), lambda x, w: x.sum(0)),
    "mean-of-pixels": (IMAGES, NONE, lambda x, w: ops.mean(x, (1, 2)), lambda x, w: x.mean((1, 2))),
    "maximum-of-rows": (ROWS, NONE, lambda x, w: ops.max(x, 1), lambda x, w: x.max(1)[0]),
    "maximum-of-pixels": (IMAGES, NONE, lambda x, w: ops.max(x, (1, 2)), lambda x, w: torch.amax(x, (1, 2))),
    "add-to-channels": (IMAGES, (32,), lambda x, w: ops.add(x, w), lambda x, w: x + w),
    "gate-of-channels": (IMAGES, (37, 1, 1, 32), lambda x, w: ops.multiply(x, w), lambda x, w: x * w),
    "gate-of-pixels": (IMAGES, (37, 29, 31, 1), lambda x, w: ops.multiply(x, w), lambda x, w: x * w),
    "at-least": (IMAGES, NONE, lambda x, w: ops.maximum(x, 0.1), lambda x, w: torch.clamp(x, min=0.1)),
    "square": (IMAGES, NONE, lambda x, w: x**2, lambda x, w: x**2),
    "power-2.5": (IMAGES, NONE, lambda x, w: x**2.5, lambda x, w: x**2.5),
    "square-root": (IMAGES, NONE, lambda x, w: ops.sqrt(x), lambda x, w: torch.sqrt(x)),
    "exp": (IMAGES, NONE, lambda x, w: ops.exp(x), lambda x, w: torch.exp(x)),
    "log": (IMAGES, NONE, lambda x, w: ops.log(x), lambda x, w: torch.log(x)),
    "absolute": (IMAGES, NONE, lambda x, w: ops.absolute(x), lambda x, w: x.abs()),
    "gelu": (IMAGES, NONE, lambda x, w: ops.gelu(x), lambda x, w: F.gelu(x)),
    "silu": (IMAGES, NONE, lambda x, w: ops.silu(x), lambda x, w: F.silu(x)),
    "batched-product": ((148, 49, 32), (148, 32, 49), ops.matmul, torch.matmul),
    "transpose": (
        (37, 49, 128),
        NONE,
        lambda x, w: ops.transpose(x, (0, 2, 1)),
        lambda x, w: x.transpose(1, 2).contiguous(),
    ),
    "concat": (IMAGES, IMAGES, lambda x, w: ops.concat([x, w], -1), lambda x, w: torch.cat([x, w], -1)),
    "crop": (IMAGES, NONE, lambda x, w: ops.index(x, CROP), lambda x, w: x[:, 1:-1, 1:-1].contiguous()),
    "max-pool-3x3": (
        IMAGES,
        NONE,
        lambda x, w: ops.max_pool2d(x, 3, 1, 1),
        channels_second(lambda x: F.max_pool2d(x, 3, 1, 1)),
    ),
    "average-pool-2x2": (
        IMAGES,
        NONE,
        lambda x, w: ops.avg_pool2d(x, 2),
        channels_second(lambda x: F.avg_pool2d(x, 2)),
    ),
}
CROP = (slice(None), slice(1, -1), slice(1, -1))


class Model(nn.Module):
    """One operation, whose results are the scores of one sample."""

    def __init__(self, op: Op, x: ndarray, w: ndarray) -> None:
        super().__init__()
        self.op, self.x, self.w = op, Parameter(x), Parameter(w)

    def forward(self, _: Any) -> Any:
        return ops.reshape(self.op(self.x, self.w), (1, -1))


def ours(op: Op, x: ndarray, w: ndarray) -> dict[str, Callable[[], object]]:
    """Return functions that run the calls before and after the loss of a recorded step."""
    # With label smoothing no gradient is so small that arithmetic becomes slow (denormal numbers).
    gradient = Gradient(Model(op, x, w), lambda scores, label: ops.cross_entropy(scores, label, 0.1))
    for _ in range(2):
        gradient(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
    (program,) = gradient.programs.values()
    loss, after = (program.calls.index(f"softmax.{name}") for name in ("cross_entropy", "cross_entropy_backward"))
    return {
        "forward": lambda keep=gradient: run(program.table, 0, loss),
        "backward": lambda keep=gradient: run(program.table, after + 1, len(program.calls)),
    }


def theirs(op: Op, x: ndarray, w: ndarray) -> dict[str, Callable[[], object]]:
    """Return PyTorch's operation without a tape, and its gradient."""
    with_tape = [torch.from_numpy(array).requires_grad_() for array in (x, w)]
    y = op(*with_tape)
    dy = torch.randn_like(y)

    def forward() -> object:
        with torch.inference_mode():
            return op(*with_tape)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(y, with_tape, dy, retain_graph=True, allow_unused=True),
    }


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS), metavar="NAME", help=", ".join(OPS))
    report = measure.Report(parser.parse_args())
    torch.set_num_threads(report.threads)
    random = np.random.default_rng(0)
    print(f"{'us':<20}" + "".join(f"{kind:>36}" for kind in ("forward", "backward")))
    for name in report.args.only:
        x_shape, w_shape, our_op, their_op = OPS[name]
        x, w = (random.uniform(0.1, 2, shape).astype(np.float32) for shape in (x_shape, w_shape))
        mine, other = ours(our_op, x, w), theirs(their_op, x, w)
        line = f"{name:<20}"
        for kind in ("forward", "backward"):
            times = report.alternate({"minidl": mine[kind], "PyTorch": other[kind]})
            us = {library: 1e6 * each.median for library, each in times.items()}
            line += f"{us['minidl']:>10.0f}, PyTorch {us['PyTorch']:>6.0f}: {us['PyTorch'] / us['minidl']:>5.2f}x"
            report.row(f"{name}-{kind}", us["PyTorch"] / us["minidl"], "times PyTorch")
        print(line, flush=True)
    report.finish()


if __name__ == "__main__":
    main()
