"""Topologies of thousands of replicas: sparse matrices, their spectral gaps and their memory."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick

from minidl.comm.topology import Topology, build, from_matrix, metropolis_hastings, sparse, spectrum
from minidl.comm.topology.sparse import Mixing, strongly_connected
from minidl.errors import ConfigError

MANY = 4096
NAMES = (
    "ring", "torus", "star", "complete", "hypercube", "exponential", "one-peer-exponential", "base-2", "base-3",
    "hierarchical", "matching", "uniform",
)  # fmt: skip


def nodes(size: int, count: int) -> list[int]:
    return [rank * count // size for rank in range(size)]


def dense_gap(topology: Topology) -> float:
    """Return the spectral gap by its definition: all eigenvalues of the product of the dense matrices."""
    alive = np.ix_(topology.alive, topology.alive)
    product = np.eye(len(topology.alive))
    for round in range(topology.period):
        product = topology.matrix(round)[alive] @ product
    return float(1 - np.sort(np.abs(np.linalg.eigvals(product)))[-2] ** (1 / topology.period))


def chain(size: int) -> Any:
    """Return the adjacency matrix of a line of replicas: the graph that mixes most slowly."""
    from scipy.sparse import diags_array

    return diags_array([np.ones(size - 1), np.ones(size - 1)], offsets=[-1, 1])


def cycle(size: int, own: float) -> Any:
    """Return the matrix with which each replica reads from the one before it, and keeps the share `own`."""
    from scipy.sparse import diags_array

    return diags_array([np.full(1, 1 - own), np.full(size, own), np.full(size - 1, 1 - own)], offsets=[size - 1, 0, -1])


def regular(size: int, degree: int, seed: int) -> list[tuple[int, int]]:
    """Draw the edges of a random graph: the union of degree / 2 random cycles, so nearly all degrees are equal."""
    orders = [np.random.default_rng([seed, k]).permutation(size) for k in range(degree // 2)]
    return [(int(a), int(b)) for order in orders for a, b in zip(order, np.roll(order, 1))]


# The arrays.


@given(data=st.data(), name=st.sampled_from(NAMES), power=st.integers(1, 5))
def test_arrays_are_the_matrices(data: st.DataObject, name: str, power: int) -> None:
    """Also after deaths: the weights of the dead are on the diagonal."""
    size = 1 << power
    if name == "torus" and size == 2:
        return
    dead = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    topology = build(name, size, nodes=nodes(size, 3)).without(dead)
    x = np.random.default_rng(0).standard_normal((size, 3))
    for round in range(min(topology.period or 3, 8)):
        matrix, live = topology.matrix(round), topology.live(round)
        assert np.allclose(topology.sparse(round).toarray(), matrix, atol=1e-14)
        among = matrix[np.ix_(topology.alive, topology.alive)]
        assert np.allclose(live.matrix().toarray(), among, atol=1e-14)
        assert np.allclose(live.mix(x[list(topology.alive)]), among @ x[list(topology.alive)], atol=1e-13)
        assert live.reads().tolist() == [len(topology.sources(rank, round)) for rank in topology.alive]
        assert live.readers().tolist() == [len(topology.targets(rank, round)) for rank in topology.alive]


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), max_size=20))
def test_strongly_connected(size: int, edges: list[tuple[int, int, bool]]) -> None:
    """Compare with powers of the matrix of all edges. The edges are in two rounds."""
    reach = np.eye(size, dtype=bool)
    rounds = [[{i: 1.0} for i in range(size)] for _ in range(2)]
    for i, j, second in edges:
        if i < size and j < size:
            reach[i, j] = True
            rounds[second][i] = dict(sorted({**rounds[second][i], j: 1.0}.items()))
    for _ in range(4):
        reach = reach @ reach
    assert strongly_connected([Mixing.of(rows) for rows in rounds]) == reach.all()


# Spectral gaps.


@pytest.mark.parametrize("name", ["ring", "torus", "star", "exponential", "one-peer-exponential", "hierarchical"])
@pytest.mark.parametrize("size", [66, 90, 130])
def test_gaps_are_those_of_the_dense_matrices(name: str, size: int) -> None:
    topology = build(name, size, nodes=nodes(size, 5))
    assert topology.spectral_gap() == pytest.approx(dense_gap(topology), rel=1e-6)
    survivors = topology.without([3, size - 1] if name != "ring" else [3])
    assert survivors.spectral_gap() == pytest.approx(dense_gap(survivors), rel=1e-6)


@settings(max_examples=20)
@given(size=st.integers(66, 140), extra=st.integers(0, 30), seed=st.integers(0, 99))
def test_gaps_of_slow_directed_graphs_are_those_of_the_dense_matrices(size: int, extra: int, seed: int) -> None:
    """With few edges besides those of a cycle, the iteration does not converge, and the factorisation is used."""
    rng = np.random.default_rng(seed)
    matrix = cycle(size, 0.5).toarray()
    for _ in range(extra):
        i, j = rng.integers(size, size=2)
        matrix[i] = 0.5 * matrix[i] + 0.5 * np.eye(size)[j]
    topology = from_matrix(matrix)
    expected = dense_gap(topology)
    assert topology.spectral_gap() == pytest.approx(expected, rel=1e-6)
    found = spectrum._close_to_one(topology.live(0), symmetric=False)
    assert found is None or 1 - found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "gap"), [
    ("ring", 2 / 3 * (1 - np.cos(2 * np.pi / MANY))),
    ("torus", 2 / 5 * (1 - np.cos(2 * np.pi / 64))),
    ("star", 1 / MANY),
    ("complete", 1.0),
    ("hypercube", 1.0),
    ("exponential", 2 / 13),
])  # fmt: skip
def test_gaps_of_thousands_of_replicas_are_those_of_the_formulas(name: str, gap: float) -> None:
    assert build(name, MANY).spectral_gap() == pytest.approx(gap, rel=1e-6)


def test_gaps_of_thousands_of_replicas_on_slow_graphs() -> None:
    weights = metropolis_hastings(chain(MANY))  # the eigenvalues of a line are 1/3 + 2/3 cos(k pi / P)
    assert from_matrix(weights).spectral_gap() == pytest.approx(2 / 3 * (1 - np.cos(np.pi / MANY)), rel=1e-6)
    directed = from_matrix(cycle(MANY, 0.5))  # the eigenvalues are (1 + w) / 2 with w^P = 1
    assert directed.spectral_gap() == pytest.approx(1 - np.cos(np.pi / MANY), rel=1e-6)
    ring = build("ring", MANY)
    assert ring.without([0]).spectral_gap() == pytest.approx(2 / 3 * (1 - np.cos(np.pi / (MANY - 1))), rel=1e-6)
    assert ring.without([0, 9]).spectral_gap() == 0
    assert ring.rounds_to_shrink() == pytest.approx(np.log(1000) / ring.spectral_gap(), rel=1e-3)
    assert ring.without([0, 9]).rounds_to_shrink() == 0


def test_a_gap_that_cannot_be_computed_is_one_line() -> None:
    """With nearly no weight on the diagonal, eigenvalues near -1 may be larger than those near 1."""
    weights = cycle(MANY, 1e-8)
    both = from_matrix((weights + weights.T) / 2)
    with pytest.raises(ConfigError, match="the spectral gap of these 4096 replicas is too small") as caught:
        both.spectral_gap()
    assert "\n" not in str(caught.value)


# Memory.


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of elements of each scipy matrix and each dense (P, P) matrix made."""
    made: list[int] = []
    whole = Mixing.matrix

    def matrix(self: Mixing) -> Any:
        found = whole(self)
        made.append(found.nnz)
        return found

    def dense(self: Topology, round: int) -> np.ndarray:
        raise AssertionError(f"a dense matrix of {self.size} replicas")

    monkeypatch.setattr(sparse.Mixing, "matrix", matrix)
    monkeypatch.setattr(Topology, "matrix", dense)
    return made


