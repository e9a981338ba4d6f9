"""Random generators without global state: each depends only on (seed, epoch, batch, purpose)."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from minidl.checked import whole
from minidl.errors import ConfigError


class Purpose(IntEnum):
    """The use of random numbers. Two purposes never share a stream. Changing a value changes the results of runs."""

    ORDER = 0
    AUGMENT = 1
    TEST_SPLIT = 2
    VALIDATION_SPLIT = 3
    SHARD = 4
    SKEWED_SHARD = 5
    SYNTHETIC = 6
    TOPOLOGY = 7
    REPLICA = 8
    GOSSIP = 9
    MASK = 10
    FLIP = 11


def generator(purpose: Purpose, seed: int, epoch: int = 0, batch: int = 0) -> np.random.Generator:
    """Return a new generator. The same arguments give the same numbers, regardless of earlier draws.

    epoch, batch: callers may pass two other numbers, such as rank and step. Raises ConfigError if the seed is not in
    [0, 2^32).
    """
    # NumPy splits a number of 2^32 or more into two words, which would shift the words of epoch, batch and purpose.
    if not 0 <= whole("data", "seed", seed, -math.inf) < 2**32:
        raise ConfigError(f"seed {seed} is out of range: give a whole number from 0 to {2**32 - 1}")
    return np.random.default_rng([seed, whole("data", "epoch", epoch), batch, purpose])
