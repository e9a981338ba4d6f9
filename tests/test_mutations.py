"""Random models, changed between two steps in every way a user can: recorded steps give the same bits as the tape."""

from __future__ import annotations

import os
import warnings

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_models import CLASSES, build, change
from tests.twins import Twins

EXAMPLES = int(os.environ.get("MINIDL_MUTATIONS", "60"))  # the number of random models

SMALL = st.integers(0, 15)
LAYERS = st.lists(st.tuples(SMALL, SMALL), max_size=6)
CHANGES = st.lists(st.tuples(SMALL, SMALL, SMALL, st.sampled_from((4, 4, 4, 3, 1, 0)), SMALL), min_size=1, max_size=6)


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 6, 7, 2)).astype(np.float32)
    y = rng.integers(CLASSES, size=count)
    if seed == 13 and count:
        y[0] = CLASSES  # an invalid label
    return x, y[: count - 1] if seed == 14 else y


@settings(max_examples=EXAMPLES)
@given(LAYERS, CHANGES)
def test_replay_equals_the_tape_after_random_changes(
    layers: list[tuple[int, int]], changes: list[tuple[int, int, int, int, int]]
) -> None:
    twins = Twins(lambda: build(layers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins.step(*images(4, 0))
        for place, kind, value, count, seed in changes:
            twins.change(lambda g, p=place, k=kind, v=value: change(g, p, k, v))
            for _ in range(1 + kind % 2):
                twins.step(*images(count, seed))
            if kind % 5 == 0 and count:
                twins.predict(images(count, seed)[0])
