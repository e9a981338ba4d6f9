"""Collectives: the order of sums, what crosses the links between nodes, groups. In a simulation, and with real jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mpi import results

from minidl.comm.cluster import parse
from minidl.comm.fabric.base import CHUNK, BufferSpec, Fabric, PeerLost
from minidl.comm.fabric.group import SHORTEST_SHARE
from minidl.comm.transport.sim import Simulation
from minidl.errors import ConfigError

Vectors = list[np.ndarray]


def simulated(nodes: Sequence[int], work: Callable[[Fabric], Any], deaths: str = "") -> tuple[list[Any], float]:
    """Run `work` on every rank of a simulated cluster. Return its results (None: dead ranks), and the virtual seconds.

    nodes[r]: the node of rank r; nodes are numbered in the order of their first ranks. A gradient takes 1 s per image.
    """
    counts = np.bincount(np.array(nodes)).tolist()
    tables = ", ".join(f'{{name = "{node}", devices = {["core"] * count}}}' for node, count in enumerate(counts))
    cluster = parse(f"{deaths}devices.core.flops = 1e6\nnodes = [{tables}]\nbetween = {{alpha = 1e-4, beta = 1e-8}}")
    simulation = Simulation(cluster, len(nodes), flops=1e6)
    simulation.place = simulation.place._replace(nodes=tuple(nodes))
    fabrics = []
    for transport in simulation.transports:
        transport.nodes = tuple(nodes)
        transport.join(BufferSpec(), "layout")
        fabrics.append(Fabric(transport))
    found = simulation.run({rank: lambda fabric=fabric: work(fabric) for rank, fabric in enumerate(fabrics)})
    return [found.get(rank) for rank in range(len(nodes))], simulation.time


def draw(rank: int, size: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def summed(size: int, dtype: Any = np.float32) -> Callable[[Fabric], tuple[np.ndarray, list[int]]]:
    """Return work that sums vectors of all ranks; it returns the sum, and the bytes sent to each rank."""

    def work(fabric: Fabric) -> tuple[np.ndarray, list[int]]:
        vector = draw(fabric.rank, size, dtype)
        fabric.allreduce(vector)
        return vector, list(fabric.stats.sent_bytes)

    return work


def heap(vectors: Vectors, at: int = 0) -> np.ndarray:
    """Return the sum in the order of a binary tree: (parent + left subtree) + right subtree."""
    total = vectors[at]
    for child in (2 * at + 1, 2 * at + 2):
        if child < len(vectors):
            total = total + heap(vectors, child)
    return total


def expected(nodes: Sequence[int], vectors: Vectors) -> np.ndarray:
    """Return the sum over nodes of the sums within each node, both in the order of a binary tree.

    The definition differs from the code: a head adds the sums of other nodes to the sum of its own node.
    """
    ordered = sorted(set(nodes), key=list(nodes).index)
    return heap([heap([vectors[rank] for rank in range(len(nodes)) if nodes[rank] == node]) for node in ordered])


def crossing(nodes: Sequence[int], sent: list[list[int]]) -> dict[int, int]:
    """Return the bytes that each node sends to other nodes."""
    out = dict.fromkeys(nodes, 0)
    for rank, row in enumerate(sent):
        out[nodes[rank]] += sum(count for peer, count in enumerate(row) if nodes[peer] != nodes[rank])
    return out


def run(nodes: Sequence[int], size: int, dtype: Any = np.float32) -> tuple[Vectors, dict[int, int]]:
    found, _ = simulated(nodes, summed(size, dtype))
    return [vector for vector, _ in found], crossing(nodes, [sent for _, sent in found])


@st.composite
def groupings(draw_from: Any) -> list[int]:
    """Nodes of up to 12 ranks in any order, numbered in the order of their first ranks."""
    drawn = draw_from(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    return [sorted(set(drawn), key=drawn.index).index(node) for node in drawn]


# -- sums ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(groupings(), st.sampled_from([0, 1, 5, 300]), st.sampled_from([np.float32, np.float64]))
def test_a_short_sum_has_the_order_of_the_tree_and_the_same_bits_on_all_ranks(nodes, size, dtype):
    vectors = [draw(rank, size, dtype) for rank in range(len(nodes))]
    for vector in run(nodes, size, dtype)[0]:
        np.testing.assert_array_equal(vector, expected(nodes, vectors))


@settings(max_examples=40, deadline=None)
@given(groupings(), st.sampled_from([17_001, 40_000, 100_003, 2 * CHUNK // 4 + 1]))
def test_a_long_sum_is_near_the_exact_one_and_has_the_same_bits_on_all_ranks(nodes, size):
    vectors, crossed = run(nodes, size)
    exact = np.sum([draw(rank, size) for rank in range(len(nodes))], axis=0, dtype=np.float64)
    for vector in vectors:
        np.testing.assert_array_equal(vector, vectors[0])
        np.testing.assert_allclose(vector, exact, atol=3e-6 * len(nodes))
    count = len(set(nodes))
    if 4 * size >= SHORTEST_SHARE * count and count > 2:  # every node sends 2 (N - 1) / N vectors
        assert max(crossed.values()) <= 2 * (count - 1) * (4 * size / count + 8)
    else:
        assert sum(crossed.values()) == 2 * (count - 1) * 4 * size


def test_one_node_has_the_same_order_of_additions_for_any_length():
    vectors = [draw(rank, 3 * CHUNK // 4) for rank in range(7)]
    np.testing.assert_array_equal(run([0] * 7, 3 * CHUNK // 4)[0][0], heap(vectors))


def test_two_nodes_of_eight_ranks_exchange_two_models_a_sum():
    size = 500_000
    nodes = [0] * 8 + [1] * 8
    _, crossed = run(nodes, size)
    assert crossed == {0: 4 * size, 1: 4 * size}


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_long_sums_over_many_nodes_move_less_than_the_tree_of_heads(ranks):
    size = 300_000
    _, crossed = run(range(ranks), size)
    assert max(crossed.values()) < 2 * 4 * size
    assert crossed[0] == pytest.approx(2 * (ranks - 1) / ranks * 4 * size, rel=1e-4)


def test_both_directions_of_a_link_are_used_at_the_same_time():
    """A vector of 1 MB takes 10 ms through a link; upward and then downward would be 20 ms."""
    assert simulated([0, 1], summed(250_000))[1] < 0.0135


# -- groups ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(groupings(), st.data())
def test_operations_of_two_groups(nodes, data):
    """The ranks are divided into two groups at random. Each group computes as if the other did not exist."""
    second = data.draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))
    groups = [[rank for rank in range(len(nodes)) if second[rank] is chosen] for chosen in (False, True)]
    size = data.draw(st.sampled_from([1, 1000, 20_000]))
    root_at = data.draw(st.integers(0, 11))

    def work(fabric: Fabric) -> dict[str, Any]:
        ranks = groups[second[fabric.rank]]
        group, found = fabric.group(ranks), {}
        for name in ("reduce", "allreduce"):
            found[name] = draw(fabric.rank, size)
            getattr(group, name)(found[name])
        found["broadcast"] = draw(fabric.rank, size)
        group.broadcast(found["broadcast"], ranks[root_at % len(ranks)])
        group.barrier()
        found["gather"] = [(rank, vector[0]) for rank, vector in group.gather(draw(fabric.rank, size))]
        return found

    found, _ = simulated(nodes, work)
    for ranks in filter(None, groups):
        exact = np.sum([draw(rank, size) for rank in ranks], axis=0, dtype=np.float64)
        np.testing.assert_allclose(found[ranks[0]]["reduce"], exact, atol=1e-4)
        for rank in ranks:
            np.testing.assert_array_equal(found[rank]["allreduce"], found[ranks[0]]["allreduce"])
            np.testing.assert_array_equal(found[rank]["broadcast"], draw(ranks[root_at % len(ranks)], size))
            assert found[rank]["gather"] == ([(r, draw(r, size)[0]) for r in ranks] if rank == ranks[0] else [])
        np.testing.assert_allclose(found[ranks[0]]["allreduce"], exact, atol=1e-4)


def test_a_broadcast_crosses_to_each_node_once_from_any_root():
    nodes, size = [0, 0, 0, 1, 1, 2, 2], 10_000
    for root in range(len(nodes)):

        def work(fabric: Fabric, root: int = root) -> tuple[float, list[int]]:
            vector = np.full(size, fabric.rank, np.float32)
            fabric.broadcast(vector, root)
            return float(vector.min()), list(fabric.stats.sent_bytes)

        found, _ = simulated(nodes, work)
        assert [value for value, _ in found] == [root] * len(nodes)
        assert sum(crossing(nodes, [sent for _, sent in found]).values()) == 2 * 4 * size


@pytest.mark.parametrize("ranks", [[1, 2], [0, 0], [0, 3], [0, -1], []])
def test_a_group_of_wrong_ranks(ranks):
    def work(fabric: Fabric) -> None:
        if fabric.rank == 0:
            with pytest.raises(ConfigError, match=r"group \[.*\]: expected"):
                fabric.group(ranks)

    simulated([0, 0, 0], work)


def test_a_root_outside_the_group():
    with pytest.raises(ConfigError, match=r"broadcast: got root 2; expected a rank of the group \[0, 1\]"):
        simulated([0, 0, 0], lambda fabric: fabric.rank < 2 and fabric.group([0, 1]).broadcast(np.zeros(1), 2))


@pytest.mark.parametrize("operation", ["allreduce", "barrier", "broadcast"])
def test_a_death_ends_an_operation_on_all_ranks_of_the_group(operation):
    """Rank 3 dies, and rank 1, its neighbour, notices it. Without this rule, ranks 0 and 2 would wait for rank 1.

    Ranks 4 and 5 form another group, which does not notice the death.
    """
    deaths = "deaths = [{rank = 3, time = 0.5}]\n"

    def work(fabric: Fabric) -> str:
        fabric.elapse("gradient", fabric.rank >= 3)
        if fabric.rank < 4:
            arguments = {"barrier": (), "broadcast": (np.zeros(5), 3)}.get(operation, (np.zeros(5),))
            with pytest.raises(PeerLost, match="replica 3 died while others waited for a collective operation"):
                getattr(fabric.group(range(4)), operation)(*arguments)
        if fabric.rank in (4, 5):
            fabric.group([4, 5]).barrier()
        return f"{fabric.now():.1f}"

    found, _ = simulated([0] * 6, work, deaths)
    assert found == ["0.5", "0.5", "0.5", None, "1.0", "1.0"]


def test_all_ranks_that_mix_with_neighbours_notice_a_death():
    """Ranks 2 and 4 lose a neighbour; the others would wait for these two."""
    deaths = "deaths = [{rank = 3, time = 0.5}]\n"

    def work(fabric: Fabric) -> str:
        ring = [(fabric.rank + 1) % 6, (fabric.rank - 1) % 6]
        weights = dict.fromkeys([*ring, fabric.rank], 1 / 3)
        with pytest.raises(PeerLost, match="replica 3 died while others waited for a collective operation"):
            while True:
                fabric.group(range(6)).mix(np.zeros(5), ring, weights)
                fabric.elapse("gradient", 0.01)
        return "noticed"

    found, _ = simulated([0] * 6, work, deaths)
    assert found == ["noticed"] * 3 + [None] + ["noticed"] * 2


# -- real jobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 2, 1], pytest.param([0, 1, 0, 0], marks=pytest.mark.slow)])
def test_an_mpi_job_and_a_simulation_compute_the_same_bits(nodes):
    """The ranks of the job are grouped into nodes by MINIDL_NODE."""
    lenet = 61_706  # parameters
    sizes = [3, 1000, 30_001, CHUNK // 4 + 3, lenet]
    found = results(len(nodes), "sums", *map(str, sizes), GROUPING=",".join(map(str, nodes)))
    for at, size in enumerate(sizes):
        vectors, crossed = run(nodes, size)
        assert {result["sums"][at] for result in found} == {hashlib.sha256(vectors[0].tobytes()).hexdigest()}
        assert crossing(nodes, [result["sent"][at] for result in found]) == crossed
    if nodes == [0, 0, 1, 1]:
        assert crossed == {0: 4 * lenet, 1: 4 * lenet}, "two nodes exchange one model each way"
