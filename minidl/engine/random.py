"""Reproducible random numbers: a generator for initial weights, a counter for dropout.

Dropout's random numbers are a fixed sequence, chosen by a seed. Each call of a dropout layer uses the next numbers, one
for each element. The counter, `offset`, is the position in this sequence: a checkpoint only stores (seed, offset).

All threads share one generator and one counter. Within `isolated`, a thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from minidl.checked import whole
from minidl.engine.concurrency import new_lock
from minidl.engine.device import forbid_recording, recording

REFUSAL = "it uses minidl's random generator"  # dropout's are the only random numbers that a replay can draw


class _Source:
    """A generator, and a position in dropout's sequence."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.seed, self.offset = int(seed), 0


_shared = _Source(0)
_thread = threading.local()  # .source replaces _shared in this thread
_advance = new_lock()  # two threads must not draw the same numbers


def _source() -> _Source:
    return getattr(_thread, "source", _shared)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Within the `with` block, this thread has its own generator and counter, started by `seed`.

    Afterwards the thread continues with its previous generator and counter.
    """
    before = getattr(_thread, "source", None)
    _thread.source = _Source(seed)
    try:
        yield
    finally:
        if before is None:
            del _thread.source
        else:
            _thread.source = before


def seed(value: int) -> None:
    """Restart the generator and the counter: after seed(n), initial weights and dropout are reproducible.

    Raises ConfigError unless the value is a whole number of 0 or more.
    """
    forbid_recording(REFUSAL)
    vars(_source()).update(vars(_Source(whole("seed", "value", value))))


def generator() -> np.random.Generator:
    """Return the generator that draws initial weights."""
    forbid_recording(REFUSAL)
    return _source().generator


def draw(count: int) -> tuple[int, int]:
    """Return (seed, offset) of the next `count` numbers of dropout's sequence, and advance the offset.

    While a step is recorded, return placeholders and do not advance. Each replay of the step advances the offset.
    """
    source = _source()
    if recording.recorder is not None:
        return recording.recorder.draw(source.seed, count)
    with _advance:
        start = source.seed, source.offset
        source.offset += count
    return start


def random_state() -> dict[str, int]:
    """Return the position in dropout's sequence: seed and offset."""
    forbid_recording(REFUSAL)
    source = _source()
    return {"seed": source.seed, "offset": source.offset}


def set_random_state(state: dict[str, int]) -> None:
    """Continue dropout's sequence at a position that `random_state` returned."""
    forbid_recording(REFUSAL)
    source = _source()
    source.seed, source.offset = int(state["seed"]), int(state["offset"])
