"""Which samples belong to which of P replicas. Pure functions: every replica computes the same answer alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError


def apportion(total: int, weights: ArrayLike) -> np.ndarray:
    """Divide `total` things in proportion to `weights` (P,): whole numbers (P,) that sum to `total`.

    Largest remainder: each gets the whole part of its quota, what is left goes to the largest fractions (the first
    of equals). No one is further than 1 from its quota.
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
    """Lengths of `replicas` slices of n samples that differ by at most 1."""
    if replicas < 1:
        raise ConfigError(f"{replicas} replicas: expected at least 1")
    return apportion(n, np.ones(replicas)).tolist()


def shard(n: int, lengths: Sequence[int], rank: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of replica `rank` in this epoch: indices (lengths[rank],) into a set of n samples.

    Replica r's shard is the r-th contiguous slice of one permutation that is drawn anew for each epoch, so shards
    never overlap, and lengths may change between epochs as speeds do. When the lengths sum to less than n, the end
    of the permutation rests for this epoch. Use: `Loader(x, y, batch_size, indices=shard(...)).epoch(epoch)`.
    """
    if not 0 <= rank < len(lengths):
        raise ConfigError(f"rank {rank} has no shard: there are {len(lengths)} lengths")
    if min(lengths) < 0 or sum(lengths) > n:
        raise ConfigError(f"shard lengths {list(lengths)} must not be negative and sum to at most {n} samples")
    start = sum(lengths[:rank])
    return generator(Purpose.SHARD, seed, epoch).permutation(n)[start : start + lengths[rank]]


def dirichlet_shards(labels: np.ndarray, replicas: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Label-skewed shards: sorted indices, one array for each replica; every sample is in exactly one, none is empty.

    Each class is divided among the replicas by proportions drawn from Dirichlet(alpha, ..., alpha). A large alpha
    gives every replica the same mixture of classes; alpha near 0 gives each class to one replica.
    (Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks", section 4.)
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
        if not part:  # a replica without data could not train: it gets one sample of the richest
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
