"""The graphs of the topologies, and the weights that turn a graph into a mixing matrix.

A graph defines which replicas exchange; `metropolis_rows` turns it into one mixing matrix. Other topologies are lists
of matrices, one for each round, in which each replica exchanges with one or a few others. Functions here build them
directly.

    Graph   graph[i]: the ranks that i is joined with, without itself
    Row     row[j]: the weight of rank j in the average of rank i; i included, in ascending order of rank
    Round   round[i]: the row of rank i. One mixing matrix, without the zeros off its diagonal

The members of a group that averages share one Row object, so all P rows of a complete graph need the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError

Graph = Sequence[set[int]]
Row = dict[int, float]
Round = Sequence[Row]
Draw = Callable[[int, int, int], np.ndarray]  # size, seed, round -> (P,): the rank that each rank reads from

# Undirected graphs, the same in every round.


def ring(size: int) -> Graph:
    """Each rank is joined with its two neighbours. Cheapest and slowest: information moves one place per round."""
    return [{(i - 1) % size, (i + 1) % size} - {i} for i in range(size)]


def torus(rows: int, columns: int) -> Graph:
    """A grid (rows, columns) whose opposite edges are joined. Rank i is at (i // columns, i % columns).

    Each rank is joined with those above, below, left and right of it.
    """
    at = [divmod(i, columns) for i in range(rows * columns)]
    return [
        {(r - 1) % rows * columns + c, (r + 1) % rows * columns + c, r * columns + (c - 1) % columns,
         r * columns + (c + 1) % columns} - {i}
        for i, (r, c) in enumerate(at)
    ]  # fmt: skip


def star(size: int) -> Graph:
    """Rank 0 is joined with all others, like a server. Slow with Metropolis-Hastings weights."""
    return [set(range(1, size)), *({0} for _ in range(1, size))]


def metropolis_rows(graph: Graph, stationary: Sequence[float] | None = None) -> Round:
    """Return the mixing matrix on an undirected graph with stationary distribution pi (P,): pi W = pi, pi > 0.

    W[i, j] = min(1 / (d_i + 1), pi_j / pi_i / (d_j + 1)) for neighbours, where d is the number of neighbours; the
    remaining weight stays at i. This is a random walk that proposes each neighbour, or to stay, with equal probability,
    and accepts as in Metropolis et al. (1953) and Hastings (1970): pi_i W[i, j] == pi_j W[j, i].
    Without `stationary` all pi_i are equal and W is symmetric: 1/3 on a ring, 1/5 on a torus, 1/P on a complete graph.
    """
    pi = [1.0] * len(graph) if stationary is None else stationary
    rows = []
    for i, neighbours in enumerate(graph):
        row = {j: min(1 / (len(neighbours) + 1), pi[j] / pi[i] / (len(graph[j]) + 1)) for j in neighbours}
        row[i] = 1 - sum(row.values())
        rows.append(dict(sorted(row.items())))
    return rows


def in_degree_rows(graph: Graph) -> Round:
    """Give each rank equal weights for itself and all ranks that it reads from. graph[i]: the ranks that i reads from.

    Rows sum to 1, but columns need not. Then the replicas agree on a weighted average, in which replicas that are read
    often count more.
    """
    return [dict.fromkeys(sorted({i, *sources}), 1 / (len(sources) + 1)) for i, sources in enumerate(graph)]


# Directed graphs on a circle: rank i reads from i - hop.


def doubling(size: int) -> list[int]:
    """Return the hops 1, 2, 4, ... below size. These log2(size) hops together reach every rank."""
    return [1 << k for k in range((size - 1).bit_length())]


def circulant(size: int, hops: Sequence[int]) -> Round:
    """Each rank reads from the ranks `hops` places before it, with equal weights.

    Each rank also has that number of readers, so columns sum to 1.
    """
    return in_degree_rows([{(i - hop) % size for hop in hops} for i in range(size)])


# Sequences of rounds in which groups average.


def averaged(size: int, groups: Iterable[Sequence[int]]) -> Round:
    """Return the round in which each of these disjoint groups averages, and all other ranks keep their weights."""
    rows: list[Row] = [{i: 1.0} for i in range(size)]
    for group in groups:
        shared = dict.fromkeys(sorted(group), 1 / len(group))
        for i in group:
            rows[i] = shared
    return rows


def hypercube(size: int) -> list[Round]:
    """One dimension per round: i averages with the rank that differs in one bit. Exact after log2(size); size = 2^d."""
    return [averaged(size, [(i, i ^ bit) for i in range(size) if not i & bit]) for bit in doubling(size)]


def hierarchical(nodes: Sequence[int]) -> list[Round]:
    """Alternate two rounds: all replicas of a node average; then one of each node reads from one of another node.

    nodes[i]: the node of replica i. This is for slow links between nodes: one vector leaves each node and one enters,
    whatever the number of its replicas. Hops between nodes double as in the one-peer exponential graph. Each hop uses
    another replica of the node as its leader, so no single death disconnects a node.
    """
    homes = [[i for i, at in enumerate(nodes) if at == node] for node in sorted(set(nodes))]
    sizes = [len(home) for home in homes]
    inside = averaged(len(nodes), homes)
    if len(homes) == 1:
        return [inside]
    # A leader reads for its whole node, so it takes more than half if it can: after the smallest node has averaged,
    # half of its weights should be new.
    taken = min(1.0, min(sizes) / 2)
    hops = doubling(len(homes))
    rounds: list[Round] = []
    for turn in range(max(len(hops), min(2, max(sizes)))):
        leaders = [home[turn % len(home)] for home in homes]
        between: list[Row] = [{i: 1.0} for i in range(len(nodes))]
        for place, leader in enumerate(leaders):
            source = leaders[place - hops[turn % len(hops)]]
            between[leader] = dict(sorted({leader: 1 - taken, source: taken}.items()))
        rounds += [inside, between] if max(sizes) > 1 else [between]
    return rounds


# Random rounds. Each is a function of only the seed and the round, so all replicas draw the same without communication.
# A draw (P,) holds the rank that each rank reads from; a rank that reads from no other has its own number.


def matching(size: int, seed: int, round: int) -> np.ndarray:
    """Random pairs average; if size is odd, one rank is left over."""
    order = generator(Purpose.TOPOLOGY, seed, round).permutation(size)
    partners = np.arange(size)
    left, right = order[0 : size - 1 : 2], order[1::2]
    partners[left], partners[right] = right, left
    return partners


def uniform(size: int, seed: int, round: int) -> np.ndarray:
    """Each rank reads from one of the others, each with equal probability. Some have two or more readers, some none."""
    if size == 1:
        return np.zeros(1, dtype=np.int64)
    sources = generator(Purpose.TOPOLOGY, seed, round).integers(0, size - 1, size)
    return sources + (sources >= np.arange(size))  # numbers among the others -> ranks


# Sizes and shapes that a topology supports.


def power_of_two(size: int) -> None:
    """Raise ConfigError unless size is a power of two."""
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise ConfigError(f"hypercube needs a power of two: {size} replicas cannot, {below} or {2 * below} can; "
                          "base-2 is as fast and supports any number")  # fmt: skip


def torus_shape(size: int, argument: str) -> tuple[int, int]:
    """Return (rows, columns): those of "4x8", or the most square ones whose product is size.

    Raises ConfigError if the argument is malformed or its product is not size.
    """
    if not argument:
        rows = next(r for r in range(int(size**0.5 + 0.5), 0, -1) if size % r == 0)
        return rows, size // rows
    words = argument.lower().split("x")
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 6 and int(word) for word in words):
        raise ConfigError(f"torus:{argument} is not a shape: expected torus:ROWSxCOLUMNS, such as torus:4x8")
    rows, columns = map(int, words)
    if rows * columns != size:
        raise ConfigError(f"torus:{argument} is for {rows * columns} replicas, not for {size}")
    return rows, columns
