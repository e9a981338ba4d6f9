"""Two equal models: one runs recorded steps, the other the tape. Each step must have the same effect on both."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import numpy as np

from minidl import nn, ops
from minidl.engine import random
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient, Prediction

Loss = Callable[[Tensor, np.ndarray], Tensor]


def plain(logits: Tensor, y: np.ndarray) -> Tensor:
    return ops.cross_entropy(logits, y)


def batch(
    count: int = 6, shape: tuple[int, ...] = (4,), classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape)).astype(np.float32), rng.integers(classes, size=count)


class Twins:
    """Two models with equal weights. build: returns a model and a loss; it is called twice with the same seed."""

    def __init__(self, build: Callable[[], tuple[nn.Module, Loss]]) -> None:
        self.pair = []
        for _ in range(2):
            nn.seed(1)
            np.random.seed(1)
            self.pair.append(Gradient(*build()))
        self.replayed, self.tape = self.pair
        self.prediction = Prediction(self.replayed.model)
        self.seed = 0

    def change(self, mutate: Callable[[Gradient], Any]) -> None:
        for gradient in self.pair:
            nn.seed(2)
            mutate(gradient)

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        """Compute a step with both. Assert that results, gradients, weights, statistics and random states are equal."""
        self.seed += 1
        one, other = self._run(self.replayed, x, y), self._run(self.tape, x, y)
        assert one == other

    def predict(self, x: np.ndarray) -> None:
        """Assert that a `Prediction` equals the output of the model in evaluation mode."""
        self.seed += 1
        found: list[Any] = []
        for gradient in self.pair:
            self.restart()
            try:
                with nn.evaluating(gradient.model):
                    y = self.prediction(x) if gradient is self.replayed else gradient.model(x).numpy()
                found.append(y.tobytes())
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        assert found[0] == found[1]

    def restart(self) -> None:
        """Restart all random generators."""
        random.seed(self.seed)
        np.random.seed(self.seed)
        python_random.seed(self.seed)

    def _run(self, gradient: Gradient, x: np.ndarray, y: np.ndarray) -> list[Any]:
        self.restart()
        try:
            found: Any = gradient(x, y) if gradient is self.replayed else gradient.by_tape(x, y)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        arena, statistics = gradient.model.flatten(), gradient.model.statistics
        return [
            repr(found),  # as text, nan equals nan
            None if isinstance(found, str) else arena.grad.tobytes(),
            arena.theta.tobytes(),
            None if statistics is None else statistics.theta.tobytes(),
            random.random_state(),
            np.random.random(),
            python_random.random(),
        ]  # fmt: skip
