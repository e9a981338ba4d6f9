"""Speed of dropout, compared with PyTorch.

    python bench/bench_dropout.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

from minidl.engine.device import Device
from minidl.kernels.dropout import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    if torch is not None:
        torch.set_num_threads(report.threads)
    for bytes_ in (measure.SMALL, measure.LARGE):
        where = f"dropout, {bytes_ / 1e6:.3g} MB"
        size = bytes_ // 4 // 64 * 64
        x, y = measure.aligned(size), measure.aligned(size)
        functions = measure.rungs(ladder.RUNGS, x, 0.3, 1, 0, y)
        functions["minidl"] = measure.replay(Device("cpu").dropout.dropout, x, 0.3, 1, 0, y)
        if torch is not None:
            tensor = torch.from_numpy(x)
            functions["PyTorch"] = lambda tensor=tensor: torch.nn.functional.dropout(tensor, 0.3)
        shares = report.ladder(where, functions, traffic=8.0 * size, bytes_=bytes_)
        report.row(where, shares["minidl"], "% of copy", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