@pytest.mark.parametrize("name", quick([*NAMES, "file", "prime base-2", "two nodes"], "complete", "file"))
def test_thousands_of_replicas_need_little_memory(name: str, tmp_path: Path, watched: list[int]) -> None:
    size, at = MANY, nodes(MANY, 64)
    if name == "file":
        (tmp_path / "graph").write_text("".join(f"{a} {b}\n" for a, b in regular(size, 8, 0)))
        name, size = f"file:{tmp_path}/graph", 0
    elif name == "prime base-2":
        name, size = "base-2", 4093
    elif name == "two nodes":
        name, at = "hierarchical", nodes(MANY, 2)
    importlib.import_module("scipy.sparse.linalg")  # its code is not counted
    tracemalloc.start()
    try:
        topology = build(name, size, nodes=at)
        gap = topology.spectral_gap()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60e6
    assert topology.connected and 0 < gap <= 1
    if name.startswith("file"):
        assert gap > 0.2  # a random regular graph is an expander
    assert all(elements <= 10 * MANY for elements in watched)


def test_survivors_of_thousands_share_rows() -> None:
    complete = build("complete", MANY).without([1, 5])
    assert complete.live(0).weights.size == MANY - 2
    assert complete.spectral_gap() == pytest.approx((MANY - 2) / MANY)


def test_the_command_answers_for_thousands(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minidl.topology", "ring", str(MANY)]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "spectral gap       7.844e-07\n1000 times closer  after 8,806" in done.stdout


def test_building_imports_no_scipy(root: Path) -> None:
    """A rank that trains needs no spectral gap, so it does not pay for the import."""
    code = (
        "import sys; from minidl.comm.topology import build\n"
        "build('ring', 100), build('hierarchical', 64, nodes=[i // 8 for i in range(64)]).without([3]).connected\n"
        "assert not [name for name in sys.modules if name.startswith('scipy.')]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root)}).returncode == 0


# Metropolis-Hastings weights.


def test_metropolis_hastings_of_a_sparse_matrix_is_sparse() -> None:
    from scipy.sparse import issparse

    ring, shares = build("ring", 6), np.arange(1.0, 7.0)
    weights = metropolis_hastings(ring.sparse(0), shares)
    assert issparse(weights) and np.array_equal(weights.toarray(), metropolis_hastings(ring.matrix(0), shares))
    one, other = from_matrix(weights), from_matrix(weights.toarray())
    assert np.array_equal(one.matrix(0), other.matrix(0)) and not one.doubly

    shares = np.random.default_rng(0).uniform(1, 3, MANY)
    weights = metropolis_hastings(build("torus", MANY).sparse(0), shares)
    assert weights.nnz == 5 * MANY and np.allclose(weights.T @ shares, shares)
    assert 0 < from_matrix(weights).spectral_gap() < 0.01


def test_sparse_matrices_that_are_not_valid() -> None:
    from scipy.sparse import csr_array, eye_array

    for matrix, words in [
        (csr_array(np.ones((2, 3))), "must be square"),
        (csr_array(np.triu(np.ones((3, 3)))), "undirected"),
        (eye_array(3, format="csr"), "not connected"),
    ]:
        with pytest.raises(ConfigError, match=words):
            metropolis_hastings(matrix)
    with pytest.raises(ConfigError, match="finite"):
        from_matrix(csr_array(np.full((2, 2), np.nan)))
