"""Activations: polynomials in vector registers against one call of the mathematics library for each element.

    python bench/bench_activation.py [--quick] [--json] [--threads 1]

GB/s of what is read and written, as a share of the fastest copy in the same run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it chooses the instruction set)

import numpy as np

from minidl.device import Device
from minidl.jit import jit, parallel_jit, prange

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

PART = 16384


@jit
def naive_tanh(x: np.ndarray, y: np.ndarray) -> None:
    for i in range(x.size):
        y[i] = math.tanh(x[i])


@parallel_jit
def naive_tanh_on_threads(x: np.ndarray, y: np.ndarray) -> None:
    for part in prange((x.size + PART - 1) // PART):
        naive_tanh(x[part * PART : (part + 1) * PART], y[part * PART : (part + 1) * PART])


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    kernels = Device("cpu").activation
    if torch is not None:
        torch.set_num_threads(report.threads)
    for bytes_ in (measure.SMALL, measure.LARGE):
        size = bytes_ // 4 // 64 * 64
        x, y, dx = (measure.aligned(size) for _ in range(3))
        x[:] = np.random.default_rng(0).standard_normal(size, np.float32)
        for name in ("relu", "tanh", "sigmoid", "silu", "gelu"):
            functions = {"minidl": measure.replay(getattr(kernels, name), x, y)}
            if name == "tanh":
                naive = {"a call for each element": naive_tanh, "the same on all threads": naive_tanh_on_threads}
                for title, function in naive.items():
                    functions[title] = lambda function=function, x=x, y=y: function(x, y)
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
