"""Hurt jobs of real processes at random moments: python -m bench.faults --faults 1000 --out runs/faults

Each job is a run of `python -m minidl.train --workers` of some seconds to minutes. Its ranks are killed (SIGKILL) and
frozen (SIGSTOP), for shorter and for longer than --stall, and others join (--join). Some jobs are stopped by a signal,
or their launcher is killed; then they are resumed. Each job must end, train each batch, print no traceback, and leave
nothing behind: see fault_jobs.py. Each seed determines the job, and what is done to it; not when it hits which line.

    python -m bench.faults --faults 1000            the results are saved after each job: started again, it continues
    python -m bench.faults --seed 7                 one job
    python -m bench.faults --soak 30                one job of 30 minutes with a fault every 10 s: is its memory flat?
    python -m bench.faults --report                 what was done so far, and what was found
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import time
from bisect import bisect
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import soak
from bench.fault_jobs import KINDS, Job, noted, untidy, wrong

FAULTS, PAUSE = 60, (0.3, 3.5)  # in a job; seconds between two of them
STARTS = 5  # after so many, a job that ends with a death is hurt no more
SOON = 10.0  # seconds after a fault in which the longest pause of the training is looked for
ENDS = {"finish": 3, "finish early": 2, "hurt the end": 3, "stop": 3, "kill the launcher": 1}  # with weights


def job(seed: int, out: Path, faults: int = FAULTS) -> dict[str, Any]:
    """Run the job of a seed. Returns what was done and what happened; "fault" says what was wrong, or is ""."""
    chance = random.Random(seed)
    kind, workers = KINDS[seed % len(KINDS)], chance.choice([3, 4, 5])
    end = chance.choices([*ENDS], [*ENDS.values()])[0]
    epochs, folder = (15 if kind.images > 10_000 else 30), out / f"job-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    hurt = Job(kind, workers, epochs, folder, chance)
    try:
        hurt.begin()
        problem = play(hurt, end, faults)
    finally:
        hurt.close()
    found = {"seed": seed, "kind": kind.words, "workers": workers, "end": end, "fault": problem,
             "seconds": round(time.monotonic() - began, 1), "faults": Counter(one.what for one in hurt.faults),
             "joins": hurt.joins, "pauses": pauses(hurt)}  # fmt: skip
    if not problem:
        hurt.remove()
    return found


def play(hurt: Job, end: str, faults: int) -> str:
    """Hurt a job that has begun, and wait for its end. Returns what was wrong, or ""."""
    again, command = 0, ["--resume", "run"]
    if end == "finish early":
        hurt.play(faults // 2, PAUSE)
        hurt.hasten()
        faults -= faults // 2
    hurt.play(faults, PAUSE)
    if end == "hurt the end":
        hurt.hasten()
        hurt.hurt_the_end()
    if hurt.process.poll() is None and end in ("stop", "kill the launcher"):
        stops = end == "stop"
        before = {words[3] for words in noted(hurt, "settled")}
        hurt.process.send_signal(hurt.chance.choice([signal.SIGTERM, signal.SIGINT]) if stops else signal.SIGKILL)
        hurt.did(end)
        code = hurt.wait()
        problem = trouble(hurt) or untidy(hurt, killed=not stops)
        if not problem and stops and code and "minidl: saved; to continue" not in hurt.errors.read_text():
            problem = f"exit code {code} after a signal, and nothing was saved"
        if problem or (stops and not code):
            return problem or wrong(hurt, code)
        again = 0 if stops else len(before) + hurt.kind.pieces
        hurt.start(*command)
        hurt.play(faults // 4, PAUSE)
    while True:
        hurt.hasten()
        code = hurt.wait()
        problem = trouble(hurt) or untidy(hurt)
        died = code == 2 and "the others are saved" in hurt.errors.read_text() and not hurt.kind.survives
        if problem or not died:
            return problem or wrong(hurt, code, again)
        hurt.start(*command)
        if hurt.starts < STARTS:
            hurt.play(faults // 4, PAUSE)


def trouble(hurt: Job) -> str:
    return "; ".join(hurt.problems)


def pauses(hurt: Job) -> list[tuple[str, float]]:
    """Return, for kills and freezes with no other fault near them, the longest time without a step."""
    times = sorted(float(words[0]) for what in ("settled", "trained") for words in noted(hurt, what))
    moments = [fault.moment for fault in hurt.faults]
    found = []
    for i, fault in enumerate(hurt.faults):
        end = min([fault.moment + SOON, *moments[i + 1 : i + 2]])
        before = [one for one in hurt.faults[:i] if fault.moment - one.moment < SOON and one.what != "join"]
        first, last = bisect(times, fault.moment) - 1, bisect(times, end)
        alone = not before and end - fault.moment > 2
        if alone and fault.what in ("kill", "freeze", "long freeze") and 0 <= first < last < len(times):
            gaps = [after - before for before, after in pairwise(times[first : last + 1])]
            found.append((fault.what, round(max(gaps), 2)))
    return found if hurt.kind.survives else []  # else the longest pause is that until the run is resumed


def report(jobs: list[dict[str, Any]]) -> str:
    """Return what was done, and what was found."""
    faults = Counter[str]()
    for one in jobs:
        faults.update(one["faults"])
    bad = [one for one in jobs if one["fault"]]
    lines = [f"{len(jobs)} jobs, {faults.total()} faults ({', '.join(f'{n} {what}' for what, n in faults.items())}), "
             f"{len(bad)} jobs with a problem; {sum(one['seconds'] for one in jobs) / 60:.0f} minutes"]  # fmt: skip
    for kind in KINDS:
        mine = [one for one in jobs if one["kind"] == kind.words]
        done = Counter[str]()
        for one in mine:
            done.update(one["faults"])
        lines.append(f"  {kind.words:40} {len(mine):3} jobs  {dict(done)}")
    lines.append(f"  ends: {dict(Counter(one['end'] for one in jobs))}")
    lines.append("  --join to the first step: " + spread([value for one in jobs for value in one["joins"]]))
    for claims in (True, False):
        for what in ("kill", "freeze", "long freeze"):
            values = [value for one in jobs for name, value in one["pauses"] if name == what
                      and any(kind.words == one["kind"] and kind.claims is claims for kind in KINDS)]  # fmt: skip
            lines.append(f"  {'claimed' if claims else 'divided'} work, longest pause after a {what}: {spread(values)}")
    return "\n".join(lines + [f"  seed {one['seed']} ({one['kind']}, {one['end']}): {one['fault']}" for one in bad])


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    return (f"median {statistics.median(ordered):.2f} s, 90% within {ordered[int(0.9 * (len(ordered) - 1))]:.2f} s, "
            f"at most {ordered[-1]:.2f} s ({len(ordered)})")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--seed", type=int, help="run this job alone")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="run one long job, and look at its memory")
    parser.add_argument("--report", action="store_true", help="print what was done so far")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets commands in the background ignore it
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    if given.soak:
        return soak.soak(given.soak, out)
    if given.seed is not None:
        print(json.dumps(job(given.seed, out), indent=2))
        return 0
    file = out / "jobs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    while not given.report and sum(sum(one["faults"].values()) for one in done) < given.faults:
        done.append(job(len(done), out))
        with file.open("a") as notes:
            notes.write(json.dumps(done[-1]) + "\n")
        last = done[-1]
        print(f"{sum(sum(one['faults'].values()) for one in done)} faults; job {last['seed']} ({last['kind']}) took "
              f"{last['seconds']} s: {last['fault'] or 'good'}", flush=True)  # fmt: skip
    print(report(done))
    return int(any(one["fault"] for one in done))


if __name__ == "__main__":
    sys.exit(main())
