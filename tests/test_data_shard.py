"""Shards: each replica computes its part of the data without communication, and the parts are a partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.data import apportion, dirichlet_shards, equal_lengths, shard
from minidl.errors import ConfigError

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 0)


@given(total=st.integers(0, 10**6), weights=WEIGHTS)
def test_apportion_keeps_the_total_and_the_quotas(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert counts.sum() == total and counts.min() >= 0
    assert np.abs(counts - total * np.array(weights) / sum(weights)).max() <= 1 + 1e-6


def test_apportion_gives_the_rest_to_the_largest_remainders() -> None:
    assert apportion(10, [0.70, 0.25, 0.05]).tolist() == [7, 3, 0]
    assert equal_lengths(11, 4) == [3, 3, 3, 2]


@given(data=st.data(), n=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 99))
def test_shards_are_a_partition(data: st.DataObject, n: int, seed: int, epoch: int) -> None:
    weights = data.draw(WEIGHTS)
    lengths = apportion(n, weights).tolist()
    shards = [shard(n, lengths, rank, seed, epoch) for rank in range(len(lengths))]
    assert [len(part) for part in shards] == lengths
    assert sorted(np.concatenate(shards)) == list(range(n))


def test_shards_are_slices_of_one_permutation_that_changes_with_the_epoch() -> None:
    whole = shard(50, [50], 0, seed=1, epoch=3)
    assert np.concatenate([shard(50, [20, 5, 25], rank, 1, 3) for rank in range(3)]).tolist() == whole.tolist()
    assert shard(50, [20, 5], 1, 1, 3).tolist() == whole[20:25].tolist()
    assert whole.tolist() != shard(50, [50], 0, seed=1, epoch=4).tolist()
    assert whole.tolist() != shard(50, [50], 0, seed=2, epoch=3).tolist()


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    data=st.data(),
    alpha=st.floats(1e-9, 1e6),
    seed=st.integers(0, 99),
)
def test_dirichlet_shards_are_a_partition_without_empty_parts(
    labels: list[int], data: st.DataObject, alpha: float, seed: int
) -> None:
    replicas = data.draw(st.integers(1, len(labels)))
    shards = dirichlet_shards(np.array(labels), replicas, alpha, seed)
    assert len(shards) == replicas and min(map(len, shards)) >= 1
    assert sorted(np.concatenate(shards)) == list(range(len(labels)))


def test_alpha_decides_the_skew() -> None:
    labels = np.arange(4000) % 10

    def largest_class_share(alpha: float) -> float:
        shards = dirichlet_shards(labels, 8, alpha, seed=0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in shards]))

    assert largest_class_share(1000.0) < 0.13 < 0.3 < largest_class_share(0.1) < largest_class_share(0.001)


@pytest.mark.parametrize(
    "call",
    [
        lambda: apportion(3, []),
        lambda: apportion(3, [0.0, 0.0]),
        lambda: apportion(3, [1.0, float("nan")]),
        lambda: apportion(3, [1.0, -1.0]),
        lambda: equal_lengths(3, 0),
        lambda: shard(10, [5, 6], 0, 0, 0),
        lambda: shard(10, [-1, 6], 0, 0, 0),
        lambda: shard(10, [5, 5], 2, 0, 0),
        lambda: shard(10, [5, 5], 0, -1, 0),
        lambda: dirichlet_shards(np.zeros(3), 4, 1.0, 0),
        lambda: dirichlet_shards(np.zeros(3), 2, 0.0, 0),
        lambda: dirichlet_shards(np.zeros(3), 2, float("inf"), 0),
    ],
)
def test_out_of_range(call: object) -> None:
    with pytest.raises(ConfigError):
        call()  # type: ignore[operator]
