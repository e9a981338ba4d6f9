"""Assign samples to P replicas. The functions are pure: all replicas compute the same without communication."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError


def apportion(total: int, weights: ArrayLike) -> np.ndarray:
    """Divide `total` in proportion to `weights` (P,): return whole numbers (P,) that sum to `total`.

    Largest-remainder method: each number is the integer part of its quota. Those with the largest fractional parts
    are then increased by 1, the first ones if several are equal, until the sum is `total`. Raises ConfigError if a
    weight is negative or not finite, or all are 0.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not (weights.size and np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise ConfigError(f"weights {weights.tolist()} must be finite, not negative, and not all 0")
    quotas = total * (weights / weights.sum())
    counts = np.floor(quotas).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:left]] += 1
    return counts


def equal_lengths(n: int, replicas: int) -> list[int]:
    """Return the lengths of `replicas` slices of n samples. The lengths differ by at most 1."""
    if replicas < 1:
        raise ConfigError(f"{replicas} replicas: expected at least 1")
    return apportion(n, np.ones(replicas)).tolist()


def shard(n: int, lengths: Sequence[int], rank: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples of replica `rank` in this epoch: indices (lengths[rank],) into a set of n samples.

    Each epoch draws a new permutation of the samples and cuts it into slices of these lengths. Replica r gets slice r.
    The lengths may change between epochs. If they sum to less than n, the end of the permutation is not used in this
    epoch. Raises ConfigError if rank or lengths are out of range.

    Use: `Loader(x, y, batch_size, indices=shard(...)).epoch(epoch)`.
    """
    if not 0 <= rank < len(lengths):
        raise ConfigError(f"rank {rank} has no shard: there are {len(lengths)} lengths")
    if min(lengths) < 0 or sum(lengths) > n:
        raise ConfigError(f"shard lengths {list(lengths)}: expected numbers from 0 that sum to at most {n} samples")
    start = sum(lengths[:rank])
    return generator(Purpose.SHARD, seed, epoch).permutation(n)[start : start + lengths[rank]]


def dirichlet_shards(labels: np.ndarray, replicas: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Return label-skewed shards: sorted indices for each replica. Each sample is in one shard; no shard is empty.

    Each class is divided among the replicas in proportions drawn from Dirichlet(alpha, ..., alpha). A large alpha
    gives every replica nearly the same mixture of classes; alpha near 0 gives nearly all of a class to one replica
    (Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks", section 4).

    Raises ConfigError if alpha is not positive and finite or there are fewer samples than replicas.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha {alpha} must be a positive number")
    if not 1 <= replicas <= len(labels):
        raise ConfigError(f"{len(labels)} samples cannot be divided among {replicas} replicas")
    rng = generator(Purpose.SKEWED_SHARD, seed)
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        counts = apportion(len(members), rng.dirichlet(np.full(replicas, alpha)))
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)[:-1]), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        if not part:  # a replica without data cannot train: move one sample from the largest shard
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
