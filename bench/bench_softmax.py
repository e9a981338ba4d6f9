"""Softmax-cross-entropy, microseconds for a batch, beside PyTorch (one thread each).

    python bench/bench_softmax.py [--quick] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it chooses the instruction set)

import numpy as np

from minidl.device import Device

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    kernels = Device("cpu").softmax
    if torch is not None:
        torch.set_num_threads(1)
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
