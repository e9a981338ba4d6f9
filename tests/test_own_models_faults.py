"""Scripts with own models: killed ranks, signals, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import PATIENCE, eventually, holders, is_gone, memory_of
from test_mpi import environment, mpiexec, nothing_left  # noqa: F401 (a fixture)

SCRIPT = str(Path(__file__).parent / "replicas" / "script.py")
RANKS = 3


class Script:
    """A scenario of replicas/script.py under `minidl.launch` or `mpiexec`, in a separate process."""

    def __init__(self, launcher: str, *arguments: str, quiet: bool = True) -> None:
        command = [sys.executable, "-m", "minidl.launch", "--threads", "1", "--workers", str(RANKS)]
        command += ["--quiet"] * quiet
        if launcher == "mpiexec":
            command = [*mpiexec(), "-n", str(RANKS), sys.executable]
        self.process = subprocess.Popen([*command, SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env=environment(MINIDL_THREADS="1"))  # fmt: skip
        self.pids: dict[int, int] = {}

    def __enter__(self) -> Script:
        """Wait until every rank has printed its process id; `pids` holds them by rank."""
        assert self.process.stdout
        while len(self.pids) < RANKS:
            text = self.process.stdout.readline()
            assert text, self.process.communicate()[1]
            line = json.loads(text)
            self.pids[line["rank"]] = line["pid"]
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> tuple[int, list[dict[str, Any]], str]:
        """Wait until the launcher ends. Return (exit code, remaining lines of the ranks, stderr).

        Notices of compilation, which come only from an empty kernel cache, are left out of stderr.
        """
        out, errors = self.process.communicate(timeout=PATIENCE)
        notices = ("compiling ", "compiled ")
        errors = "".join(line for line in errors.splitlines(keepends=True) if not line.startswith(notices))
        eventually(lambda: all(map(is_gone, self.pids.values())), "processes are left")
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return self.process.returncode, sorted(lines, key=lambda line: line["rank"]), errors


ANY_RANK = (0, pytest.param(1, marks=pytest.mark.slow))  # rank 0 leads


@pytest.mark.parametrize("victim", ANY_RANK)
def test_with_gossip_the_others_go_on_after_a_kill(victim: int) -> None:
    with Script("launch", "slow_loop", "gossip") as script:
        os.kill(script.pids[victim], signal.SIGKILL)
        code, lines, errors = script.finish()
    assert code == 0 and errors == f"minidl: replica {victim} was killed by SIGKILL\n"
    assert [line["rank"] for line in lines] == [rank for rank in range(RANKS) if rank != victim]
    assert lines[0]["result"]["weights"] == lines[1]["result"]["weights"], "the average of the survivors"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ANY_RANK)
def test_with_allreduce_the_others_stop_after_a_kill(victim: int) -> None:
    with Script("launch", "slow_loop", "allreduce") as script:
        memory = memory_of(script.process.pid)
        os.kill(script.pids[victim], signal.SIGKILL)
        code, lines, errors = script.finish()
    assert code == 2 and not lines and not holders(memory)
    first, second = errors.splitlines()
    assert first == f"minidl: replica {victim} was killed by SIGKILL"
    assert second.startswith("minidl: error: ") and f"replica {victim} died while others waited for" in second


def test_a_server_ends_if_all_workers_are_killed() -> None:
    script = Script("launch", "workers_die")
    try:
        code, lines, errors = script.finish()
    finally:
        script.process.kill()
    assert code == 2 and not lines
    *killed, last = errors.splitlines()
    assert sorted(killed) == [f"minidl: replica {rank} was killed by SIGKILL" for rank in (0, 1)]
    assert last.startswith("minidl: error: ") and "died while others waited for the result" in last


def test_mpiexec_ends_all_after_a_kill() -> None:
    with Script("mpiexec", "slow_loop", "allreduce") as script:
        os.kill(script.pids[1], signal.SIGKILL)
        code, lines, _ = script.finish()
    assert code != 0 and not lines


@pytest.mark.parametrize(("method", "number"), [
    ("allreduce", signal.SIGTERM), pytest.param("gossip", signal.SIGINT, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_interrupts_the_loops_of_all(method: str, number: signal.Signals) -> None:
    """With a synchronous method after the same step. A `with` block averages the weights before the script goes on.

    With gossip, ranks 0 and 2 wait in `allreduce` for rank 1, which stops in another step.
    """
    with Script("launch", "stopped", method) as script:
        memory = memory_of(script.process.pid)
        script.process.send_signal(number)
        code, lines, errors = script.finish()
    assert code == 128 + number and errors == "" and not holders(memory)
    assert [line["rank"] for line in lines] == list(range(RANKS))
    assert all(line["weights"] == lines[0]["weights"] for line in lines)
    for line in lines:
        assert line["error"] in (f"stopped after step {line['steps']}", "stopped in allreduce")
    if method == "allreduce":
        assert len({line["steps"] for line in lines}) == 1


def test_a_signal_between_trainings_ends_the_script_at_once() -> None:
    with Script("launch", "asleep") as script:
        script.process.send_signal(signal.SIGINT)
        code, _, errors = script.finish()
    assert code == 128 + signal.SIGINT and errors == "minidl: stopped; there was nothing to save yet\n"


@pytest.mark.slow  # test_launch.py has the same
def test_a_second_signal_stops_at_once() -> None:
    with Script("launch", "slow_loop", "gossip", quiet=False) as script:
        assert script.process.stderr
        os.kill(script.pids[1], signal.SIGSTOP)  # a rank that never ends its step
        script.process.send_signal(signal.SIGINT)
        assert any("stopping after this step" in line for line in script.process.stderr), "the launcher has ended"
        script.process.send_signal(signal.SIGINT)
        code, _, errors = script.finish()
    assert code == 128 + signal.SIGINT and errors.endswith("minidl: stopped at once\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpiexec_leaves_nothing(number: signal.Signals) -> None:
    with Script("mpiexec", "slow_loop", "gossip") as script:
        script.process.send_signal(number)
        code, lines, errors = script.finish()
    assert code != 0 and not lines and "Traceback" not in errors


@pytest.mark.slow  # test_launch.py has the same
def test_the_ranks_end_with_the_launcher() -> None:
    with Script("launch", "asleep") as script:
        memory = memory_of(script.process.pid)
        script.process.kill()
        eventually(lambda: all(map(is_gone, script.pids.values())) and not holders(memory), "something is left")


@pytest.mark.parametrize(("first", "second", "message"), [
    pytest.param(["--lr", "0.1"], ["--lr", "0.2"], "minidl.train: lr is 0.2 on rank 1, and 0.1 on rank 0: give all",
                 marks=pytest.mark.slow),
    pytest.param(["--method", "gossip"], ["--method", "ps"], "minidl.train: method is ps on rank 1, and gossip on ",
                 marks=pytest.mark.slow),
    pytest.param(["--model", "mlp"], ["--model", "lenet"], "minidl.train: --model is lenet on rank 1, and mlp on ",
                 marks=pytest.mark.slow),
    (["--data", "a.npz"], ["--data", "b.npz"], "minidl.train: y_train is int64 (64,) with the checksum "),
])  # fmt: skip
def test_the_ranks_of_mpiexec_have_different_command_lines(
    first: list[str], second: list[str], message: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for name in ("a.npz", "b.npz"):
        x, y = np.zeros((64, 8, 8, 1), np.float32), rng.integers(0, 4, 64)
        np.savez(tmp_path / name, x_train=x, y_train=y, x_test=x, y_test=y)
    train = [sys.executable, "-m", "minidl.train", "--model", "mlp", "--epochs", "1", "--quiet"]
    command = [*mpiexec(), "-n", "1", *train, *first, ":", "-n", "1", *train, *second]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=environment())
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl: ")]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith(f"minidl: error: {message}"), done.stderr
