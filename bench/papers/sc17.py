"""Repeat the comparison of You, Buluc and Demmel (SC 2017) in a simulation, and print its tables beside the paper's.

    python -m bench.papers.sc17 --data-dir ../shared/data --processes 2     all parts, 5 seeds; repeat it to go on
    python -m bench.papers.sc17 --quick                                     digits instead of MNIST, 1 seed
    python -m bench.papers.sc17 --only breakdown --cluster mine.toml        one part, on other hardware
    python -m bench.papers.sc17 --fit                                       the rate of [host] for 87% communication
    python -m bench.papers.sc17 --tune --data-dir ../shared/data            search learning rates, on other seeds
                                                                            (--write: the others use what it finds)

Each result is appended to results.jsonl in the folder --out (sc17_store.py). A second call computes only those that are
missing, so a run that was killed goes on. Several processes may work on one folder. The files of this command:

    sc17_paper.py       the methods and the numbers of the paper       sc17_tables.py      tables in Markdown
    sc17_jobs.py        what is computed                               sc17_figures.py     the figures
    sc17_training.py    trainings in virtual time                      costs.py            simulations of costs only

Calibrated, that is, put in: the rate of [host] in clusters/gpu-node-8.toml, so that Original EASGD communicates in 87%
of its time. Everything else comes out of the simulation, and is called predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import measure
from bench.papers import sc17_jobs, sc17_tables
from bench.papers.sc17_figures import draw
from bench.papers.sc17_findings import Findings
from bench.papers.sc17_jobs import DIGITS, MNIST, Plan, fitted, require_host
from bench.papers.sc17_store import Jobs, Result, Store, work
from bench.papers.sc17_training import Orphan
from minidl.comm import cluster as clusters
from minidl.errors import EXPECTED, ConfigError, explained, report
from minidl.run.signals import Stopped

HERE = Path(__file__).parent
PARTS = ("breakdown", "scaling", "parts", "accuracy")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sc17"), help="folder of results.jsonl and the figures")
    parser.add_argument("--cluster", default="gpu-node-8", help="a cluster file or example with 8 devices and a host")
    parser.add_argument("--data-dir", default="", help="folder that contains mnist/")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="digits, one seed, up to 8 nodes")
    parser.add_argument("--processes", type=int, default=1, help="processes that train, with one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further job after this time")
    parser.add_argument("--fit", action="store_true", help="only print the rate of [host] for 87%% communication")
    parser.add_argument("--tune", action="store_true", help="only search the learning rates")
    parser.add_argument("--write", action="store_true", help="write the tables, figures or rates beside this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--helper", action="store_true", help=argparse.SUPPRESS)  # started by --processes
    args = parser.parse_args(argv)
    for name, value, least in (("--seeds", args.seeds, 1), ("--first-seed", args.first_seed, 0),
                               ("--processes", args.processes, 1)):  # fmt: skip
        if value < least:
            raise ConfigError(f"{name} {value}: expected {least} or more")
    if args.data_dir and not Path(args.data_dir).is_dir():
        raise ConfigError(f"--data-dir {args.data_dir!r}: there is no such folder; expected one that contains mnist/")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    try:
        execute(parse(argv), sys.argv[1:] if argv is None else argv)
    except Stopped as stopped:
        print("sc17: stopped; repeat the command to go on", file=sys.stderr)
        sys.exit(stopped.code)
    except EXPECTED as error:
        sys.exit(report(explained(error, "stop other programs, or give fewer --processes")))


def execute(args: argparse.Namespace, argv: Sequence[str]) -> None:
    cluster = clusters.load(args.cluster)
    require_host(cluster)
    if args.fit:
        print(f"[host] rate = {fitted(cluster):.3g} bit/s")
        return
    plan = Plan(
        args.cluster, cluster, DIGITS if args.quick else MNIST, args.data_dir,
        range(args.first_seed, args.first_seed + (1 if args.quick else args.seeds)), args.quick,
        str(measure.machine()["cpu"]), Orphan() if args.helper else lambda: None,
    )  # fmt: skip
    store = Store(args.out / "results.jsonl", lambda key: print(f"  {key}", flush=True))
    if args.tune:
        finish(args, argv, store, lambda: plan.missing_rates(store.found))
        if not plan.missing_rates(store.found):
            sc17_jobs.write_rates(plan, store.found, HERE if args.write else args.out)
        return
    jobs = wanted(plan, args.only or PARTS)
    finish(args, argv, store, lambda: [(key, job) for key, job in jobs if key not in store.found])
    results = {key: store.found[key] for key, _ in jobs if key in store.found}
    found = Findings(plan, results)
    text = sc17_tables.tables(found)
    print(text)
    folder = HERE if args.write else args.out
    print("\n" + ", ".join(map(str, draw(found, folder))))
    if args.write:
        page = sc17_tables.page(found, text)
        (HERE / "RESULTS-sc17.md").write_text(page, encoding="utf-8")
    if args.json:
        rows = [{"name": key, "value": value, "unit": "ms", "goal": ""} for key, value in steps(results)]
        print(json.dumps({"rows": rows}))


def wanted(plan: Plan, parts: Sequence[str]) -> Jobs:
    """Return the jobs of these parts of the comparison: first those without arithmetic."""
    costs = plan.costs()
    jobs = [job for part in PARTS if part in parts for job in costs[part]]
    return jobs + (plan.trainings() if "accuracy" in parts else [])


def finish(args: argparse.Namespace, argv: Sequence[str], store: Store, pending: Callable[[], Jobs]) -> None:
    """Do all pending jobs, with further processes if there are several."""
    end = time.monotonic() + 60 * args.minutes
    command = [sys.executable, "-m", "bench.papers.sc17", *argv, "--helper"]
    number = 0 if args.helper or not pending() else args.processes - 1
    helpers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(number)]
    try:
        work(store, lambda: pending() if time.monotonic() < end else [])
    finally:
        for helper in helpers:
            helper.terminate()
            helper.wait()
    store.read()
    if left := len(pending()):
        print(f"sc17: {left} jobs or more are left; repeat the command to go on", file=sys.stderr)
    if args.helper:
        sys.exit(0)


def steps(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (key, milliseconds) of all results that are the time of a step."""
    for key, result in results.items():
        if isinstance(result.get("milliseconds"), float):
            yield key, result["milliseconds"]


__all__ = ["Result", "main"]

if __name__ == "__main__":
    main()
