"""Scripts with own models under `minidl.launch` and `mpiexec`: several replicas train one model together."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401 (a fixture)

import minidl
from minidl import launch, ops
from minidl.comm.topology import build
from minidl.errors import ConfigError

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "tests" / "replicas" / "script.py")
SECONDS = 300
LAUNCHERS = ("launch", pytest.param("mpiexec", marks=pytest.mark.slow))


def start(launcher: str, ranks: int, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = {
        "launch": [sys.executable, "-m", "minidl.launch", "--quiet", "--workers", str(ranks)],
        "mpiexec": [*mpiexec(), "-n", str(ranks), sys.executable] if launcher == "mpiexec" else [],
        "python": [sys.executable],
    }[launcher]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=SECONDS,
                          env=environment(MINIDL_THREADS="1", MINIDL_OVERSUBSCRIBE="1", **more))  # fmt: skip


def imported_script() -> ModuleType:
    """Import replicas/script.py, for what its scenarios use."""
    spec = spec_from_file_location("script", SCRIPT)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(launcher: str, ranks: int, *arguments: str) -> list[Any]:
    """Run a scenario of replicas/script.py. Return the results of all ranks, in order."""
    done = start(launcher, ranks, SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == list(range(ranks)), done.stdout
    return [line["result"] for line in sorted(lines, key=lambda line: line["rank"])]


@pytest.mark.parametrize(("launcher", "ranks", "method", "validation"), [
    pytest.param("launch", 3, "gossip", "0.2", marks=pytest.mark.slow),
    ("launch", 2, "allreduce", "0.2"),
    pytest.param("launch", 3, "ps", "0", marks=pytest.mark.slow),
    ("mpiexec", 3, "dpsgd", "0"),
])  # fmt: skip
def test_fit_trains_one_model_with_all_replicas(launcher: str, ranks: int, method: str, validation: str) -> None:
    found = results(launcher, ranks, "fit", method, validation)
    first = found[0]
    assert first["told"] == [1, 2, 3] and [result["told"] for result in found[1:]] == [[]] * (ranks - 1)
    for result in found:
        assert result["weights"] == first["weights"] and result["epochs"] == first["epochs"]
        assert result["test"] == first["test"] and len(result["epochs"]) == 3
        assert result["again"] == pytest.approx(result["test"], rel=1e-5), "the score is that of the model"
    assert first["epochs"][2]["loss"] < first["epochs"][0]["loss"]
    assert ("validation_accuracy" in first["epochs"][0]) == (validation != "0" and method == "allreduce")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_loop_with_allreduce_is_sgd_with_the_batches_of_all_replicas(launcher: str) -> None:
    """In each step, 2 replicas with 8 images each must do the same as one replica with these 16 images."""
    script = imported_script()
    found = results(launcher, 2, "loop", "allreduce", "5")
    assert found[0]["weights"] == found[1]["weights"] and found[0]["size"] == 2 and found[0]["steps"] == 5
    (x, y), used = script.images(), [result["used"] for result in found]
    assert not any(set(one) & set(other) for one, other in zip(*used, strict=True)), "shards have no common samples"
    minidl.seed(0)
    alone = script.model()
    with minidl.join(alone, method="allreduce", lr=0.1, momentum=0.0, weight_decay=0.0) as replica:
        for one, other in zip(*used, strict=True):
            replica.step(x[one + other], y[one + other])
    assert replica.size == 1
    np.testing.assert_allclose(script.weights(alone), found[0]["weights"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_collectives_before_between_and_after_trainings(launcher: str) -> None:
    script = imported_script()
    found = results(launcher, 3, "twice")
    ring, round = build("ring", 3), 0
    for part in (0, 2, 4):
        for name in script.SIZES:
            arrays = np.stack([script.array(name, rank).ravel() for rank in range(3)])
            for rank in range(3):
                total, sent, mixed = found[rank][part][name]
                expected = arrays.sum(axis=0), arrays[1], ring.matrix(round)[rank] @ arrays
                for result, right in zip((total, sent, mixed), expected, strict=True):
                    np.testing.assert_allclose(result, right[-3:], rtol=1e-5, atol=1e-6)
                assert [total, sent] == found[0][part][name][:2], "all ranks have the same bits"
            round += 1
    assert [result[1] for result in found] == [3, 3, 3] and [result[3] for result in found] == [[1, 2, 3], [], []]


def test_a_script_without_a_launcher_has_a_single_replica() -> None:
    (result,) = results("python", 1, "loop", "gossip", "3")
    assert result["size"] == 1 and result["steps"] == 3
    (result,) = results("python", 1, "fit", "gossip", "0.2")
    assert result["told"] == [1, 2, 3] and "validation_accuracy" in result["epochs"][0]


MESSAGES = {
    "shape": "allreduce: array is float64 (2, 4) on rank 1, and float64 (2, 3) on rank 0: give all ranks the same",
    "type": "broadcast: array is float32 (2,) on rank 1, and float64 (2,) on rank 0: give all ranks the same",
    "root": "broadcast: root is 1 on rank 1, and 0 on rank 0: give all ranks the same",
    "topology": "neighbor_average: topology is ring on rank 1, and complete on rank 0: give all ranks the same",
    "call": "rank 1 calls allreduce, rank 0 calls broadcast: all ranks must make the same calls",
    "join": "rank 1 calls fit, rank 0 calls join: all ranks must make the same calls",
    "model": "join: model is Sequential of 181 parameters on rank 1, and Sequential of 172 parameters on rank 0: "
             "give all ranks the same",
    "lr": "join: lr is 0.2 on rank 1, and 0.1 on rank 0: give all ranks the same",
    "method": "fit: method is gossip on rank 1, and dpsgd on rank 0: give all ranks the same",
    "period": "join: period is 3 on rank 1, and 2 on rank 0: give all ranks the same",
    "version": "rank 1 has minidl 9.9, rank 0 has minidl 9.8: install one version",
}  # fmt: skip


def test_the_others_notice_the_end_of_a_rank_after_a_training() -> None:
    done = start("launch", 4, SCRIPT, "ends_first")
    assert done.returncode == 0 and "minidl" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["rank"]: line["result"] for line in lines} == {0: 2.0, 2: 0.0, 3: 2.0}


def test_fast_sums_end_with_their_training() -> None:
    assert results("mpiexec", 2, "fast") == [[2, False]] * 2


@pytest.mark.parametrize(("launcher", "method", "apart"), [
    pytest.param("launch", "gossip", "0", marks=pytest.mark.slow),
    ("mpiexec", "allreduce", "1"),
    pytest.param("launch", "allreduce", "0", marks=pytest.mark.slow),
    pytest.param("mpiexec", "gossip", "0", marks=pytest.mark.slow),
    pytest.param("mpiexec", "gossip", "1", marks=pytest.mark.slow),
])  # fmt: skip
def test_another_training_after_an_exception(
    launcher: str, method: str, apart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages that nobody has read do not disturb what follows. One rank's exception ends the training of all."""
    monkeypatch.setenv("MINIDL_MPI_ONLY", apart)  # concerns only mpiexec
    fault, second = "a fault of the loop", "join: the replica of an earlier minidl.join has not finished: "
    left = "finish: replica 1 has left the training by an exception, so the others cannot complete it: "
    for rank, found in enumerate(results(launcher, 3, "again", method)):
        assert found[0].startswith(second) and found[1] == fault and found[2].startswith(second)
        assert found[3] == fault if rank == 1 else found[3].startswith(left)
        assert found[4:] == [3.0, 2]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_differ_get_one_line_with_both_values(launcher: str) -> None:
    found = results(launcher, 3, "mistakes")
    data = found[0].pop("data")
    assert data.startswith("fit: x_train is float32 (96, 4, 4, 1) with the checksum ") and "on rank 1, and" in data
    assert found[0] == MESSAGES
    assert found[1] == found[2] == {**MESSAGES, "data": data}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("ranks", "what", "words"), [
    (3, "ended", "script.py, line {}: replica 1 ended its script while others wait for it in "),
    pytest.param(3, "left", "replica 1 has left the training by an exception, so the others cannot complete it: ",
                 marks=pytest.mark.slow),
    pytest.param(2, "shape", "script.py, line {}: allreduce: array is float64 (4,) on rank 1, and float64 (3,) on ",
                 marks=pytest.mark.slow),
    (2, "everywhere", "script.py, line {}: fit: unknown option 'epoch'. Did you mean 'epochs'? Known: "),
    (2, "steps", "finish: replica 0 has made 3 steps, and replica 1 has begun step 4: with allreduce, all make "),
])  # fmt: skip
def test_an_uncaught_error_is_reported_once(launcher: str, ranks: int, what: str, words: str) -> None:
    done = start(launcher, ranks, SCRIPT, "uncaught", what)
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl: ") or "Traceback" in line]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("minidl: error: "), done.stderr
    assert all(part in lines[0] for part in words.split("{}"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_fault_of_the_script_prints_one_traceback_and_ends_all(launcher: str) -> None:
    done = start(launcher, 3, SCRIPT, "uncaught", "fault")
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1 and "launch.py" not in done.stderr
    line = "minidl: error: replica 1 raised this exception, which ends the script on all ranks\n"
    assert f"ZeroDivisionError: a fault of the script\n{line}" in done.stderr and done.stderr.count("minidl: ") == 1


def test_a_loss_of_ones_own() -> None:
    """The gradient of twice the loss, at half the learning rate, makes the same step."""
    script, trained = imported_script(), []
    (x, y), plain = script.images(), dict(momentum=0.0, weight_decay=0.0)
    for lr, options in (0.2, {}), (0.1, {"loss": lambda logits, y: 2 * ops.cross_entropy(logits, y)}):
        minidl.seed(0)
        net = script.model()
        with minidl.join(net, lr=lr, **plain, **options) as replica:
            losses = [replica.step(x[:8], y[:8]) for _ in range(3)]
        trained.append((np.array(losses) * lr, script.weights(net)))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"join: loss is 'mse'; expected a function of \(logits, y\), or None"):
        minidl.join(net, loss="mse")
    with pytest.raises(ConfigError, match="label_smoothing has no effect on a loss of your own: leave it out"):
        minidl.join(net, loss=ops.cross_entropy, label_smoothing=0.1)


def test_a_script_runs_as_with_python(tmp_path: Path) -> None:
    found = results("launch", 2, "place")
    for arguments, folder, name, file, size in found:
        assert (arguments, folder, name, file) == ([SCRIPT, "place"], str(Path(SCRIPT).parent), "__main__", SCRIPT)
        assert size == 2
    assert start("launch", 2, SCRIPT, "uncaught", "exit").returncode == 5
    (tmp_path / "beside.py").write_text("value = 7\n")
    own = "import sys, beside\nsys.exit(beside.value if sys.argv[1:] == ['--workers', '3'] else 1)\n"
    (tmp_path / "own.py").write_text(own)
    assert start("launch", 1, str(tmp_path / "own.py"), "--workers", "3").returncode == 7


@pytest.mark.parametrize(("content", "message"), [
    (None, "does not exist; expected a Python script"),
    ("folder", "is a folder; expected a Python script"),
    (b"\x7fELF\x00\x01\xff", "expected a Python script"),
    (b"x = 1\nfor\n", ", line 2: invalid syntax; expected a Python script"),
])  # fmt: skip
def test_what_is_no_script_is_refused_once(
    tmp_path: Path, content: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    if content == "folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    assert launch.main(["--workers", "3", str(path), "--epochs", "3"]) == 2
    out, error = capfd.readouterr()
    assert not out and error.startswith(f"minidl: error: {path}") and error.count("\n") == 1
    assert error.endswith(message + "\n")


@pytest.mark.parametrize(("words", "message"), [
    ([], "no script is given"),
    (["--workers", "2"], "no script is given"),
    (["--workers", "0", "a.py"], "workers: expected a whole number of 1 or more, got 0"),
    (["--worker", "2", "a.py"], "Did you mean '--workers'?"),
])  # fmt: skip
def test_bad_command_lines(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_and_a_launch_inside_mpiexec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.main(["--help"]) == 0
    page = capfd.readouterr().out
    assert "usage: python -m minidl.launch [options] script.py [arguments]" in page and "--workers N" in page
    assert max(map(len, page.splitlines())) <= 88
    for name, value in {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert launch.main([SCRIPT]) == 2
    assert "mpiexec has started 4 processes already: run python" in capfd.readouterr().err


def test_the_launcher_imports_no_slow_package(root: Path) -> None:
    code = ("import sys, minidl.launch; minidl.launch.main(['--help'])\n"
            "print([name for name in ('numpy', 'numba', 'mpi4py') if name in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
