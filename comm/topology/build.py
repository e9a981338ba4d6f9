"""Builds topologies by name, and mixing matrices for replicas that do not count equally in the average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.comm.topology import graphs
from minidl.comm.topology.base_graph import base_graph
from minidl.comm.topology.graph_file import read_graph
from minidl.comm.topology.mixing import Drawn, Repeating, Topology
from minidl.errors import ConfigError, nearest
from minidl.resources import MOST_RANKS


@dataclass(frozen=True)
class Request:
    """The arguments of `build`."""

    name: str
    argument: str  # the part after the name: "4x8" of torus:4x8, "3" of base-3, the path of file:PATH
    size: int
    seed: int
    nodes: tuple[int, ...]


def _hypercube(r: Request) -> Topology:
    graphs.power_of_two(r.size)
    return Repeating(r.name, graphs.hypercube(r.size) or [[{0: 1.0}]], exact=True)


def _one_peer(r: Request) -> Topology:
    rounds = [graphs.circulant(r.size, [hop]) for hop in graphs.doubling(r.size)] or [[{0: 1.0}]]
    return Repeating(r.name, rounds, exact=not r.size & (r.size - 1))


def _base(r: Request) -> Topology:
    return Repeating(r.name, base_graph(r.size, int(r.argument)), exact=True)


def _hierarchical(r: Request) -> Topology:
    if len(r.nodes) != r.size:
        raise ConfigError(f"hierarchical needs the node of each of the {r.size} replicas, got {len(r.nodes)} nodes")
    return Repeating(r.name, graphs.hierarchical(r.nodes))


def _file(r: Request) -> Topology:
    graph, directed = read_graph(r.argument, r.size)
    rows = graphs.in_degree_rows(graph) if directed else graphs.metropolis_rows(graph)
    return Repeating(r.name, [rows], doubly=not directed)


TOPOLOGIES: dict[str, Callable[[Request], Topology]] = {
    "ring": lambda r: Repeating(r.name, [graphs.metropolis_rows(graphs.ring(r.size))]),
    "torus": lambda r: Repeating(
        r.name, [graphs.metropolis_rows(graphs.torus(*graphs.torus_shape(r.size, r.argument)))]
    ),
    "complete": lambda r: Repeating(r.name, [graphs.averaged(r.size, [range(r.size)])], exact=True),
    "star": lambda r: Repeating(r.name, [graphs.metropolis_rows(graphs.star(r.size))]),
    "hypercube": _hypercube,
    "exponential": lambda r: Repeating(r.name, [graphs.circulant(r.size, graphs.doubling(r.size))]),
    "one-peer-exponential": _one_peer,
    "base-2": _base,
    "base-3": _base,
    "base-4": _base,
    "matching": lambda r: Drawn(r.name, r.size, r.seed, graphs.matching, pairs=True),
    "uniform": lambda r: Drawn(r.name, r.size, r.seed, graphs.uniform, pairs=False),
    "hierarchical": _hierarchical,
    "file": _file,
}


def build(name: str, size: int, seed: int = 0, nodes: Sequence[int] = ()) -> Topology:
    """Build the topology `name` over `size` replicas.

    name: one of TOPOLOGIES, or torus:ROWSxCOLUMNS, base-N (at most N - 1 partners per round), file:PATH.
    size: with a graph file, 0 selects the number of replicas in the graph. seed: for matching and uniform.
    nodes: the node of each replica, for hierarchical.
    Raises ConfigError for an unknown name, a size that the topology does not support, or a file without a valid,
    connected graph.
    """
    family, argument = split(name)
    if not (1 if family != "file" else 0) <= size <= MOST_RANKS:
        raise ConfigError(f"{name} over {size} replicas: expected 1 to {MOST_RANKS}")
    return TOPOLOGIES[family](Request(name, argument, size, seed, tuple(nodes)))


def split(name: str) -> tuple[str, str]:
    """Split a name into a key of TOPOLOGIES and an argument: ("torus", "4x8"). Raises ConfigError for unknown names."""
    family, colon, argument = name.partition(":")
    if family.startswith("base-") and not colon:
        argument = family.removeprefix("base-")
        if argument.isascii() and argument.isdecimal() and len(argument) < 6 and int(argument) >= 2:
            return "base-2", argument
        raise ConfigError(f"unknown topology {name!r}: expected base-2, base-3, ...")
    if family not in TOPOLOGIES or (colon and family not in ("torus", "file")):
        known = (*TOPOLOGIES, "torus:RxC", "base-N", "file:PATH")
        raise ConfigError(f"unknown topology {name!r}.{nearest(name, known)} Known: {', '.join(known)}")
    return family, argument


# Mixing matrices for replicas that do not count equally in the average.


def metropolis_hastings(adjacency: Any, stationary: Sequence[float] | np.ndarray | None = None) -> Any:
    """Return a mixing matrix W (P, P) on an undirected graph. pi @ W = pi, so mixing preserves sum_i pi_i * x_i.

    `graphs.metropolis_rows` has the formula. Replicas that train and mix by W minimise sum_i pi_i * f_i, where f_i is
    the loss of replica i.

    adjacency (P, P): nonzero where two replicas are joined; symmetric and connected; the diagonal is ignored. It is an
    array, or a sparse matrix of SciPy. W is of the same kind.
    stationary: pi (P,), positive, with any sum. None: all pi_i are equal, and W is symmetric.
    Raises ConfigError if the matrix is not square or not symmetric, the graph is not connected, or pi is not valid.
    """
    joined, dense = _nonzeros(adjacency, "an adjacency matrix must be square")
    size = joined.shape[0]
    graph = [{j for j in _columns(joined, i) if j != i} for i in range(size)]
    if not _undirected(graph):
        raise ConfigError("Metropolis-Hastings weights need an undirected graph: expected a symmetric adjacency matrix")
    pi = np.ones(size) if stationary is None else np.asarray(stationary, dtype=np.float64)
    if pi.shape != (size,) or not np.isfinite(pi).all() or pi.min() <= 0:
        raise ConfigError(f"stationary weights of {size} replicas: expected {size} positive numbers, got {pi.tolist()}")
    topology = Repeating("Metropolis-Hastings", [graphs.metropolis_rows(graph, pi.tolist())], doubly=False)
    return topology.matrix(0) if dense else topology.sparse(0)


def weighted(topology: Topology, stationary: Sequence[float]) -> Topology:
    """Return the topology of Metropolis-Hastings weights on the graph of round 0: it preserves sum_i pi_i * x_i.

    stationary: pi (P,), positive. Raises ConfigError if the graph is directed.
    """
    graph = [set(topology.sources(rank, 0)) for rank in range(topology.size)]
    if not _undirected(graph):
        raise ConfigError(f"{topology.name}: weights by share need an undirected graph, and this one is directed")
    return Repeating(topology.name, [graphs.metropolis_rows(graph, stationary)], doubly=False)


def _undirected(graph: Sequence[set[int]]) -> bool:
    """Return whether each replica is a neighbour of its neighbours. graph: the neighbours of each one."""
    return all(i in graph[j] for i, neighbours in enumerate(graph) for j in neighbours)


def from_matrix(matrix: Any, name: str = "matrix") -> Topology:
    """Return the topology of one mixing matrix (P, P): an array, or a sparse matrix of SciPy.

    Raises ConfigError unless the matrix is square and finite, its rows sum to 1, no weight is negative, and its graph
    is strongly connected.
    """
    expected = "a mixing matrix must be square, with finite elements"
    elements, _ = _nonzeros(matrix, expected)
    weights = elements.data.astype(np.float64)
    if not np.isfinite(weights).all():
        raise ConfigError(f"{expected}, got shape {elements.shape}")
    rows = []
    for i in range(elements.shape[0]):
        row = dict(zip(_columns(elements, i), weights[elements.indptr[i] : elements.indptr[i + 1]].tolist()))
        rows.append(dict(sorted({i: 0.0, **row}.items())))
    return Repeating(name, [rows], doubly=False)


def _nonzeros(matrix: Any, expected: str) -> tuple[Any, bool]:
    """Return a square matrix as a scipy.sparse.csr_array without zeros, and whether it was an array.

    Raises ConfigError if the matrix is not square or empty. expected: the beginning of the message.
    """
    from scipy import sparse

    dense = not sparse.issparse(matrix)
    if dense:
        matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise ConfigError(f"{expected}, got shape {matrix.shape}")
    found = sparse.csr_array(matrix, copy=True)
    found.sum_duplicates()
    found.eliminate_zeros()
    return found, dense


def _columns(matrix: Any, i: int) -> list[int]:
    """Return the columns of row i of a csr_array, ascending."""
    columns: list[int] = matrix.indices[matrix.indptr[i] : matrix.indptr[i + 1]].tolist()
    return columns
