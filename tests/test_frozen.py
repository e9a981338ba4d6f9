"""Replicas that are stopped by SIGSTOP in shared memory, as a hung file system would stop them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import Launched, is_gone, job
from test_work_processes import COUNTING, PIECES, RUN, settled

STOP = int(signal.SIGSTOP)
SUSPECTED = r"minidl: replica 1 \(host \S+, process (\d+)\) has shown no sign of life for [1-9] s: "


def processes(method: str, replicas: int = 3) -> int:
    return replicas + (method == "ps")


class Frozen(Launched):
    """A job in which replica 1 stops itself in its 20th step. step: in which replica 0 waits for `go`; 0: in none."""

    def __init__(self, folder: Path, method: str, step: int = 0) -> None:
        self.log, self.out = folder / "log", folder / "run"
        victims = f"1:20:{STOP}" + f",0:{step}:0" * bool(step)
        super().__init__(
            processes(method), str(self.log), victims, *RUN, "3", "--method", method, "--out", str(self.out),
            "--stall", "1", program=[COUNTING],
        )  # fmt: skip
        self.said = ""

    def until(self, words: str) -> re.Match[str]:
        """Read the lines on stderr up to one that matches `words`."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.said += line
            if found := re.match(words, line):
                return found
        raise AssertionError(f"no {words!r} in {self.said}")

    def go(self) -> None:
        Path(f"{self.log}.go").touch()

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Wait until the job ends. Return (exit code, summary, the rest of stderr)."""
        code, lines, errors = self.finish()
        assert len(lines) == (code == 0), self.said + errors
        return code, lines[0] if lines else {}, errors


@pytest.mark.parametrize("method", ["gossip", pytest.param("ps", marks=pytest.mark.slow)])
def test_claiming_replicas_end_without_a_frozen_one(tmp_path: Path, method: str) -> None:
    """Its batch is trained again. It is killed when the others have trained all the rest."""
    with Frozen(tmp_path, method) as job:
        process = int(job.until(SUSPECTED + "it is left out until it wakes").group(1))
        code, summary, errors = job.end()
    assert code == 0 and is_gone(process)
    assert re.search(r"replica 1 \(.*\) still shows no sign of life: it is killed, so that the others can end", errors)
    assert settled(job.log) == Counter(range(3 * PIECES))
    assert summary["batches_repeated"] == 1 and summary["samples"] == 3 * 450 and summary["replicas_alive"] == 2


@pytest.mark.slow  # test_mpi_frozen.py has the same under mpiexec
@pytest.mark.parametrize("method", ["ps", "gossip"])
def test_a_claiming_replica_wakes(tmp_path: Path, method: str) -> None:
    """Another replica has claimed its batch meanwhile, so its settlement is refused. It claims others."""
    with Frozen(tmp_path, method, step=40) as job:
        process = int(job.until(SUSPECTED + "it is left out until it wakes").group(1))
        os.kill(process, signal.SIGCONT)
        job.until(r"minidl: replica 1 \(.*\) is back")
        job.go()
        code, summary, _ = job.end()
    assert code == 0 and settled(job.log) == Counter(range(3 * PIECES))
    assert summary["batches_repeated"] <= 1 and summary["samples"] == 3 * 450 and summary["replicas_alive"] == 3


@pytest.mark.slow
def test_two_frozen_replicas_do_not_stop_the_messages_between_the_others(tmp_path: Path) -> None:
    """Replicas 0 and 3 wait in their 60th step until replicas 1 and 2 are suspected. Each has two slots."""
    log, victims = tmp_path / "log", f"1:20:{STOP},2:20:{STOP},0:60:0,3:60:0"
    words = [str(log), victims, *RUN, "20", "--method", "gossip", "--mix", "mass", "--stall", "1"]
    with Launched(4, *words, "--out", str(tmp_path / "run"), program=[COUNTING]) as job:
        assert job.process.stderr
        suspected = (line for line in job.process.stderr if "it is left out until it wakes" in line)
        assert next(suspected) and next(suspected)
        Path(f"{log}.go").touch()
        code, [summary], errors = job.finish()
    assert code == 0 and summary["replicas_alive"] == 2, errors
    messages = {(sender, receiver): count for sender, receiver, _, count in summary["edges"]}
    assert min(messages[0, 3], messages[3, 0]) > 100


@pytest.mark.slow
def test_independent_replicas_end_without_a_frozen_one(tmp_path: Path) -> None:
    with Frozen(tmp_path, "local") as job:
        job.until(SUSPECTED + "it is left out until it wakes")
        code, summary, _ = job.end()
    assert code == 0 and summary["replicas_alive"] == 2


@pytest.mark.parametrize("method", ["allreduce", *(pytest.param(name, marks=pytest.mark.slow) for name in
                                                   ("local-sgd", "dpsgd"))])  # fmt: skip
def test_a_synchronous_run_waits_and_says_for_whom(tmp_path: Path, method: str) -> None:
    with Frozen(tmp_path, method) as job:
        process = int(job.until(SUSPECTED + "the others wait for it").group(1))
        who = rf"replica 1 \(host \S+, process {process}\) for \d+ s, in step 20"
        job.until(rf"minidl: replica [02] has waited \d+ s for .*; no sign of life from {who}$")
        os.kill(process, signal.SIGCONT)
        job.until(r"minidl: replica 1 \(.*\) is back")
        code, summary, _ = job.end()
    assert code == 0 and summary["replicas_alive"] == 3


@pytest.mark.parametrize("method", ["local-sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in
                                                   ("allreduce", "gossip", "ps", "local"))])  # fmt: skip
def test_a_signal_ends_a_job_with_a_frozen_replica(tmp_path: Path, method: str) -> None:
    """The launcher kills it, and the others save. The run can be resumed."""
    with Frozen(tmp_path, method, step=40) as job:
        process = int(job.until(SUSPECTED).group(1))
        job.process.send_signal(signal.SIGTERM)
        job.go()
        code, _, errors = job.end()
    assert code == 128 + signal.SIGTERM and is_gone(process)
    assert re.search(r"replica 1 \(.*\) has shown no sign of life for \d s since the signal: it is killed", errors)
    assert "minidl: saved; to continue" in errors
    arguments = ["--resume", str(job.out), "--quiet", "--json"]
    with Launched(processes(method, 2), *arguments, program=["-m", "minidl.train"]) as resumed:
        code, [summary], errors = resumed.finish()
    assert code == 0, errors
    assert json.loads((job.out / "summary.json").read_text())["samples"] == summary["samples"] == 3 * 450


@pytest.mark.slow
def test_a_frozen_server_is_killed_and_the_workers_are_saved(tmp_path: Path) -> None:
    """No other rank can replace it. The run can be resumed, and each batch is trained."""
    log, out = tmp_path / "log", tmp_path / "run"
    words = [str(log), f"2:40:{STOP}", *RUN, "3", "--method", "ps", "--stall", "1", "--out", str(out)]
    with Launched(3, *words, program=[COUNTING]) as job:
        code, lines, errors = job.finish()
    assert code == 2 and not lines
    first, last = [line for line in errors.splitlines() if " has waited " not in line]
    found = re.fullmatch(r"minidl: replica 2 \(host \S+, process (\d+)\) has shown no sign of life for \d s: it is "
                         r"the server, which no other rank can replace, so it is killed, and the others save and end",
                         first)  # fmt: skip
    assert found and is_gone(int(found.group(1)))
    assert re.match("minidl: error: replica 2 died while others waited for a .*; the others are saved; to continue "
                    "from their average: ", last)  # fmt: skip
    before = settled(log)
    with Launched(3, str(log), "", "--resume", str(out), "--quiet", "--json", program=[COUNTING]) as job:
        code, [summary], errors = job.finish()
    assert code == 0, errors
    assert before.total() >= 38 and settled(log) == Counter(range(3 * PIECES)) and summary["samples"] == 3 * 450


def test_messages_to_others_go_on_when_frozen_replicas_hold_all_slots() -> None:
    code, said, errors = job(4, "receivers")
    assert code == 0, errors
    assert sum(said.values()) == 4, "no mass is lost"


def test_the_words_of_the_table() -> None:
    """The launcher's numbers, which it does not import from messages.py."""
    from minidl.comm import memory
    from minidl.comm.fabric.base import Column, Freeze, State, Trust

    for kind, names in ((Column, ("STATE", "STEP", "STALL", "PATIENCE", "SERVER")),
                        (Freeze, ("WAIT", "LEAVE_OUT", "KILL")),
                        (State, ("JOINING", "READY", "TRAINING", "PAUSED", "FINISHED", "DEAD", "COMING")),
                        (Trust, ("TRUSTED", "SUSPECTED", "CONDEMNED"))):  # fmt: skip
        assert all(getattr(memory, name) == kind[name] for name in names)
