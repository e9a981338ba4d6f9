"""Replicas join a running job in shared memory, and die while they join. The members are suspended meanwhile, so that
no outcome depends on the speed of the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import PATIENCE, eventually, holders, is_gone, memory_of
from test_replicas import SMALL, Command, command  # noqa: F401 (a fixture)

from minidl.comm import memory
from minidl.comm.launch.join import FILE, RunningJob, connected
from minidl.comm.transport.messages import State

LONG = [*SMALL, "--workers", "2", "--stall", "600", "--out", "run"]


class Run:
    """A run in the folder `run`, which this test process watches as --join does."""

    def __init__(self, command: Command, *options: str) -> None:  # noqa: F811
        self.command = command
        self.process = command.start(*LONG, *options)
        command.wait_for_epoch("run")

    @property
    def folder(self) -> Path:
        return self.command.folder / "run"

    def look(self, what: Callable[[RunningJob], Any]) -> Any:
        with connected(self.folder) as job:
            return what(job)

    def state(self, rank: int) -> State:
        return State(int(self.look(lambda job: job.numbers[memory.at(rank, memory.STATE)])))

    def suspend(self, *ranks: int) -> None:
        self._signal(signal.SIGSTOP, ranks)

    def wake(self, *ranks: int) -> None:
        self._signal(signal.SIGCONT, ranks)

    def kill(self, rank: int) -> None:
        self._signal(signal.SIGKILL, (rank,))

    def _signal(self, signum: signal.Signals, ranks: tuple[int, ...]) -> None:
        running = self.command.replicas()
        for rank in ranks:
            os.kill(running[rank], signum)

    def join(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "minidl.train", "--join", "run", *options], cwd=self.command.folder, text=True,
            env=os.environ | {"PYTHONPATH": str(self.command.root)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_for(self, rank: int, state: State) -> None:
        eventually(lambda: self.state(rank) is state, f"replica {rank} is not {state.name}")

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


def said(joiner: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = joiner.communicate(timeout=PATIENCE)
    return joiner.returncode, out + errors


@pytest.mark.slow
def test_a_replica_joins_dies_and_joins_again(command: Command) -> None:  # noqa: F811
    run = Run(command, "--method", "gossip", "--mix", "mass", "--epochs", "40", "--validation", "0.1", "--quiet")
    inode = memory_of(run.process.pid)
    run.suspend(0, 1)
    dies = run.join()
    run.wait_for(2, State.ARRIVED)
    run.kill(2)
    assert said(dies) == (2, "replica 2 has ended before it had joined; the job has printed the reason\n")
    began, first = time.monotonic(), run.join()
    run.wait_for(2, State.ARRIVED)
    run.wake(0, 1)
    code, words = said(first)
    assert code == 0 and words.startswith("replica 2 has joined run: its first step was done after ")
    print(f"joined after {time.monotonic() - began:.1f} s, with members that were suspended")
    run.suspend(0, 1)
    run.kill(2)
    eventually(lambda: run.state(2) is State.DEAD, "replica 2 is not dead")
    again = run.join("--workers", "2")
    run.wait_for(2, State.ARRIVED)
    run.wait_for(3, State.ARRIVED)
    full = run.join()
    assert said(full) == (2, "minidl: error: the job is full: 0 of its 4 places are free, and 1 are wanted. "
                             "--max-workers reserves more when a run begins\n")  # fmt: skip
    run.wake(0, 1)
    code, words = said(again)
    assert code == 0 and words.count("has joined run") == 2
    code, errors = run.finish()
    assert code == 0, errors
    assert errors.splitlines() == ["minidl: replica 2 was killed by SIGKILL before it had joined",
                                   "minidl: replica 2 was killed by SIGKILL"]  # fmt: skip
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["workers"], summary["replicas_alive"]) == (2, 4)
    assert summary["samples"] == 40 * 1620 and summary["batches_repeated"] <= 2
    assert not (run.folder / FILE).exists() and not holders(inode)


@pytest.mark.slow
def test_a_worker_of_a_server_joins_and_the_leader_dies(command: Command) -> None:  # noqa: F811
    run = Run(command, "--method", "ps", "--epochs", "30", "--quiet")
    run.suspend(0, 1)
    joiner = run.join()
    run.wait_for(3, State.ARRIVED)
    run.kill(0)
    eventually(lambda: run.state(0) is State.DEAD, "replica 0 is not dead")
    run.wake(1)
    assert said(joiner)[0] == 0
    run.suspend(1, 3)
    refilled = run.join()
    run.wait_for(0, State.ARRIVED)
    run.wake(1, 3)
    assert said(refilled)[0] == 0
    assert run.finish()[0] == 0
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["replicas_alive"] == 3 and summary["samples"] == 30 * 1800


@pytest.mark.slow
def test_a_run_that_stops_ends_the_newcomers(command: Command) -> None:  # noqa: F811
    run = Run(command, "--method", "gossip", "--epochs", "1000", "--quiet")
    inode = memory_of(run.process.pid)
    run.suspend(0, 1)
    joiner = run.join()
    eventually(lambda: 2 in command.replicas(), "no newcomer was started")
    newcomer = command.replicas()[2]
    run.process.send_signal(signal.SIGTERM)
    eventually(lambda: run.look(lambda job: job.words[memory.STOP]), "the launcher has not noticed the signal")
    run.wake(0, 1)
    code, errors = run.finish()
    assert (code, errors) == (143, "minidl: saved; to continue: python -m minidl.train --resume run\n")
    assert said(joiner) == (0, "run has ended before replica 2 had made a step\n")
    assert is_gone(newcomer) and not holders(inode) and not (run.folder / FILE).exists()


def test_a_synchronous_method_takes_a_newcomer_and_another_one_in_its_place(command: Command) -> None:  # noqa: F811
    """The place is filled again before the others have noticed the death."""
    run = Run(command, "--method", "allreduce", "--on-death", "continue", "--max-workers", "3", "--epochs", "8",
              "--quiet")  # fmt: skip
    for joins in (1, 2):
        run.suspend(0, 1)
        if joins == 2:
            run.kill(2)
            eventually(lambda: run.state(2) is State.DEAD, "replica 2 is not dead")
        joiner = run.join()
        run.wait_for(2, State.ARRIVED)
        run.wake(0, 1)
        code, words = said(joiner)
        assert code == 0 and "has joined run" in words
    code, errors = run.finish()
    assert code == 0, errors
    assert "minidl: replica 2 died; the other 2 go on from step" in errors
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["replicas_alive"] == 3 and summary["consensus_distance"] == 0.0 and summary["epochs"] == 8
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    changes = [(entry["joined"], entry["died"]) for entry in entries if entry["event"] == "members"]
    assert changes == [([2], []), ([], [2]), ([2], [])]
