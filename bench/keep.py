"""Keep the ratios of benchmarks, one small file for each CPU and commit, and show how they changed.

    python bench/roofline.py --json | python bench/keep.py        adds its rows to bench/history/CPU/COMMIT.json
    python bench/training.py --json | python bench/keep.py        also kernels.py and the scripts of single kernels
    python bench/keep.py --show                                   this CPU's rows: value of each commit, oldest first
    python bench/keep.py --show --only roofline-mlp-b128 mlp-b128-pytorch

Only ratios and shares are kept, such as a share of the machine's limit or a multiple of PyTorch's speed. Milliseconds
depend on the clock rate of one machine on one day. A ratio still varies: `bench/compare.py` decides whether a
difference is more than noise. The commit must contain everything that was measured, so a changed file is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip  (first: it selects the instruction set)

from bench.compare import git

HISTORY = Path(__file__).parent / "history"
RATIOS = re.compile(r"% of |x$|x (PyTorch|JAX|best peer)")  # units of a ratio: "% of peak", "x", "x PyTorch"
FROM_TRAINING = {"pytorch_ratio": ("-pytorch", 1, "x PyTorch"), "jax_ratio": ("-jax", 1, "x JAX"),
                 "share_of_peak": ("-peak", 100, "% of peak")}  # fmt: skip


def ratios(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {name: [value, unit]} of the rows that are ratios; rows of bench/training.py have several each."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        for key, (end, factor, unit) in FROM_TRAINING.items():
            if row.get(key) is not None:
                found[row["name"] + end] = [float(f"{factor * row[key]:.4g}"), unit]
        if RATIOS.match(row.get("unit", "")):
            found[row["name"]] = [row["value"], row["unit"]]
    return found


def slug(machine: Mapping[str, Any]) -> str:
    """Return the name of a CPU's folder: its model, number of threads and, if limited, its instruction set."""
    limited = [] if machine["isa"] == "the CPU's own" else [machine["isa"]]
    words = [machine["cpu"], f"{machine['threads']} threads", *limited]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def add(folder: Path, commit: str, date: str, machine: Mapping[str, Any], rows: Mapping[str, list[Any]]) -> Path:
    """Add rows to the file of a CPU and a commit; return its path. A row that is there already is replaced."""
    path = folder / slug(machine) / f"{date}-{commit[:12]}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"commit": commit, "date": date, "machine": {**machine}}
    kept["rows"] = dict(sorted({**kept.get("rows", {}), **rows}.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def shown(folder: Path, only: Sequence[str]) -> list[str]:
    """Return a line for each row: its values from the oldest commit to the newest."""
    files = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    files.sort(key=lambda kept: (kept["date"], order(kept["commit"])))
    lines = [f"{kept['date']} {kept['commit'][:12]}  {len(kept['rows'])} rows" for kept in files]
    for name in sorted({name for kept in files for name in kept["rows"]}):
        if not only or name in only:
            values = [kept["rows"].get(name) for kept in files]
            unit = next(value[1] for value in values if value)
            lines.append(f"{name:<48}" + "".join(f"{value[0] if value else '-':>8}" for value in values) + f"  {unit}")
    return lines


def order(commit: str) -> int:
    """Return the number of a commit's ancestors, which orders commits of one day; 0 for an unknown commit."""
    try:
        return int(git("rev-list", "--count", commit))
    except ValueError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the kept rows of this CPU")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="rows to print (default: all)")
    args = parser.parse_args()
    machine = measure.machine()
    if args.show:
        lines = shown(HISTORY / slug(machine), args.only)
        print("\n".join(lines) if lines else f"nothing is kept for {machine['cpu']} with {machine['threads']} threads")
        return
    lines = sys.stdin.read().splitlines()
    try:
        printed = json.loads(lines[-1])
        rows = ratios(printed["rows"])
    except (IndexError, KeyError, TypeError, ValueError):
        parser.error('standard input ends without a line {"rows": [...]}; expected the output of a script with --json')
    if printed.get("machine", {}).get("disturbed"):
        parser.error("other processes used the cores during the measurement; end them, then measure again")
    if not rows:
        parser.error("the benchmark printed no ratios, so there is nothing to keep")
    try:
        if git("status", "--porcelain", "--", ".", ":!bench/history"):
            parser.error("files have changed since the last commit; commit them, then measure again")
        commit, date = git("rev-parse", "HEAD"), git("show", "-s", "--format=%cs", "HEAD")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        parser.error(f"git: {error}; expected a clone of the repository")
    path = add(HISTORY, commit, date, printed.get("machine", machine), rows)
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
