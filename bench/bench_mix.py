"""Speed of mixing two models, relative to memory bandwidth.

    python bench/bench_mix.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

from minidl.engine.device import Device
from minidl.kernels.mix import ladder


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    for bytes_ in (measure.SMALL, measure.LARGE):
        where = f"mix, {bytes_ / 1e6:.3g} MB"
        size = bytes_ // 4 // 64 * 64
        theta, other = measure.aligned(size, 0.1), measure.aligned(size, 0.2)
        functions = measure.rungs(ladder.RUNGS, theta, other, 0.5)
        functions["minidl"] = measure.replay(Device("cpu").mix.mix, theta, other, 0.5)
        shares = report.ladder(where, functions, traffic=12.0 * size, bytes_=bytes_)
        report.row(where, shares["minidl"], "% of copy", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
