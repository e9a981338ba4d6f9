"""bench/keep.py: keeps ratios, not times; one file for each CPU and commit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import keep

MACHINE = {"cpu": "AMD EPYC, family 25 model 17", "threads": 2, "isa": "the CPU's own", "cores": 2}


def test_only_ratios_are_kept() -> None:
    rows = [
        {"name": "gemm-nn-512", "value": 91.5, "unit": "% of peak"},
        {"name": "sgd", "value": 1.2, "unit": "x PyTorch"},
        {"name": "threads-2", "value": 1.9, "unit": "x"},
        {"name": "startup", "value": 1.9, "unit": "s"},
        {"name": "copy", "value": 40, "unit": "GB/s"},
        {"name": "mlp-b8", "minidl_ms": 0.2, "pytorch_ratio": 2.5, "jax_ratio": None, "share_of_peak": 0.29123},
    ]
    assert keep.ratios(rows) == {
        "gemm-nn-512": [91.5, "% of peak"], "sgd": [1.2, "x PyTorch"], "threads-2": [1.9, "x"],
        "mlp-b8-pytorch": [2.5, "x PyTorch"], "mlp-b8-peak": [29.12, "% of peak"],
    }  # fmt: skip


def test_a_file_for_each_cpu_and_commit(tmp_path: Path) -> None:
    first = keep.add(tmp_path, "a" * 40, "2026-11-22", MACHINE, {"x": [1.0, "x"], "y": [50, "% of peak"]})
    again = keep.add(tmp_path, "a" * 40, "2026-11-22", MACHINE, {"x": [1.5, "x"]})
    later = keep.add(tmp_path, "b" * 40, "2026-11-23", MACHINE, {"x": [2.5, "x"]})
    avx2 = keep.add(tmp_path, "b" * 40, "2026-11-23", {**MACHINE, "isa": "avx2"}, {"x": [0.5, "x"]})
    assert first == again and later.parent == first.parent != avx2.parent
    assert first.parent.name == "amd-epyc-family-25-model-17-2-threads"
    kept = json.loads(first.read_text())
    assert kept["rows"] == {"x": [1.5, "x"], "y": [50, "% of peak"]} and kept["commit"] == "a" * 40
    commits, x, y = keep.shown(first.parent, [])[:1], *keep.shown(first.parent, [])[2:]
    assert commits[0].startswith("2026-11-22 aaaaaaaaaaaa")
    assert x.split() == ["x", "1.5", "2.5", "x"] and y.split() == ["y", "50", "-", "%", "of", "peak"]
    assert len(keep.shown(first.parent, ["y"])) == 3


def test_what_it_refuses(root: Path) -> None:
    disturbed = json.dumps({"rows": [{"name": "a", "value": 1, "unit": "x"}], "machine": {"disturbed": True}})
    refused = {disturbed: "other processes", '{"rows": []}': "no ratios", "": "--json", "[1]": "--json", "x": "--json"}
    for given, named in refused.items():
        command = [sys.executable, "bench/keep.py"]
        done = subprocess.run(command, cwd=root, input=given, capture_output=True, text=True)
        assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr


def test_the_kept_files_can_be_read() -> None:
    for path in keep.HISTORY.glob("*/*.json"):
        kept = json.loads(path.read_text())
        assert path.parent.name == keep.slug(kept["machine"]) and path.stem == f"{kept['date']}-{kept['commit'][:12]}"
        assert all(isinstance(value, int | float) and keep.RATIOS.match(unit) for value, unit in kept["rows"].values())
