"""One long job with a fault every 10 s: does the memory of its processes grow? (for faults.py --soak)

Each fault is a kill, a freeze or a join that replaces a dead replica. The leader is frozen, and not killed: its memory
and that of the launcher would show what grows slowly. Every 2 s, if all workers train, the memory is written into
soak.jsonl: PSS (a page that n processes share counts 1/n in each), and the size of the shared memory. At the end the
first quarter is compared with the last one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.fault_jobs import KINDS, STALL, Job, noted, untidy

WORKERS, EVERY, SAMPLE = 4, 10.0, 2.0  # seconds between two faults, and between two looks at the memory
EPOCHS = 1_000_000
LIMIT = 0.05  # growth of the memory that counts as flat


def soak(minutes: float, out: Path) -> int:
    """Run the job; print and write the result. Returns the exit code."""
    folder, file = out / "soak", out / "soak.jsonl"
    shutil.rmtree(folder, ignore_errors=True)
    file.unlink(missing_ok=True)
    chance = random.Random(0)
    job = Job(KINDS[2], WORKERS, EPOCHS, folder, chance)
    samples: list[dict[str, Any]] = []
    try:
        job.begin()
        began = time.monotonic()
        fault, sample = began + EVERY, began + EVERY
        while (now := time.monotonic()) < began + 60 * minutes and job.process.poll() is None and not job.problems:
            job.look()
            if now >= fault:
                hurt(job)
                fault += EVERY
            if now >= sample:
                sample += SAMPLE
                if len(job.able()) == len(job.ranks()) == WORKERS and not job.joiners:
                    samples.append({"seconds": round(now - began, 1), **memory_of(job)})
                    with file.open("a") as notes:
                        notes.write(json.dumps(samples[-1]) + "\n")
            time.sleep(0.02)
        job.process.send_signal(signal.SIGTERM)
        code = job.wait()
        problem = "; ".join(job.problems) or untidy(job)
        settled = [words[3] for words in noted(job, "settled")]
        if not problem and (code != 128 + signal.SIGTERM or len(settled) != len(set(settled))):
            problem = f"exit code {code}; {len(settled) - len(set(settled))} pieces were settled twice"
    finally:
        job.close()
    result = compared(samples, 60 * minutes)
    kinds = {what: sum(one.what == what for one in job.faults) for what in sorted({one.what for one in job.faults})}
    flat = all(abs(one["growth"]) <= LIMIT for one in result.values())
    about = {"minutes": minutes, "faults": kinds, "settled": len(settled), "samples": len(samples), "memory": result,
             "flat": flat, "fault": problem}  # fmt: skip
    (out / "soak.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2), flush=True)
    return int(bool(problem) or not flat)


def hurt(job: Job) -> None:
    """Replace a dead replica if there is one; else kill or freeze one of them."""
    running = job.ranks()
    if len(running) < WORKERS:
        if not job.joiners:
            job.join(WORKERS - len(running))
        return
    what = job.chance.choice(["kill", "freeze", "long freeze"])
    victims = sorted(rank for rank in job.able() if rank or what != "kill")
    if len(victims) > 1:
        rank = job.chance.choice(victims)
        seconds = {"kill": 0.0, "freeze": 1.0, "long freeze": 1.5 * STALL}[what]
        job.strike(what, rank, running[rank], seconds)


def memory_of(job: Job) -> dict[str, float]:
    """Return the memory of a job in MB: all its processes, its leader, its launcher, and the shared memory."""
    processes = {"leader": job.ranks().get(0, 0), "launcher": job.process.pid}
    found = {name: pss(pid) for name, pid in processes.items()}
    found["all"] = sum(map(pss, job.of_mark()))
    for descriptor in Path(f"/proc/{job.process.pid}/fd").iterdir():
        with suppress(OSError):
            if "memfd:minidl" in os.readlink(descriptor):
                found["shared"] = os.stat(descriptor).st_blocks * 512 / 1e6
    return {name: round(value, 2) for name, value in found.items()}


def pss(pid: int) -> float:
    """Return the proportional set size of a process, in MB."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024 / 1e6
    return 0.0


def compared(samples: list[dict[str, Any]], seconds: float) -> dict[str, dict[str, float]]:
    """Return the medians of the first and the last quarter, and by which fraction they differ."""
    found = {}
    for name in ("all", "leader", "launcher", "shared"):
        first = [one[name] for one in samples if one["seconds"] < seconds / 4 and name in one]
        last = [one[name] for one in samples if one["seconds"] > seconds * 3 / 4 and name in one]
        if first and last:
            before, after = statistics.median(first), statistics.median(last)
            found[name] = {"first": round(before, 1), "last": round(after, 1), "growth": round(after / before - 1, 4)}
    return found
