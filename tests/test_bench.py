"""Benchmarks accept --quick and --json. With --json, the last line of the output is JSON. No test checks a speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import measure
from minidl.engine.device import Device

BENCH = Path(__file__).parent.parent / "bench"
ONE_FOR_EACH_OP = sorted(path.name for path in BENCH.glob("bench_*.py"))
OPTIONAL = {"jax", "torch", "decent_dp"}


def output_of(root: Path, *command: str) -> dict[str, Any]:
    command = (sys.executable, *command, "--quick", "--json")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(root: Path, script: str, *options: str) -> list[dict[str, Any]]:
    rows = output_of(root, f"bench/{script}", *options)["rows"]
    assert rows and len({row["name"] for row in rows}) == len(rows)
    return rows


def check_values(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert {"name", "value", "unit", "goal"} <= set(row)
        assert math.isfinite(row["value"]) and row["value"] > 0 and row["unit"], row


def test_every_file_can_be_imported(root: Path) -> None:
    """An import runs nothing. It fails if a benchmark uses a name that has moved."""
    script = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                print(error.name)
    """
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in sorted(BENCH.rglob("*.py"))]
    done = subprocess.run([sys.executable, "-c", script, *names], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(names) > 40 and {*done.stdout.split()} <= OPTIONAL


@pytest.mark.slow  # test_training shows the options and the lines of a report
def test_measure(root: Path) -> None:
    check_values(rows_of(root, "measure.py"))


def test_a_kernel_without_python_in_between() -> None:
    theta, other = np.zeros(8, np.float32), np.full(8, 4, np.float32)
    measure.replay(Device("cpu").mix.mix, theta, other, 0.5, calls=2)()
    assert (theta == 3).all()


def test_one_of_several_kernels_without_python_in_between() -> None:
    conv, random, none = Device("cpu").conv, np.random.default_rng(0), np.empty(0, np.float32)
    x, weight = random.standard_normal((2, 5, 5, 3), np.float32), random.standard_normal((3, 3, 3, 8), np.float32)
    options, found = (1, (1, 1), (1, 1), (1, 1), True), np.zeros((2, 2, 5, 5, 8), np.float32)
    scratch = np.empty(conv.forward_scratch(x.shape, weight.shape, *options), np.float32)
    arguments = x, weight, *[none] * 4, False, *options, none, scratch
    conv.forward(*arguments, found[0])
    measure.replay(conv.forward, *arguments, found[1])()
    assert found[0].any() and (found[0] == found[1]).all()


@pytest.mark.parametrize("names", [
    ["mlp-b8", "mlp-b8-predict"],
    pytest.param(["mlp-b8-avx2"], marks=pytest.mark.slow),  # compiles all kernels for AVX2
])  # fmt: skip
def test_training(root: Path, names: list[str]) -> None:
    rows = rows_of(root, "training.py", "--no-torch", "--no-jax", "--only", *names)
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["minidl_ms"] >= row["minidl_best"] > 0
        assert row["pytorch_ms"] is None and row["jax_ms"] is None


def test_training_has_all_rows() -> None:
    from bench.training import ROWS

    nets = ["mlp-b128", "mlp-b32", "mlp-b8", "lenet-b64", "vgg-b64", "resnet20-b128"]
    assert set(ROWS) == {net + kind for net in nets for kind in ("", "-avx2", "-predict")}


def test_training_refuses_unknown_rows(root: Path) -> None:
    command = [sys.executable, "bench/training.py", "--only", "mlp-b7"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "mlp-b7" in done.stderr


@pytest.mark.slow
def test_comm(root: Path) -> None:
    rows = {row["name"]: row["value"] for row in rows_of(root, "comm.py", "--only", "publish", "sim")}
    assert rows["publish-and-mix"] > 0 and rows["sim-event-gossip"] > 0 and 0 < rows["sim-memory"] < 8


@pytest.mark.slow
def test_adaptive(root: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--only", "equal-samples"]
    rows = {row["name"]: row["value"] for row in rows_of(root, "adaptive.py", *options)}
    assert abs(rows["adaptive-minus-each-step"]) < 100 and 5 < rows["messages-of-each-step"] < 100


@pytest.mark.slow
def test_adaptive_against_other_methods(root: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--only", "two-hosts", "fixed-period"]
    rows = {row["name"]: row["value"] for row in rows_of(root, "adaptive.py", *options)}
    assert rows["adaptive-link"] > 0 and rows["each-step-link"] > 0 and 50 < rows["messages-of-fixed-period"] < 300


@pytest.mark.slow
def test_comm_under_stress(root: Path) -> None:
    rows = {row["name"]: row["value"] for row in rows_of(root, "comm.py", "--only", "torn", "bits")}
    assert all(value == 0 for name, value in rows.items() if name.startswith("torn"))
    assert all(value == 100 for name, value in rows.items() if name.startswith("bits"))


@pytest.mark.slow
def test_comm_on_mnist(root: Path, data_dir: Path) -> None:
    rows = rows_of(root, "comm.py", "--only", "gossip", "--data-dir", str(data_dir))
    check_values([row for row in rows if not row["name"].endswith("-waiting")])
    waiting = [row["value"] for row in rows if row["name"].endswith("-waiting")]
    assert len(waiting) == 2 and all(0 <= value < 100 for value in waiting)  # 0 if no replica waited


@pytest.mark.slow
def test_elastic_on_mnist(root: Path, data_dir: Path) -> None:
    rows = rows_of(root, "elastic.py", "--only", "speed", "accuracy", "--data-dir", str(data_dir))
    check_values(rows)
    assert {row["name"].rpartition("-")[0] for row in rows} >= {"local", "async-easgd-period-4"}


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    ["bench/accuracy.py", "--data", "digits", "--model", "mlp", "--augment", "none"],
    ["bench/figures.py"],
    ["bench/ops.py", "--only", "square", "concat"],
    ["bench/parts.py"],
    ["-m", "bench.papers.sc17", "--only", "breakdown", "--out", "OUT"],
], ids=lambda command: " ".join(command[:2]))  # fmt: skip
def test_other_benchmarks(root: Path, tmp_path: Path, command: list[str]) -> None:
    pytest.importorskip("torch")  # for accuracy.py and ops.py
    assert output_of(root, *(str(tmp_path) if word == "OUT" else word for word in command))["rows"]


@pytest.mark.slow
def test_memory(root: Path) -> None:
    check_values(rows_of(root, "training.py", "--no-torch", "--memory", "--only", "mlp-b8"))


@pytest.mark.slow
def test_startup(root: Path) -> None:
    rows = rows_of(root, "training.py", "--no-torch", "--startup")
    check_values(rows)
    assert {row["name"] for row in rows} == {"startup-lenet-cold", "startup-lenet-warm"}


@pytest.mark.slow
def test_odd_networks_agree_with_pytorch(root: Path) -> None:
    pytest.importorskip("torch")
    rows = rows_of(root, "training.py", "--no-jax", "--no-compile", "--odd")
    steps = [row for row in rows if not row["name"].endswith("-predict")]
    assert 2 * len(steps) == len(rows) > 0
    for row in steps:
        assert row["accuracy"]["loss"] < 1e-5 and row["accuracy"]["gradient64"] < 1e-8, row


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gemm", "conv", "stream", "threads"])
def test_kernels(root: Path, part: str) -> None:
    check_values(rows_of(root, "kernels.py", "--only", part))


@pytest.mark.slow
@pytest.mark.parametrize("script", ONE_FOR_EACH_OP)
def test_the_benchmark_of_an_op(root: Path, script: str) -> None:
    check_values(rows_of(root, script))


@pytest.mark.slow
def test_outer(root: Path, tmp_path: Path) -> None:
    """A second start trains nothing again."""
    rows = rows_of(root, "outer.py", "--out", str(tmp_path))
    check_values(rows)
    shares = {row["name"]: row["value"] for row in rows if row["name"].endswith("bytes")}
    assert len(shares) == 5 and list(shares.values()) == pytest.approx([10] * 5, rel=0.1)
    before = (tmp_path / "quick" / "results.jsonl").read_text()
    assert rows_of(root, "outer.py", "--out", str(tmp_path)) == rows
    assert (tmp_path / "quick" / "results.jsonl").read_text() == before
