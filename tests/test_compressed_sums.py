"""Sums along a ring, and sums of codes: the same bits on all ranks, nothing lost, and how much is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collectives import draw, groupings, simulated

from minidl.comm import codecs
from minidl.comm.codecs import Feedback
from minidl.comm.fabric.base import CHUNK, Fabric, PeerLost
from minidl.comm.fabric.wire import Coded

NAMES = ("bf16", "int8", "sign", "topk:0.1", "randk:0.1")
Sums = list[tuple[list[np.ndarray], np.ndarray, int]]  # for each rank: its sums, what it has lost, bytes sent


def summed(nodes: Sequence[int], size: int, name: str, ring: bool, times: int = 3) -> Sums:
    """Sum float64 vectors of all ranks several times, as codes."""

    def work(fabric: Fabric) -> Any:
        codec = codecs.build(name)
        feedback, sums = Feedback(codec, np.zeros(size)) if codec else None, []
        for time in range(times):
            vector = draw(100 * time + fabric.rank, size, np.float64)
            wire = [Coded(feedback, vector, 0, time)] if feedback else []
            fabric.group(fabric.replicas).allreduce(vector, *wire, ring=ring)
            sums.append(vector)
        return sums, feedback.error if feedback else np.zeros(size), sum(fabric.stats.sent_bytes)

    return simulated(nodes, work)[0]


@settings(max_examples=40, deadline=None)
@given(groupings(), st.sampled_from([0, 1, 7, 300, 30_001, CHUNK // 8 + 3]))
def test_a_sum_along_a_ring_has_the_order_of_the_ring(nodes: list[int], size: int) -> None:
    """Share s begins at rank s."""
    ranks = len(nodes)
    vectors = [np.array_split(draw(rank, size, np.float64), ranks) for rank in range(ranks)]
    shares = []
    for share in range(ranks):
        total = vectors[share][share]
        for step in range(1, ranks):
            total = vectors[(share + step) % ranks][share] + total
        shares.append(total)
    for sums, _, _ in summed(nodes, size, "none", ring=True, times=1):
        np.testing.assert_array_equal(sums[0], np.concatenate(shares))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", ["none", "topk:0.1"])
@settings(max_examples=20, deadline=None)
@given(nodes=groupings(), size=st.sampled_from([0, 1, 300, 30_001, CHUNK // 8 + 3]))
def test_a_summand_that_stays_as_it_is_gives_the_same_bits(name: str, ring: bool, nodes: list[int], size: int) -> None:
    """Of `allreduce` and of `reduce`, whatever the vector contained before."""

    def work(fabric: Fabric, apart: bool) -> list[bytes]:
        group, codec, found = fabric.group(fabric.replicas), codecs.build(name), []
        for collective in (partial(group.allreduce, ring=ring), group.reduce):
            own = draw(fabric.rank, size, np.float64)
            vector = np.full(size, np.nan) if apart else own.copy()
            wire = [Coded(Feedback(codec, np.zeros(size)), vector, 0, 0)] if codec else []
            collective(vector, *wire, **({"own": own} if apart else {}))
            assert np.array_equal(own, draw(fabric.rank, size, np.float64))
            if collective != group.reduce or fabric.rank == 0:
                found.append(vector.tobytes())
        return found

    assert simulated(nodes, partial(work, apart=True))[0] == simulated(nodes, partial(work, apart=False))[0]


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(nodes=groupings(), size=st.sampled_from([1, 300, 20_001]))
def test_sums_of_codes_have_the_same_bits_on_all_ranks_and_lose_nothing(
    name: str, ring: bool, nodes: list[int], size: int
) -> None:
    found = summed(nodes, size, name, ring)
    for time, first in enumerate(found[0][0]):
        assert all(np.array_equal(sums[time], first) for sums, _, _ in found)
    exact = sum(draw(100 * time + rank, size, np.float64) for time in range(3) for rank in range(len(nodes)))
    lost = sum(error for _, error, _ in found)
    np.testing.assert_allclose(sum(found[0][0]) + lost, exact, rtol=0, atol=1e-11)
    if len(nodes) == 1:
        assert not lost.any(), "nothing is sent"


@pytest.mark.parametrize(
    ("name", "ratio"), [("bf16", 2), ("int8", 4), ("sign", 31), ("topk:0.01", 66), ("randk:0.01", 100)]
)
@pytest.mark.parametrize("ring", [False, True])
def test_bytes_are_counted_after_compression(name: str, ratio: float, ring: bool) -> None:
    """The vectors are float64, so a number that is sent as it is has 8 bytes."""
    size = 8 * 4096 * 8
    plain, short = (sum(sent for _, _, sent in summed([0] * 8, size, each, ring, 1)) for each in ("none", name))
    assert plain == 2 * 7 * 8 * size
    assert plain / short == pytest.approx(2 * ratio, rel=0.05)


def test_a_ring_sends_the_same_from_each_rank_and_only_to_the_next() -> None:
    def work(fabric: Fabric) -> list[int]:
        fabric.group(fabric.replicas).allreduce(np.ones(6000, np.float32), ring=True)
        return list(fabric.stats.sent_bytes)

    found, _ = simulated([0, 0, 1, 1, 2, 2], work)
    for rank, row in enumerate(found):
        assert row == [(peer == (rank + 1) % 6) * 2 * 5 * 4000 for peer in range(6)]


@pytest.mark.parametrize("name", ["none", "topk:0.1"])
def test_a_death_ends_a_ring_on_all_ranks(name: str) -> None:
    def work(fabric: Fabric) -> str:
        fabric.elapse("gradient", fabric.rank >= 3)
        codec, vector = codecs.build(name), np.ones(5000, np.float32)
        wire = [Coded(Feedback(codec, np.zeros_like(vector)), vector, 0, 0)] if codec else []
        with pytest.raises(PeerLost, match="replica 3 died"):
            fabric.group(range(5)).allreduce(vector, *wire, ring=True)
        return "noticed"

    found, _ = simulated([0] * 5, work, "deaths = [{rank = 3, time = 0.5}]\n")
    assert found == ["noticed"] * 3 + [None, "noticed"]


