"""`python -m minidl.topology`: the table, the picture, and errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quick import quick

from minidl.comm.topology import TOPOLOGIES
from minidl.topology import main

NAMES = tuple(name for name in TOPOLOGIES if name != "file")


def png_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a PNG file; assert that the file is complete."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def test_the_command_of_the_readme(tmp_path: Path, root: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "minidl.topology", "ring", "8"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 <- 1/3 of 0, 1, 7" in done.stdout
    assert "spectral gap       0.1953" in done.stdout
    assert "round 0: 16 messages of one vector; one replica sends at most 2, receives at most 2" in done.stdout
    width, height = png_size(tmp_path / "ring-8.png")
    assert width > 400 and height > 400


@pytest.mark.parametrize("name", quick(NAMES, "torus", "star"))
def test_every_topology_prints_and_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([name, "4"]) == 0
    png_size(tmp_path / f"{name}-4.png")


def test_files_nodes_and_large_topologies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my graph.txt").write_text("0 1\n1 2\n")
    assert main(["ring", "1", "--out", "one.svg"]) == 0
    assert "</svg>" in (tmp_path / "one.svg").read_text()
    assert main(["file:my graph.txt"]) == 0
    png_size(tmp_path / "my-graph-3.png")
    assert main(["torus:2x3", "6", "--out", "t.png"]) == 0
    capsys.readouterr()
    assert main(["hierarchical", "6", "--nodes", "3"]) == 0
    assert "0, 1 <- 1/2 of 0, 1\n" in capsys.readouterr().out
    assert main(["base-2", "5"]) == 0
    assert "exact average      after 5 rounds" in capsys.readouterr().out
    assert main(["ring", "300"]) == 0
    assert "no picture: 300 replicas are too many" in capsys.readouterr().out
    assert main(["matching", "2000"]) == 0
    assert "no picture: 2000 replicas are too many" in capsys.readouterr().out


def test_without_matplotlib_there_is_still_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["ring", "3"]) == 0
    out = capsys.readouterr().out
    assert "spectral gap       1\n" in out and out.endswith("pip install 'minidl[report]'\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "expected a topology and a number of replicas"),
        (["ring"], "expected a topology and a number of replicas"),
        (["ring", "8", "9"], "expected a topology and a number of replicas"),
        (["ring", "eight"], "got 'eight'"),
        (["ring", "0"], "ring over 0 replicas: expected 1 to"),
        (["ring", "-3"], "ring over -3 replicas"),
        (["ring", "9" * 30], "replicas: expected 1 to"),
        (["ring", "9" * 5000], "expected a number of replicas"),
        (["rnig", "8"], "Did you mean 'ring'"),
        (["hypercube", "6"], "expected a power of two, such as 4 or 8"),
        (["torus", "13"], "13 is a prime number, so the grid would be a ring; expected 12 (torus:3x4) or 14 (to"),
        (["torus:1x6", "6"], "torus:1x6 is a ring"),
        (["ring", "8", "--out", "ring.doc"], "ending in .png, .svg, .pdf, got 'ring.doc'"),
        (["ring", "8", "--out", "nowhere/ring.png"], "cannot write the picture nowhere/ring.png: No such file or dir"),
        (["ring", "8", "--out", "folder.png"], "cannot write the picture folder.png: Is a directory"),
        (["ring", "8", "--nodes", "2"], "nodes has an effect only with NAME hierarchical, and NAME is 'ring'"),
        (["ring", "8", "--seed", "1"], "seed has an effect only with NAME matching or uniform, and NAME is 'ring'"),
        (["ring", "\u0668"], "got '\u0668'"),
        (["ring", "8", "--uot", "x.png"], "Did you mean '--out'"),
        (["matching", "8", "--seed", "-1"], "seed: expected"),
        (["hierarchical", "8", "--nodes", "0"], "nodes: expected"),
        (["file:nowhere.txt"], "graph 'nowhere.txt' does not exist"),
        (["file:"], "file:PATH"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert main(argv) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("minidl: error: ") and error.count("\n") == 1 and words in error


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m minidl.topology ring 8" in capsys.readouterr().out
