"""Speed of matrix products: every version from plain loops to the micro-kernel, and products of real networks.

    python bench/bench_matmul.py [--quick] [--json] [--threads 2]

Measurements alternate with NumPy (OpenBLAS), PyTorch, and the upper limit: a loop of multiply-adds on registers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

# NumPy's OpenBLAS treats recent AMD chips as Haswell. Select its kernels for the full vector width, and let it use all
# threads (minidl.engine.jit would limit it to one). Both must be set before NumPy is imported.
os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(os.cpu_count()))
sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

import numpy as np

from minidl.kernels.matmul import cpu, ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

SQUARES = ((128, ">= 75"), (256, ">= 92"), (512, ">= 92"), (1024, ">= 92"), (2048, ">= 92"))
LAYERS = [(rows, depth, columns) for depth, columns in ((784, 512), (512, 512), (512, 10)) for rows in (128, 32, 8)]
LAYERS += [(64, 3136, 512)]  # the first fully connected layer of LeNet
FEW = [(rows, 3136, 512) for rows in (1, 2, 3, 4, 8)]  # the same layer in a prediction of a few images
STEP = 512  # rows, columns and depth of the product that `rungs` measures

Call = Callable[[], object]


def calls(kind: str, rows: int, depth: int, columns: int) -> dict[str, Call]:
    """Return functions that compute one product in minidl, NumPy and PyTorch. kind: nn, nt or tn (t: transposed)."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for shape in ((rows, depth), (depth, columns)))
    left = np.ascontiguousarray(a.T) if kind[0] == "t" else a
    right = np.ascontiguousarray(b.T) if kind[1] == "t" else b
    out, bias = np.empty((rows, columns), np.float32), np.empty(0, np.float32)
    scratch = measure.aligned(getattr(cpu, f"{kind}_scratch")(rows, columns, depth))
    kernel = getattr(cpu, kind)
    found: dict[str, Call] = {"minidl": lambda: kernel(left, right, scratch, out)}
    if kind == "nn":
        found["minidl"] = lambda: cpu.nn(left, right, bias, False, bias, scratch, out)
    x, w, y = left.T if kind[0] == "t" else left, right.T if kind[1] == "t" else right, np.empty_like(out)
    found["NumPy"] = lambda: np.matmul(x, w, out=y)
    if torch is not None:
        tx, tw, ty = torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(np.empty_like(out))
        found["PyTorch"] = lambda: torch.mm(tx, tw, out=ty)
    return found


def rungs() -> dict[str, Call]:
    """Return the versions in kernels/matmul/ladder.py, and cpu.nn on all threads."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((STEP, STEP), np.float32) for _ in range(2))
    found: dict[str, Call] = {}
    for name, rung in ladder.RUNGS.items():
        out = np.empty((STEP, STEP), np.float32)
        found[name] = lambda rung=rung, out=out: rung(a, b, out)  # type: ignore[misc]
    return found | {"nn: the same on all threads": calls("nn", STEP, STEP, STEP)["minidl"]}


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    if torch is not None:
        torch.set_num_threads(report.threads)
    report.ladder(f"the ladder: {STEP} x {STEP} x {STEP}", rungs(), flops=2.0 * STEP**3)
    for size, goal in SQUARES[:3] if report.args.quick else SQUARES:
        for kind in ("nn", "nt", "tn"):
            share = report.ladder(f"{kind} {size} x {size} x {size}", calls(kind, size, size, size), 2.0 * size**3)
            report.row(f"gemm-{kind}-{size}", share["minidl"], "% of peak", goal)
    for rows, depth, columns in LAYERS[:3] if report.args.quick else LAYERS:
        # Forward pass, gradient of the input, gradient of the weights.
        for kind, m, k, n in (("nn", rows, depth, columns), ("nt", rows, columns, depth), ("tn", depth, rows, columns)):
            share = report.ladder(f"{kind} {m} x {k} x {n}", calls(kind, m, k, n), 2.0 * m * k * n)
            report.row(f"layer-{kind}-{m}x{k}x{n}", share["minidl"], "% of peak")
            others = [value for name, value in share.items() if name != "minidl"]
            report.row(f"layer-{kind}-{m}x{k}x{n}-ratio", share["minidl"] / max(others), "x best other")
    for rows, depth, columns in FEW[:1] if report.args.quick else FEW:
        weights = 4 * depth * columns  # bytes: each is read once, so memory is the limit
        name = f"nn {rows} x {depth} x {columns}"
        share = report.ladder(name, calls("nn", rows, depth, columns), traffic=float(weights), bytes_=weights)
        report.row(f"few-{name.replace(' ', '')}", share["minidl"], "% of copy")
    report.finish()


if __name__ == "__main__":
    main()
