"""Time that a new batch size costs: two recordings, their comparison, fusion, planning and the table.

    python bench/recording.py
    python bench/recording.py resnet20 --profile       where the time goes, by function

The kernels are compiled before, with other batch sizes. Each line shows the median and the best of several new sizes,
the number of calls in the program, and the size of the workspace for batch size 8.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from statistics import median
from time import perf_counter

import numpy as np

from minidl import models, nn, ops
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient

MODELS = {"mlp": (28, 28, 1), "lenet": (28, 28, 1), "vgg": (32, 32, 3), "resnet20": (32, 32, 3), "resnet110": (32, 32, 3)}
STEPS, FEATURES = 200, 16  # of the recurrent network


class RNN(nn.Module):
    """A recurrent network, h = relu(W x_t + U h), unrolled in `forward`: x (B, steps, features)."""

    def __init__(self) -> None:
        self.inputs, self.hidden = nn.Linear(FEATURES, 32), nn.Linear(32, 32, bias=False)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = ops.relu(self.inputs(x[:, 0]))
        for step in range(1, x.shape[1]):
            h = ops.relu(self.inputs(x[:, step]) + self.hidden(h))
        return self.last(h)


def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model and the shape of one of its inputs."""
    nn.seed(0)
    return (RNN(), (STEPS, FEATURES)) if name == "rnn" else (models.build(name, MODELS[name], 10), MODELS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS, "rnn"])
    parser.add_argument("--sizes", type=int, default=7, help="number of new batch sizes")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for name in given.models:
        model, shape = build(name)
        gradient = Gradient(model, ops.cross_entropy)

        def prepare(size: int) -> float:
            """Return the seconds that batches of this size cost before the first step."""
            x, y = np.zeros((size, *shape), np.float32), np.arange(size) % 10
            start = perf_counter()
            gradient.prepare(x, y)
            return perf_counter() - start

        prepare(8), prepare(9)
        program = next(iter(gradient.programs.values()))
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        seconds = [prepare(10 + i) for i in range(given.sizes)]
        profile.disable()
        print(
            f"{name:10} {median(seconds) * 1e3:8.1f} ms, best {min(seconds) * 1e3:8.1f} ms; "
            f"{len(program.calls)} calls; workspace {program.workspace_size:,} bytes"
        )
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
