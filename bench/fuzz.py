"""Feed mutated inputs to every parser: python -m bench.fuzz --inputs 1000000 --out runs/fuzz

Reports four things for each parser of fuzz_parsers.py: the seeds used, the escapes, the slowest input, and the peak
memory above that of the idle process. An escape is an input that causes an error outside ALLOWED. The state is saved
regularly, so the same command continues a run. `--repeat PARSER SEED` reads one input again, with a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minidl.run.folder import write

ROOT = Path(__file__).parent.parent
LONGEST = 2.0  # goal for the slowest input, in seconds
ALARM = 20  # seconds after which an input is given up
MEMORY = 200 * 2**20  # goal for the peak memory, in bytes above the idle process
CHUNK = 5000  # inputs per process


class TooSlow(Exception):
    """An input took longer than ALARM."""


def work(name: str, start: int, count: int) -> dict[str, Any]:
    """Read the inputs of seeds start, start + 1, ... in this process."""
    from bench.fuzz_parsers import PARSERS, attempt

    def give_up(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, give_up)
    escapes, slowest = [], (0.0, -1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        case = PARSERS[name](Path(folder))
        for seed in (-1, -2, -3):  # warm-up: imports modules and compiles kernels
            attempt(case, seed, name)
        idle = peak_memory()
        for seed in range(start, start + count):
            began = time.perf_counter()
            signal.alarm(ALARM)
            error = attempt(case, seed, name)
            signal.alarm(0)
            slowest = max(slowest, (time.perf_counter() - began, seed))
            if error:
                escapes.append([seed, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"])
    return {"escapes": escapes, "slowest": slowest, "memory": peak_memory() - idle}


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(name: str, start: int, count: int) -> dict[str, Any]:
    """Run `work` in another process."""
    command = [sys.executable, "-m", "bench.fuzz", "--work", name, str(start), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        return {"escapes": [[start, f"the process ended with {done.returncode}: {done.stderr[-500:]}"]],
                "slowest": (0.0, -1), "memory": 0}  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def run(inputs: int, out: Path) -> None:
    """Read this number of inputs, divided among the parsers, and save the state after each chunk."""
    from bench.fuzz_parsers import PARSERS

    out.mkdir(parents=True, exist_ok=True)
    file = out / "fuzz.json"
    state: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for name in PARSERS:
        state.setdefault(name, {"seeds": 0, "escapes": [], "slowest": [0.0, -1], "memory": 0})
    while (left := inputs - sum(one["seeds"] for one in state.values())) > 0:
        name = min(PARSERS, key=lambda name: state[name]["seeds"])
        one, count = state[name], min(CHUNK, left)
        found = worker(name, one["seeds"], count)
        one["escapes"] += found["escapes"]
        one["slowest"] = max(one["slowest"], list(found["slowest"]))
        one["memory"] = max(one["memory"], found["memory"])
        one["seeds"] += count
        write(file, json.dumps(state, indent=1).encode())
        print(f"{name}: {one['seeds']:,} inputs, {len(one['escapes'])} escapes", file=sys.stderr, flush=True)
    print(table(state))


def table(state: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| parser | seeds | escapes | slowest (s, seed) | peak memory (MB) |", "|---|---:|---:|---:|---:|"]
    for name, one in state.items():
        lines.append(f"| {name} | 0 to {one['seeds'] - 1:,} | {len(one['escapes'])} | {one['slowest'][0]:.3f}, "
                     f"{one['slowest'][1]} | {one['memory'] / 1e6:.0f} |")  # fmt: skip
    inputs, escapes = (sum(values) for values in zip(*((o["seeds"], len(o["escapes"])) for o in state.values())))
    good = not escapes and all(o["slowest"][0] <= LONGEST and o["memory"] <= MEMORY for o in state.values())
    lines.append(f"\n{inputs:,} inputs, {escapes} escapes: {'all limits kept' if good else 'LIMITS EXCEEDED'}")
    lines += [f"escape: {name} {seed}: {words}" for name, o in state.items() for seed, words in o["escapes"][:20]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="the number of inputs, shared by all parsers")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="the folder of the state")
    parser.add_argument("--repeat", nargs=2, metavar=("PARSER", "SEED"), help="read one input again")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        print(json.dumps(work(given.work[0], int(given.work[1]), int(given.work[2]))))
    elif given.repeat:
        from bench.fuzz_parsers import PARSERS, attempt

        with tempfile.TemporaryDirectory() as folder:
            error = attempt(PARSERS[given.repeat[0]](Path(folder)), int(given.repeat[1]), given.repeat[0])
        if error:
            raise error
        print("only errors that are allowed")
    else:
        run(given.inputs, given.out)


if __name__ == "__main__":
    main()
