"""The launcher starts and ends ranks, leaves no process or memory behind, and reports errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from launching import Launched, eventually, holders, is_gone, job, memory_of
from quick import quick

# A rank that does not import NumPy: it prints its process id, number of threads and cores, then ends or sleeps.
LIGHT = r"""
import json, os, sys, time
from minidl.comm.launch import local
local.follow()
local.settle()
rank = local.place().rank
result = [os.getpid(), os.environ["MINIDL_THREADS"], sorted(os.sched_getaffinity(0))]
os.write(1, json.dumps({"rank": rank, "result": result}).encode() + b"\n")
time.sleep(0 if sys.argv[1] == "end" else 1000)
"""


def light(ranks: int, what: str, **options: object) -> Launched:
    return Launched(ranks, what, program=("-c", LIGHT), **options)


def test_import_loads_no_slow_packages() -> None:
    code = "import sys, minidl.comm.launch; print([name for name in ('numpy', 'numba') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_each_rank_has_its_cores_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.delenv("MINIDL_THREADS", raising=False)
    code, said, _ = job(len(cores), "end", program=("-c", LIGHT))
    assert code == 0
    assert sorted(said[rank][1:] for rank in said) == [["1", [core]] for core in cores]
    code, said, _ = job(1, "end", program=("-c", LIGHT))
    assert said[0][1:] == [str(len(cores)), cores]
    code, said, errors = job(len(cores) + 1, "end", program=("-c", LIGHT), quiet=False, threads=3)
    assert said[0][1:] == ["3", cores]
    assert errors.startswith(f"minidl: {len(cores) + 1} processes of 3 threads on {len(cores)} cores")
    monkeypatch.setenv("MINIDL_THREADS", "2")
    code, said, _ = job(1, "end", program=("-c", LIGHT))
    assert said[0][1] == "2"
    monkeypatch.setenv("MINIDL_THREADS", "two")
    code, _, errors = job(1, "end", program=("-c", LIGHT))
    assert code and errors == "minidl: error: MINIDL_THREADS is 'two': expected a whole number of 1 or more\n"


@pytest.mark.parametrize("victims", [
    "launcher", pytest.param("all", marks=pytest.mark.slow), "replicas",
])  # fmt: skip
def test_a_kill_leaves_no_process_and_no_memory(victims: str) -> None:
    with Launched(3, "steps", "alone") as launched:
        ranks = [launched.line()["pid"] for _ in range(3)]
        memory = memory_of(launched.process.pid)
        assert holders(memory) == {launched.process.pid, *ranks}
        if victims != "replicas":
            launched.process.kill()
        if victims != "launcher":
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: all(map(is_gone, ranks)) and not holders(memory), "processes or memory are left")
        code, _, errors = launched.finish()
    assert code == (128 + signal.SIGKILL if victims == "replicas" else -signal.SIGKILL)
    if victims == "replicas":
        assert sorted(errors.splitlines()) == [f"minidl: replica {rank} was killed by SIGKILL" for rank in range(3)]
    named = [name for name in os.listdir("/dev/shm") if "minidl" in name]
    assert not [name for name in named if not name.startswith("minidl-scenario-")], "scenarios write their files there"


def test_ranks_that_have_not_joined_end_with_the_launcher() -> None:
    with light(2, "wait") as launched:
        ranks = [launched.line()["result"][0] for _ in range(2)]
        launched.process.kill()
        eventually(lambda: all(map(is_gone, ranks)), "ranks are still running")


def kill_one(kind: str) -> tuple[int, list[int], str]:
    with Launched(3, "steps", kind, "50") as launched:
        pids = {line["rank"]: line["pid"] for line in (launched.line() for _ in range(3))}
        os.kill(pids[1], signal.SIGKILL)
        code, lines, errors = launched.finish()
    return code, sorted(line["rank"] for line in lines), errors


def test_survivors_continue() -> None:
    assert kill_one("alone") == (0, [0, 2], "minidl: replica 1 was killed by SIGKILL\n")


def test_a_rank_that_waits_for_a_dead_rank_reports_it() -> None:
    code, said, errors = kill_one("ring")
    assert code == 2 and not said
    assert errors.startswith("minidl: replica 1 was killed by SIGKILL\n") and "replica 1 died while others" in errors


@pytest.mark.parametrize(("kind", "number"), [
    ("together", signal.SIGINT), ("ring", signal.SIGTERM),
    pytest.param("ring", signal.SIGHUP, marks=pytest.mark.slow),
])  # fmt: skip
def test_all_stop_after_the_same_step(kind: str, number: signal.Signals) -> None:
    with Launched(3, "steps", kind, quiet=False, threads=1) as launched:
        for _ in range(3):
            launched.line()
        launched.process.send_signal(number)
        code, lines, errors = launched.finish()
    assert len({line["result"] for line in lines}) == 1 and len(lines) == 3
    assert code == 128 + number  # the exit code of ranks that stop before the end
    assert errors.endswith("minidl: stopping after this step; a second signal stops at once\n")


def test_a_second_signal_kills() -> None:
    with Launched(2, "steps", "alone", "1000", "1000", quiet=False, threads=1) as launched:
        ranks = [launched.line()["pid"] for _ in range(2)]
        launched.process.send_signal(signal.SIGINT)
        assert launched.process.stderr
        assert any("stopping after this step" in line for line in launched.process.stderr), "the launcher has ended"
        launched.process.send_signal(signal.SIGINT)
        code, _, errors = launched.finish()
    assert code == 128 + signal.SIGINT and errors == "minidl: stopped at once\n"
    assert all(map(is_gone, ranks))


def test_nothing_to_save_yet() -> None:
    with light(2, "wait") as launched:
        ranks = [launched.line()["result"][0] for _ in range(2)]
        launched.process.send_signal(signal.SIGTERM)
        code, _, errors = launched.finish()
    assert code == 128 + signal.SIGTERM and errors == "minidl: stopped; there was nothing to save yet\n"
    assert all(map(is_gone, ranks))


def test_ignored_signals_stay_ignored() -> None:
    """Under nohup (SIGHUP is ignored), a run must survive the closing of its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with light(1, "wait") as launched:
            launched.line()
            launched.process.send_signal(signal.SIGHUP)
            launched.process.send_signal(signal.SIGTERM)
            assert launched.finish()[0] == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_launcher_whose_parent_ignores_sigchld() -> None:
    code = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from minidl.comm.launch import local
