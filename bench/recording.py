"""Time to record a training step for a new batch size: two recordings, comparison, fusion, planning, table of calls.

    python bench/recording.py
    python bench/recording.py resnet20 --profile       where the time goes, by function

The kernels are compiled beforehand, with other batch sizes. Each line shows the median and the best of several new
sizes, the number of calls in the program, and the size of the workspace for batch size 8.
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

SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1)}  # of images; (32, 32, 3) for the other models
MODELS = ("mlp", "lenet", "vgg", "resnet20", "resnet110", "rnn")
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
    if name == "rnn":
        return RNN(), (STEPS, FEATURES)
    shape = SHAPES.get(name, (32, 32, 3))
    return models.build(name, shape, 10), shape


def prepare(gradient: Gradient, shape: tuple[int, ...], size: int) -> float:
    """Return the seconds that batches of this size cost before the first step."""
    x, y = np.zeros((size, *shape), np.float32), np.arange(size) % 10
    start = perf_counter()
    gradient.prepare(x, y)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", type=int, default=7, help="number of new batch sizes")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for name in given.models:
        model, shape = build(name)
        gradient = Gradient(model, ops.cross_entropy)
        prepare(gradient, shape, 8), prepare(gradient, shape, 9)
        program = next(iter(gradient.programs.values()))
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        seconds = [prepare(gradient, shape, 10 + i) for i in range(given.sizes)]
        profile.disable()
        print(
            f"{name:10} {median(seconds) * 1e3:8.1f} ms, best {min(seconds) * 1e3:8.1f} ms; "
            f"{len(program.calls)} calls; workspace {program.workspace_size:,} bytes"
        )
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
