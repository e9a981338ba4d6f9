"""Reproducible random numbers: a generator for initial weights, a counter for dropout.

The generator is used while a model is built. The counter is used in training: each call of a dropout layer uses the
next numbers of a fixed sequence, one for each element, so a checkpoint needs to store only (seed, offset).
"""

from __future__ import annotations

import numpy as np

from minidl.engine.device import recording

_state = {"seed": 0, "offset": 0}
_generator = np.random.default_rng(0)


def seed(value: int) -> None:
    """Restart the generator and the counter: after seed(n), initial weights and dropout are reproducible."""
    global _generator
    _generator = np.random.default_rng(value)
    _state.update(seed=int(value), offset=0)


def generator() -> np.random.Generator:
    """Return the generator that draws initial weights."""
    return _generator


def draw(count: int) -> tuple[int, int]:
    """Return (seed, offset) of the next `count` numbers of dropout's sequence, and advance the offset.

    While a step is recorded, return placeholders and leave the offset; each run of the recorded step advances it.
    """
    recorder = getattr(recording, "recorder", None)
    if recorder is not None:
        return recorder.draw(_state["seed"], count)
    offset = _state["offset"]
    _state["offset"] += count
    return _state["seed"], offset


def random_state() -> dict[str, int]:
    """Return the position in dropout's sequence: seed and offset."""
    return dict(_state)


def set_random_state(state: dict[str, int]) -> None:
    """Continue dropout's sequence at a position that `random_state` returned."""
    _state.update(seed=int(state["seed"]), offset=int(state["offset"]))