sys.exit(local.run([], 2, program=("-c", "import sys; sys.exit(7)")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_real_time_signal() -> None:
    with light(1, "wait") as launched:
        os.kill(launched.line()["result"][0], signal.SIGRTMIN + 3)
        code, _, errors = launched.finish()
    number = int(signal.SIGRTMIN) + 3
    assert (code, errors) == (128 + number, f"minidl: replica 0 was killed by signal {number}\n")


@pytest.mark.parametrize("words", quick(
    ["x", "0", "0 1 98 99 1", "2 2 0 1 1", "-1 2 0 1 1", "0 1 0 1 1 1"], "x", "0 1 98 99 1",
))  # fmt: skip
def test_a_rank_that_the_launcher_has_not_started(words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "minidl.train"], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"MINIDL_RANK": words})  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"minidl: error: MINIDL_RANK is '{words}', and this process is not a rank that")


@pytest.mark.parametrize("scenario", ["fail", "stuck"])
def test_a_rank_that_fails_ends_all(scenario: str) -> None:
    """Ranks that wait for messages end, and so do ranks that notice nothing. Only the failed rank prints an error."""
    code, said, errors = job(3, scenario, grace=0.5 if scenario == "stuck" else 60.0)
    assert code == 2 and not said
    assert errors == "minidl: error: replica 1: a deliberate failure\n"


def test_the_exit_code_of_a_failed_program() -> None:
    code, _, errors = job(2, program=("-c", "import sys; sys.exit(7)"))
    assert code == 7 and errors == ""
