"""Plays many scenarios (minidl/training/scenario.py), and writes how many ran and what was found.

    python bench/scenarios.py 100000                    seeds 0 to 99,999; started again, it continues
    python bench/scenarios.py 100000 --processes 2
    python bench/scenarios.py --planted                 plants each bug of tests/planted.py, and looks for it

Each of N processes plays every N-th seed, and notes its progress in a file in --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

CHUNK = 100  # seeds between two notes of the progress
SAMPLE = 97  # seeds between two times; not 100, because every tenth seed is played twice
LONGEST = 1000  # the largest seed with which a planted bug must be found


def progress_of(path: Path) -> dict[str, Any]:
    if path.exists():
        return dict(json.loads(path.read_text()))
    return {"next": 0, "outcomes": {}, "failed": {}, "milliseconds": []}


def run(first: int, step: int, seeds: int, path: Path) -> None:
    """Play the seeds first, first + step, ... below `seeds`, from the last note in the file."""
    from minidl.engine.environment import prepare

    prepare(1)
    from minidl.training.playing import Violation, play

    parent, noted = parent_process(), progress_of(path)
    outcomes, seed = Counter(noted["outcomes"]), noted["next"] or first
    while seed < seeds and (parent is None or parent.is_alive()):  # also end if the parent is killed
        began = time.process_time()
        try:
            outcomes[" ".join(play(seed).outcomes)] += 1
        except Violation as violation:
            noted["failed"][str(seed)] = str(violation)
            print(f"scenario {seed}: {violation}", file=sys.stderr, flush=True)
        if seed // step % SAMPLE == 0:
            noted["milliseconds"].append(round(1e3 * (time.process_time() - began), 1))
        seed += step
        if seed // step % CHUNK == 0 or seed >= seeds:
            noted |= {"next": seed, "outcomes": dict(outcomes)}
            path.write_text(json.dumps(noted))


def together(paths: list[Path]) -> str:
    """Return how many scenarios have run, and what was found."""
    all_of = [progress_of(path) for path in paths if path.exists()]
    outcomes = sum((Counter(one["outcomes"]) for one in all_of), Counter[str]())
    failed = {int(seed): text for one in all_of for seed, text in one["failed"].items()}
    times = sorted(value for one in all_of for value in one["milliseconds"])
    median = times[len(times) // 2] if times else 0.0
    played = outcomes.total() + len(failed)
    lines = [f"{played:,} scenarios, {len(failed)} failed; median {median:.0f} ms of processor time"]
    lines += [f"  {count:8,}  {outcome}" for outcome, count in outcomes.most_common(8)]
    return "\n".join(lines + [f"  scenario {seed}: {text}" for seed, text in sorted(failed.items())])


def planted() -> int:
    """Plant each bug, and print the first seed that finds it. Returns the number of bugs that were not found."""
    from minidl.engine.environment import prepare

    prepare(1)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from planted import BUGS, first_seed

    missed = 0
    for name in BUGS:
        seed, message = first_seed(name, LONGEST)
        missed += seed is None
        print(f"{name}: {'not found' if seed is None else f'seed {seed}: {message}'}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=10_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/scenarios"))
    parser.add_argument("--planted", action="store_true")
    given = parser.parse_args()
    if given.planted:
        return planted()
    given.out.mkdir(parents=True, exist_ok=True)
    paths = [given.out / f"{first}-of-{given.processes}.json" for first in range(given.processes)]
    workers = [get_context("spawn").Process(target=run, args=(first, given.processes, given.seeds, path))
               for first, path in enumerate(paths)]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(together(paths))
    return int(any(progress_of(path)["failed"] for path in paths) or any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    sys.exit(main())
