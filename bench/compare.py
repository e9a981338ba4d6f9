"""Which steps and predictions became slower from commit A to commit B, beyond noise.

    python bench/compare.py main HEAD
    python bench/compare.py HEAD~5 HEAD --only mlp-b128 lenet-b64-predict
    python bench/compare.py HEAD HEAD                 the same commit twice: shows the noise of this machine

Both commits are checked out into a temporary folder (git worktree). Each start begins two new processes, one with each
commit, because a process keeps its speed: where its memory lies, for example, changes a step by some percent (Kalibera
and Jones 2013, "Rigorous benchmarking in reasonable time"). Within a start the two processes take turns, so that
changes of the clock rate affect both. A start gives one ratio for each row: the median time of B divided by that of A.

The decision needs no assumption about the distribution of these ratios. Half of all ratios lie on either side of their
median. So the number of n ratios on one side is that of heads in n tosses of a coin, and the k-th smallest and the k-th
largest ratio enclose the median with a probability that is known. k is chosen such that all rows together hold with
95%. B is slower if this interval lies above 1, and the median is above 1 by more than --tolerance.

The exit status is 1 if a row became slower, 2 if an argument is wrong. Rows: those of bench/training.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.training import AVX2, NETS, ROOT, ROWS, Worker, steps_per_turn

ERROR = 0.05  # probability that any of the intervals misses its median
DEFAULT = [row for row in ROWS if not row.endswith("-avx2")]
BUILD_SECONDS = 1200  # the first build of a commit compiles its kernels


# -- the decision ----------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """ratio: the median of the starts' ratios, time of B divided by time of A. low, high: the interval around it."""

    ratio: float
    low: float
    high: float
    text: str


def rank(n: int, error: float) -> int:
    """Return the largest k such that the k-th smallest and k-th largest of n numbers miss their median with a
    probability of at most `error`; 0 if there is none."""
    k, below = 0, 0.0
    while 2 * (below + math.comb(n, k) * 0.5**n) <= error:
        below += math.comb(n, k) * 0.5**n
        k += 1
    return k


def decide(ratios: Sequence[float], rows: int, tolerance: float) -> Verdict:
    """Return the verdict on one of `rows` rows. ratios: one of each start. tolerance: a relative difference."""
    ordered, middle = sorted(ratios), statistics.median(ratios)
    k = rank(len(ordered), ERROR / rows)
    if not k:
        return Verdict(middle, ordered[0], ordered[-1], "too few starts to decide")
    low, high = ordered[k - 1], ordered[-k]
    if low > 1 and middle > 1 + tolerance:
        return Verdict(middle, low, high, "slower")
    if high < 1 and middle < 1 / (1 + tolerance):
        return Verdict(middle, low, high, "faster")
    return Verdict(middle, low, high, "no difference beyond noise")


# -- the measurement -------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["git failed"])[-1])
    return done.stdout.strip()


@contextmanager
def worktrees(*commits: str) -> Iterator[list[Path]]:
    """Check out the commits; yield their folders, which are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="minidl-compare-") as folder:
        trees: list[Path] = []
        try:
            for number, commit in enumerate(commits):
                tree = Path(folder) / f"{number}"
                git("worktree", "add", "--detach", str(tree), commit)
                trees.append(tree)
            yield trees
        finally:
            for tree in trees:
                git("worktree", "remove", "--force", str(tree))


def times_of(workers: Sequence[Worker], row: str, turns: int, swap: bool, quick: bool) -> list[float]:
    """Return the median seconds of a step of each worker, measured in turns. swap: begin with the second one."""
    net, batch = NETS[row.removesuffix("-predict").removesuffix("-avx2")]
    seconds = [worker.build(net, batch, row.endswith("-predict"), BUILD_SECONDS) for worker in workers]
    steps = steps_per_turn(max(seconds), quick)
    found: list[list[float]] = [[] for _ in workers]
    for turn in range(turns):
        for i in (1, 0) if swap ^ (turn % 2 == 1) else (0, 1):
            time.sleep(0.005)  # gives the other worker's threads time to fall asleep
            workers[i].steps(1)  # wakes the threads and loads the data into the caches
            found[i] += workers[i].steps(steps)
    return [statistics.median(each) for each in found]


def measure_start(
    trees: Sequence[Path], rows: Sequence[str], start: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Begin new processes; return the seconds of A and of B for each row that both commits can run."""
    found = {}
    for avx2 in (False, True):
        some = [row for row in rows if row.endswith("-avx2") == avx2]
        with ExitStack() as stack:
            environment = AVX2["minidl"] if avx2 else {}
            workers = [
                stack.enter_context(Worker("minidl", args.threads, root=tree, **environment))
                for tree in (trees if some else ())
            ]
            for row in some:
                try:
                    found[row] = times_of(workers, row, args.turns, start % 2 == 1, args.quick)
                except RuntimeError as error:
                    print(f"{row}: {str(error).splitlines()[0][:100]}", flush=True)
                    return found  # a worker may have ended
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="the earlier commit: a hash, a branch or a tag")
    parser.add_argument("b", metavar="B", help="the later commit")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=DEFAULT, help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--starts", type=int, default=14, help="pairs of processes (default: 14)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each process per row and start (default: 6)")
    parser.add_argument("--tolerance", type=float, default=2.0, help="percent that do not matter (default: 2)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="6 starts with 2 short turns, to check that it runs")
    parser.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, as the last line')
    args = parser.parse_args()
    if args.quick:
        args.starts, args.turns = 6, 2
    for name, value in (("--starts", args.starts), ("--turns", args.turns), ("--threads", args.threads)):
        if value < 1:
            parser.error(f"{name} {value}: expected at least 1")
    unknown = [row for row in args.only if row not in ROWS]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}: expected some of {', '.join(ROWS)}")
    try:
        commits = [git("rev-parse", "--verify", f"{name}^{{commit}}") for name in (args.a, args.b)]
    except ValueError as error:
        parser.error(f"{args.a}, {args.b}: {error}; expected two commits of {ROOT}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the checked-out folders before
    rows = report(commits, args)
    if args.json:
        print(json.dumps({"rows": rows, "commits": commits}))
    sys.exit(any(row["verdict"] == "slower" for row in rows))


def report(commits: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all starts; print and return the rows."""
    times: dict[str, list[list[float]]] = {row: [] for row in args.only}
    with worktrees(*commits) as trees:
        for start in range(args.starts):
            for row, seconds in measure_start(trees, args.only, start, args).items():
                times[row].append(seconds)
            print(f"start {start + 1} of {args.starts}", file=sys.stderr, flush=True)
    print(f"{'':<26}{'A ms':>9}{'B ms':>9}{'B / A':>8}   {'interval':<17}verdict")
    rows = []
    for row, pairs in times.items():
        if not pairs:
            print(f"{row:<26}not measured")
            continue
        found = decide([b / a for a, b in pairs], len(times), args.tolerance / 100)
        a, b = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        between = f"{found.low:.3f} to {found.high:.3f}"
        print(f"{row:<26}{a:>9.4g}{b:>9.4g}{found.ratio:>8.3f}   {between:<17}{found.text}", flush=True)
        rows.append({"name": row, "value": round(found.ratio, 4), "unit": "x A's time", "goal": "",
                     "low": round(found.low, 4), "high": round(found.high, 4), "verdict": found.text})  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
