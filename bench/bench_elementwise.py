"""Speed of elementwise kernels relative to memory bandwidth, and of each version of `affine`.

    python bench/bench_elementwise.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

import numpy as np

from minidl.engine.device import Device
from minidl.kernels.elementwise import ladder


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    kernels = Device("cpu").elementwise
    for bytes_ in (measure.SMALL, measure.LARGE):
        where = f"{bytes_ / 1e6:.3g} MB"
        size = bytes_ // 4 // 64 * 64
        a, b, out = (measure.aligned(size) for _ in range(3))
        off = measure.aligned(size + 16)[4 : size + 4]  # starts inside a cache line, so ordinary stores are used
        add = {
            "NumPy": lambda a=a, b=b, out=out: np.add(a, b, out=out),
            "minidl, not cache-line aligned": measure.replay(kernels.add, a, b, off),
            "minidl": measure.replay(kernels.add, a, b, out),
        }
        others = {
            "accumulate": (measure.replay(kernels.accumulate, a, out), 3),
            "affine": (measure.replay(kernels.affine, a, 0.5, 1.0, out), 2),
            "exp": (measure.replay(kernels.exp, a, out), 2),
            "log": (measure.replay(kernels.log, a, out), 2),
            "fill": (measure.replay(kernels.fill, 1.0, out), 1),
        }
        steps = measure.rungs(ladder.RUNGS, a, 0.5, 1.0, out)
        report.ladder(f"the ladder: 0.5 x + 1, {where}", steps, traffic=8.0 * size, bytes_=bytes_)
        shares = report.ladder(f"add, {where}", add, traffic=12.0 * size, bytes_=bytes_)
        report.row(f"add, {where}", shares["minidl"], "% of copy", ">= 90")
        for name, (function, vectors) in others.items():
            shares = report.ladder(f"{name}, {where}", {name: function}, traffic=4.0 * vectors * size, bytes_=bytes_)
            report.row(f"{name}, {where}", shares[name], "% of copy", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
