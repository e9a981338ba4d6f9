"""Every topology has the properties that the papers state, for every supported number of replicas from 1 to 64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quick import quick

from minidl.comm.topology import TOPOLOGIES, Topology, build, from_matrix, metropolis_hastings
from minidl.comm.topology.mixing import Repeating
from minidl.errors import ConfigError
from minidl.run.config import Config
from minidl.run.options import options

NAMES = tuple(name for name in TOPOLOGIES if name != "file")
SIZES = range(1, 65)


def nodes(size: int) -> list[int]:
    """Return the node of each rank: up to four nodes of unequal size."""
    return [i * i * 4 // (size * size) for i in range(size)]


def make(name: str, size: int, seed: int = 0) -> Topology | None:
    """Return the topology, or None if it does not support this size."""
    if name == "hypercube" and size & (size - 1):
        return None
    if name == "torus" and size > 1 and all(size % factor for factor in range(2, size)):
        return None
    return build(name, size, seed=seed, nodes=nodes(size))


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_a_sequence_of_mixing_matrices(name: str) -> None:
    for size in SIZES:
        if topology := make(name, size):
            assert topology.size == size and topology.alive == tuple(range(size))
            union = np.zeros((size, size), dtype=bool)
            for round in range(topology.period or 5):
                matrix = topology.matrix(round)
                assert matrix.min() >= 0
                assert np.allclose(matrix.sum(axis=1), 1, atol=1e-12)
                if name != "uniform":
                    assert topology.doubly and np.allclose(matrix.sum(axis=0), 1, atol=1e-12)
                if topology.symmetric:
                    assert np.allclose(matrix, matrix.T, atol=1e-12)
                links = (matrix > 0) & ~np.eye(size, dtype=bool)
                union |= links
                for rank in range(0, size, max(1, size // 7)):
                    assert list(topology.weights(rank, round)) == sorted({*np.flatnonzero(links[rank]), rank})
                    assert topology.sources(rank, round) == tuple(np.flatnonzero(links[rank]))
                    assert topology.targets(rank, round) == tuple(np.flatnonzero(links[:, rank]))
            if topology.period:
                for rank in range(size):
                    assert topology.neighbours(rank) == tuple(np.flatnonzero(union[rank] | union[:, rank]))
            else:
                assert topology.neighbours(size - 1) == tuple(range(size - 1))


@pytest.mark.parametrize("name", NAMES)
def test_replicas_converge_to_their_average(name: str) -> None:
    for size in (1, 2, 3, 5, 8, 16, 23, 64):
        if topology := make(name, size):
            x = np.random.default_rng(size).standard_normal((size, 3))
            mean = x.mean(axis=0)
            for round in range(topology.rounds_to_shrink(1e6)):
                x = topology.mix(x, round)
            assert np.ptp(x, axis=0).max() < 1e-3
            if topology.doubly:
                assert np.allclose(x, mean, atol=1e-3)


def test_topologies_declared_exact_are_exact() -> None:
    for size in SIZES:
        for name in ("base-2", "base-3", "base-4", "base-5", "base-7", "complete", "one-peer-exponential", "hypercube"):
            topology = make(name, size)
            if topology is None or (name == "one-peer-exponential" and size & (size - 1)):
                continue
            product = np.eye(size)
            for round in range(topology.exact_after):
                product = topology.matrix(round) @ product
            assert 1 <= topology.exact_after <= topology.period
            assert np.allclose(product, 1 / size, atol=1e-12)
            assert topology.spectral_gap() == 1
            if name.startswith("base-"):
                k = int(name.removeprefix("base-")) - 1
                degrees = [len(topology.sources(rank, t)) for t in range(topology.period) for rank in range(size)]
                assert max(degrees) <= k
                assert topology.period <= 2 * np.log(size) / np.log(k + 1) + 2  # the paper's theorem 1
    assert build("one-peer-exponential", 64).exact_after == 6
    assert build("one-peer-exponential", 6).exact_after == 0
    assert build("ring", 3).exact_after == 1 and build("ring", 4).exact_after == 0


@pytest.mark.parametrize(
    ("name", "size", "gap"),
    [("ring", 8, 0.195), ("ring", 16, 0.051), ("ring", 64, 0.0032), ("torus", 16, 0.400), ("torus", 64, 0.117),
     ("exponential", 8, 0.500), ("exponential", 16, 0.400), ("exponential", 64, 0.286), ("complete", 9, 1)],
)  # fmt: skip
def test_spectral_gaps_of_the_literature(name: str, size: int, gap: float) -> None:
    assert build(name, size).spectral_gap() == pytest.approx(gap, abs=5e-4 if gap > 0.01 else 5e-5)


def test_spectral_gap_of_a_sequence_with_one_peer_per_round() -> None:
    static, sequence = build("exponential", 12), build("one-peer-exponential", 12)
    assert len(static.sources(0, 0)) == 4 and len(sequence.sources(0, 0)) == 1
    # A period has four rounds, with hops h of 1, 2, 4 and 8 ranks. The product of the four matrices has one eigenvalue
    # for each w with w^12 = 1: the product of (1 + w^h) / 2 over the four h. The spectral gap, which is defined per
    # round, is 1 minus the fourth root of the second largest |eigenvalue|.
    w = np.exp(2j * np.pi * np.arange(1, 12) / 12)
    second = np.abs(np.prod([(1 + w**hop) / 2 for hop in (1, 2, 4, 8)], axis=0)).max()
    assert sequence.spectral_gap() == pytest.approx(1 - second ** (1 / 4))


@pytest.mark.parametrize("name", ["matching", "uniform"])
@pytest.mark.parametrize("dead", [(), (2,), (0, 3, 4)])
@pytest.mark.parametrize("size", quick([7, 8], 7))
def test_spectral_gaps_of_random_topologies(name: str, dead: tuple[int, ...], size: int) -> None:
    topology = build(name, size, seed=5).without(dead)
    alive = list(topology.alive)
    center = np.eye(len(alive)) - 1 / len(alive)
    squares = np.zeros((len(alive), len(alive)))
    for round in range(4000):
        matrix = topology.matrix(round)[np.ix_(alive, alive)]
        squares += matrix.T @ center @ matrix / 4000
    shrinks = np.sort(np.linalg.eigvalsh(center @ squares @ center))[1:].mean() ** 0.5  # by symmetry, all are equal
    assert topology.spectral_gap() == pytest.approx(1 - shrinks, abs=0.01)


@pytest.mark.parametrize("name", ["matching", "uniform"])
def test_random_rounds_follow_from_seed_and_round(name: str) -> None:
    one, same, other = build(name, 16, seed=1), build(name, 16, seed=1), build(name, 16, seed=2)
    late = one.matrix(1000)
    assert all(np.array_equal(one.matrix(round), same.matrix(round)) for round in (0, 1, 77))
    assert np.array_equal(same.matrix(1000), late)
    assert not np.array_equal(one.matrix(0), other.matrix(0)) and not np.array_equal(one.matrix(0), one.matrix(1))
    met = {source for round in range(300) for source in one.sources(3, round)}
    assert met == set(range(16)) - {3}


def test_torus_of_any_shape() -> None:
    wide = build("torus:2x6", 12)
    assert wide.sources(0, 0) == (1, 5, 6)  # the neighbours above and below are the same rank
    assert build("torus", 12).sources(0, 0) == (1, 3, 4, 8)  # 3 x 4
    assert build("torus:4x3", 12).sources(0, 0) == (1, 2, 3, 9)


@pytest.mark.parametrize(("size", "words"), [
    (7, r"7 is a prime number, .*expected 6 \(torus:2x3\) or 8 \(torus:2x4\) replicas, or another topology, such as r"),
    (2, r"expected 4 \(torus:2x2\) replicas"),
    (3, r"expected 4 \(torus:2x2\) replicas"),
    (5, r"expected 4 \(torus:2x2\) or 6 \(torus:2x3\) replicas"),
    (4093, r"expected 4092 \(torus:62x66\) or 4094 \(torus:46x89\) replicas"),
])  # fmt: skip
def test_a_prime_number_of_replicas_makes_no_torus(size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build("torus", size)
    assert "\n" not in str(caught.value)
    for name in (f"torus:1x{size}", f"torus:{size}x1"):
        with pytest.raises(ConfigError, match="is a ring: expected at least 2 rows and 2 columns"):
            build(name, size)
    assert build("torus", 1).exact_after == build("torus:1x1", 1).exact_after == 1


def test_hierarchical_sends_one_vector_out_of_a_node_and_into_it() -> None:
    at = [0, 1, 2, 2, 1, 1, 0, 2, 2]  # nodes of 2, 3 and 4 ranks, in mixed order
    topology = build("hierarchical", len(at), nodes=at)
    leaders = set()
    for round in range(topology.period):
        links = [(source, rank) for rank in range(len(at)) for source in topology.sources(rank, round)]
        across = [(at[source], at[rank]) for source, rank in links if at[source] != at[rank]]
        if round % 2 == 0:
            assert not across and len(links) == 2 * 1 + 3 * 2 + 4 * 3
        else:
            assert sorted(a for a, _ in across) == sorted(b for _, b in across) == [0, 1, 2] and len(links) == 3
            leaders |= {rank for _, rank in links}
    assert all(topology.without([leader]).connected for leader in leaders)
    # In a round between nodes, each node keeps half of its value. Two such rounds and three inside average 4 nodes.
    assert build("hierarchical", 8, nodes=[0, 0, 1, 1, 2, 2, 3, 3]).exact_after == 5
    assert build("hierarchical", 3, nodes=[4, 4, 4]).exact_after == 1


# Topologies after deaths.


@given(data=st.data(), name=st.sampled_from(NAMES), size=st.integers(2, 24))
def test_survivors_keep_their_ranks_and_lose_no_weight(data: st.DataObject, name: str, size: int) -> None:
    if (whole := make(name, size)) is None:
        return
    dead = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    topology = whole.without(dead)
    alive = [rank for rank in range(size) if rank not in dead]
    assert topology.alive == tuple(alive) and topology.size == size
    for round in range(min(topology.period or 3, 12)):
        before, after = whole.matrix(round), topology.matrix(round)
        assert np.allclose(after.sum(axis=1), 1) and after.min() >= 0
        if whole.symmetric:
            assert np.allclose(after, after.T)
        inner = ~np.eye(size, dtype=bool)[np.ix_(alive, alive)]
        assert np.array_equal(after[np.ix_(alive, alive)][inner], before[np.ix_(alive, alive)][inner])
        for rank in range(size):
            assert topology.sources(rank, round) == tuple(j for j in np.flatnonzero(after[rank]) if j != rank)
            assert topology.targets(rank, round) == tuple(i for i in np.flatnonzero(after[:, rank]) if i != rank)
            assert not dead.intersection(topology.neighbours(rank))
    if dead and len(alive) > 1:  # deaths one after the other give the same matrices
        first, *others = sorted(dead)
        again = whole.without([first]).without(others)
        assert np.array_equal(again.matrix(1), topology.matrix(1))
    gap = topology.spectral_gap()
    # With an asymmetric matrix, links in one direction can be enough for the replicas to agree.
    assert gap > 1e-9 if topology.connected else gap < 1e-9 or not topology.symmetric


def test_deaths_that_matter() -> None:
    ring = build("ring", 8)
    assert ring.without([3]).connected and ring.without([3]).rounds_to_shrink() > ring.rounds_to_shrink()
    assert not ring.without([3, 6]).connected and ring.without([3, 6]).spectral_gap() == 0
    assert ring.without([3, 6]).rounds_to_shrink() == 0  # 0 means never
    assert not build("star", 5).without([0]).connected
    assert build("complete", 5).without([2]).spectral_gap() == pytest.approx(4 / 5)
    assert ring.without([]) is ring
    assert ring.without(range(7)).spectral_gap() == 1
    for dead, words in (([8], "replica 8"), ([-1], "replica -1"), (range(8), "no replica of 8 is left")):
        with pytest.raises(ConfigError, match=words):
            ring.without(dead)


# Weights for a given stationary distribution.


@st.composite
def connected_graphs(draw: st.DrawFn) -> np.ndarray:
    """Draw the adjacency matrix of a connected graph: a tree and up to 12 more edges."""
    size = draw(st.integers(1, 12))
    adjacency = np.zeros((size, size), dtype=bool)
    for i in range(1, size):
        adjacency[i, draw(st.integers(0, i - 1))] = True
    for i, j in draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=12)):
        adjacency[i, j] = True
    return adjacency | adjacency.T


@given(adjacency=connected_graphs(), data=st.data())
def test_metropolis_hastings_keeps_the_stationary_distribution(adjacency: np.ndarray, data: st.DataObject) -> None:
    size = len(adjacency)
    pi = np.array(data.draw(st.lists(st.floats(0.01, 100), min_size=size, max_size=size)))
    pi /= pi.sum()
    matrix = metropolis_hastings(adjacency, pi)
    assert np.allclose(matrix.sum(axis=1), 1) and matrix.min() >= 0
    assert np.allclose(pi @ matrix, pi)
    assert not matrix[~adjacency & ~np.eye(size, dtype=bool)].any()
    assert np.allclose(metropolis_hastings(adjacency), metropolis_hastings(adjacency).T)
    x = np.random.default_rng(0).standard_normal(size)
    assert np.allclose(np.linalg.matrix_power(matrix, 2**40) @ x, pi @ x, atol=1e-3)


def test_replicas_agree_on_the_weighted_average() -> None:
    shares = np.array([0.5, 0.2, 0.2, 0.1])
    topology = from_matrix(metropolis_hastings(build("ring", 4).matrix(0), shares))
    assert not topology.doubly and topology.spectral_gap() > 0
    x = np.random.default_rng(0).standard_normal((4, 5))
    mixed = x
    for round in range(200):
        mixed = topology.mix(mixed, round)
    assert np.allclose(mixed, shares @ x)


def test_invalid_matrices() -> None:
    split = np.kron(np.eye(2), np.ones((2, 2)))
    for adjacency, pi, words in [
        (np.ones((2, 3)), None, "square"),
        (np.triu(np.ones((3, 3))), None, "undirected"),
        (split, None, "not connected"),
        (np.ones((3, 3)), [0.5, 0.5, 0], "positive numbers"),
        (np.ones((3, 3)), [0.5, 0.5], "3 positive numbers"),
        (np.ones((2, 2)), [1, float("nan")], "positive numbers"),
    ]:
        with pytest.raises(ConfigError, match=words):
            metropolis_hastings(adjacency, pi)
    for matrix, words in [
        (split / 2, "not connected"),
        (np.array([[0.5, 0.5], [0.5, 0.6]]), "row 1 .* sum to 1"),
        (np.array([[1.5, -0.5], [0.5, 0.5]]), "row 0 .* negative"),
        (np.array([[0.5, 0.5], [0, 1]]), "not connected"),  # 0 receives from 1, 1 receives from no other replica
        (np.full((2, 2), np.nan), "finite"),
    ]:
        with pytest.raises(ConfigError, match=words):
            from_matrix(matrix)


def test_declared_properties_are_checked() -> None:
    chain = [{0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.75}]
    for rounds, doubly, exact, words in [
        ([chain], True, False, "columns"),
        ([chain], False, True, "do not hold the average"),
        ([[{1: 1.0}, {0: 1.0}]], True, False, "row 0 lacks replica 0"),
        ([[{0: 0.5, 2: 0.5}, {1: 1.0}]], False, False, "ascending order"),
        ([[{1: 0.5, 0: 0.5}, {0: 0.5, 1: 0.5}]], False, False, "ascending order"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Repeating("it", rounds, doubly=doubly, exact=exact)


def test_the_options_of_training_name_topologies_that_exist() -> None:
    names = options(Config)["topology"].choices
    assert {name for name in names if name == name.lower()} <= set(TOPOLOGIES)
    for name in (options(Config)["topology"].default, "torus:2x4", "base-9"):
        assert build(name, 8).size == 8


def test_unknown_names_and_sizes() -> None:
    for name, size, words in [
        ("rign", 8, "Did you mean 'ring'"),
        ("hypercube", 6, "expected a power of two, such as 4 or 8"),
        ("ring", 0, "expected 1 to"),
        ("torus:3x3", 8, "is for 9 replicas, not for 8"),
        ("torus:3", 8, "is not a shape"),
        ("base-1", 8, "expected base-2"),
        ("hierarchical", 8, "the node of each"),
        ("file", 8, "file:PATH"),
        ("file:/nowhere/graph", 8, "does not exist"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            build(name, size)
        assert "\n" not in str(caught.value)
