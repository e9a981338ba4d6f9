"""Topologies from graph files: edge lists, node-link JSON, GraphML."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from minidl.comm.topology import build, metropolis_hastings
from minidl.errors import ConfigError


def test_graphs_from_files(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    petersen = networkx.petersen_graph()
    edges, typed, links, graphml = (str(tmp_path / f"petersen.{end}") for end in ("txt", "edges", "json", "graphml"))
    Path(edges).write_text("# ten\n" + "".join(f"{a} {b}  # joined\n" for a, b in petersen.edges()) + "\n")
    networkx.write_edgelist(petersen, typed)
    Path(links).write_text(json.dumps(networkx.node_link_data(petersen, edges="edges")))
    networkx.write_graphml(petersen, graphml)
    want = metropolis_hastings(networkx.to_numpy_array(petersen))
    for path in (edges, typed, links, graphml):
        assert np.allclose(build("file:" + path, 10).matrix(0), want)
        assert build("file:" + path, 0).size == 10
    # W = (I + A) / 4, and the eigenvalues of A are 3, 1 and -2.
    assert build("file:" + edges, 10).spectral_gap() == pytest.approx(1 - (1 + 1) / 4)

    arrows = networkx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    networkx.write_graphml(arrows, graphml)
    directed = build("file:" + graphml, 3)
    assert directed.sources(2, 0) == (0, 1) and directed.targets(0, 0) == (1, 2)
    assert not directed.doubly and directed.weights(2, 0) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}


@pytest.mark.parametrize(
    ("ending", "text", "words"),
    [
        ("txt", "0 1\n1 2 3\n", "line 2: expected two ranks"),
        ("txt", "0 1\n1 x\n", "node 'x' is not a rank"),
        ("txt", "0 1\n-1 0\n", "node '-1' is not a rank"),
        ("txt", "0 9999999\n", "not for 3"),
        ("txt", "0 1\n1 0\n2 2\n", "not connected"),
        ("txt", "", "has no nodes"),
        ("txt", "\udcff", "not UTF-8"),
        ("json", "[1", "not readable as node-link JSON"),
        ("json", "{}", "not readable as node-link JSON"),
        ("json", "[]", "not readable as node-link JSON"),
        ("graphml", "<a>", "not readable as GraphML"),
    ],
)
def test_bad_files(tmp_path: Path, ending: str, text: str, words: str) -> None:
    path = tmp_path / f"graph.{ending}"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words) as caught:
        build(f"file:{path}", 3)
    assert "\n" not in str(caught.value)


def test_a_huge_rank_in_a_file_allocates_no_matrix(tmp_path: Path) -> None:
    (tmp_path / "graph").write_text("0 9999999\n")
    with pytest.raises(ConfigError, match="not connected: 10000000 ranks, 1 edges"):
        build(f"file:{tmp_path}/graph", 0)


def test_networkx_is_not_needed_for_edge_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    (tmp_path / "graph").write_text("0 1\n")
    assert build(f"file:{tmp_path}/graph", 2).exact_after == 1
    (tmp_path / "graph.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"pip install 'minidl\[graph\]'"):
        build(f"file:{tmp_path}/graph.json", 2)
