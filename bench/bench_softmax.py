"""Speed of softmax (% of the fastest copy) and cross-entropy (microseconds per batch), on one thread.

    python bench/bench_softmax.py [--quick] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from minidl.engine.device import Device
from minidl.kernels.softmax import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> None:
    args = measure.arguments(__doc__).parse_args()
    args.threads = 1
    report = measure.Report(args)
    kernels = Device("cpu").softmax
    if torch is not None:
        torch.set_num_threads(1)
    for shape in ((8192, 10), (256, 1000)):
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        y = np.empty_like(x)
        functions = measure.rungs(ladder.RUNGS, x, y)
        if torch is not None:
            tensor = torch.from_numpy(x)
            functions["PyTorch"] = lambda tensor=tensor: torch.softmax(tensor, 1)
        name = f"softmax, {shape[0]} x {shape[1]}"
        shares = report.ladder(f"the ladder: {name}", functions, traffic=2.0 * x.nbytes, bytes_=x.nbytes)
        report.row(name, shares["4 blocks of rows"], "% of copy")
    for rows, classes in ((8, 10), (128, 10), (64, 1000)):
        random = np.random.default_rng(0)
        logits = random.standard_normal((rows, classes), np.float32)
        labels = random.integers(classes, size=rows)
        p, d, loss, one = np.empty_like(logits), np.empty_like(logits), np.empty(1, "f"), np.ones(1, "f")
        functions = {
            "loss": measure.replay(kernels.cross_entropy, logits, labels, 0.0, p, loss),
            "gradient": measure.replay(kernels.cross_entropy_backward, one, p, labels, 0.0, d),
            "correct": measure.replay(kernels.correct, logits, labels, np.zeros(1, np.int64)),
        }
        if torch is not None:
            x, y = torch.from_numpy(logits), torch.from_numpy(labels)
            functions["PyTorch's loss"] = lambda x=x, y=y: torch.nn.functional.cross_entropy(x, y)
        for name, times in report.alternate(functions).items():
            report.row(f"{name}, {rows} x {classes}", 1e6 * times.median, "us")
    report.finish()


if __name__ == "__main__":
    main()
