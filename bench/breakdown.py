"""Time per kernel of a training step without the optimizer's update: each recorded call is timed separately.

    python bench/breakdown.py resnet20 --batch 128
    python bench/breakdown.py vgg --calls          every call in order, instead of one line per kernel

The step is repeated 15 times (--repeat), and each call's shortest time is used. So the sum is usually slightly less
than the time of any single step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from time import perf_counter

import numpy as np

from minidl import models, nn, ops
from minidl.program.call import run
from minidl.program.replay import Gradient

SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()

    nn.seed(0)
    shape = SHAPES.get(given.model, (32, 32, 3))
    model = models.build(given.model, shape, 10)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((given.batch, *shape)).astype(np.float32), rng.integers(10, size=given.batch)
    nn.fit_whitening(model, x)
    gradient = Gradient(model, lambda logits, y: ops.cross_entropy(logits, y))
    gradient(x, y)
    (program,) = gradient.programs.values()
    best = np.full(len(program.calls), np.inf)
    for _ in range(given.repeat):
        for i in range(len(program.calls)):
            start = perf_counter()
            run(program.table, i, i + 1)
            best[i] = min(best[i], perf_counter() - start)

    total = best.sum()
    if given.calls:
        for name, shapes, seconds in zip(program.calls, program.shapes, best, strict=True):
            print(f"{seconds * 1e3:8.3f} ms {seconds / total:6.1%}  {name:28} {' '.join(map(str, shapes))}")
    else:
        times, counts = defaultdict(float), defaultdict(int)
        for name, seconds in zip(program.calls, best, strict=True):
            times[name] += seconds
            counts[name] += 1
        for name, seconds in sorted(times.items(), key=lambda item: -item[1]):
            print(f"{seconds * 1e3:8.3f} ms {seconds / total:6.1%}  {counts[name]:3} x {name}")
    print(f"{total * 1e3:8.3f} ms in total; workspace {program.workspace_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
