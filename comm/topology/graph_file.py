"""Read graphs from files: edge lists, GraphML, and NetworkX's node-link JSON.

An edge list has one undirected edge per line: two ranks separated by white space. `#` begins a comment:

    0 1
    2 0 {}  # networkx.write_edgelist writes {}, which is ignored
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError
from minidl.reading import Unreadable, blaming, json_value, text
from minidl.resources import MOST_RANKS

EDGES = 150_000  # lines of an edge list
LIMIT = 4 << 20  # bytes of an edge list
NETWORKX_LIMIT = 2 << 20  # bytes of other files: NetworkX needs much more memory for an edge


def read_graph(path: str, size: int = 0) -> tuple[list[set[int]], bool]:
    """Read a graph. Returns (graph, directed), where graph[i] is the set of ranks that rank i reads from.

    size: the number of ranks that the graph must have; 0 accepts any number. The nodes must be numbered 0 to P-1.
    Raises ConfigError with the path if the file cannot be read, is not a valid graph, or has another number of ranks.
    """
    if not path:
        raise ConfigError("topology `file` needs the path of a graph: file:PATH")
    suffix = Path(path).suffix.lower()
    with blaming(f"graph {path!r}", ConfigError):
        if suffix in (".json", ".graphml"):
            edges, nodes, directed = _networkx(path, suffix)
        else:
            edges, nodes, directed = _edge_list(path), [], False
    highest = max([*nodes, *(rank for edge in edges for rank in edge)], default=-1)
    if highest < 0:
        raise ConfigError(f"graph {path!r} has no nodes")
    if size and highest + 1 != size:
        raise ConfigError(f"graph {path!r} has ranks 0 to {highest}: it is for {highest + 1} replicas, not for {size}")
    if highest > len(edges):  # checked before a set per rank is allocated: n connected nodes have n - 1 edges or more
        raise ConfigError(f"graph {path!r} is not connected: {highest + 1} ranks, {len(edges)} edges")
    if highest >= MOST_RANKS:
        raise ConfigError(f"graph {path!r} has ranks 0 to {highest}: at most {MOST_RANKS} replicas are supported")
    graph: list[set[int]] = [set() for _ in range(highest + 1)]
    for source, reader in edges:
        if source != reader:  # every rank reads from itself anyway
            graph[reader].add(source)
            if not directed:
                graph[source].add(reader)
    return graph, directed


def _edge_list(path: str) -> list[tuple[int, int]]:
    edges = []
    lines = text(path, LIMIT)
    if lines.count("\n") > EDGES:
        raise Unreadable(f"it has over {EDGES:,} lines")
    for number, line in enumerate(lines.splitlines(), 1):
        words = line.split("#")[0].split("{")[0].split()
        if words:
            if len(words) != 2:
                raise ConfigError(f"graph {path!r}, line {number}: expected two ranks, such as 0 1, got {line[:60]!r}")
            edges.append((_rank(words[0], path), _rank(words[1], path)))
    return edges


def _networkx(path: str, suffix: str) -> tuple[list[tuple[int, int]], list[int], bool]:
    content = text(path, NETWORKX_LIMIT)
    try:
        import networkx
    except ImportError:
        raise ConfigError(f"reading {suffix} graphs needs NetworkX: pip install 'minidl[graph]'") from None
    try:
        if suffix == ".json":
            data = json_value(content)
            graph = networkx.node_link_graph(data, edges="links" if "links" in data else "edges")
        else:
            if re.search("<!(DOCTYPE|ENTITY)", content):
                raise Unreadable("it declares entities, which may expand to any size")
            graph = networkx.parse_graphml(content)
    except Exception as error:  # the parsers and NetworkX raise exceptions of many types
        what = "node-link JSON" if suffix == ".json" else "GraphML"
        kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__} "
        raise ConfigError(f"graph {path!r} is not readable as {what}: {kind}{str(error)[:200]}") from None
    nodes = [_rank(node, path) for node in graph]
    return [(_rank(a, path), _rank(b, path)) for a, b in graph.edges()], nodes, graph.is_directed()


def _rank(node: Any, path: str) -> int:
    """Convert a node's name to a rank. Raises ConfigError if it is not a whole number of at most 7 digits."""
    name = str(node)
    if not (name.isdecimal() and name.isascii() and len(name) < 8):
        raise ConfigError(f"graph {path!r}: node {name[:40]!r} is not a rank: expected a number from 0 on, as "
                          "networkx.convert_node_labels_to_integers assigns them")  # fmt: skip
    return int(name)
