"""`minidl.Prediction` beside inference engines: ONNX Runtime, OpenVINO, and PyTorch (traced and frozen).

    python bench/predict.py                                     12 cells: 4 nets x batch 1, 8, 128; 10 minutes
    python bench/predict.py --quick --only mlp-b1 lenet-b8

    pip install torch onnxruntime openvino onnx onnxscript      the peers; one that is missing gets one line

All engines load the same weights and predict the same images (engines.py), each in its own process, with the same
number of threads. Their outputs must agree with PyTorch in float64 to 1e-5 of the largest output. The processes take
turns. Their threads spin for a while after an answer, so a turn begins after a pause (--pause) and an untimed answer.
The table shows the median time of an answer. It also shows the seconds from the start of a process to its third answer,
and its resident memory then. minidl's kernels are compiled before, in the process that checks the outputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.engines import ENGINES, SHAPES
from bench.training import KEEP_MEMORY, ROOT, Worker, steps_per_turn

CELLS = [f"{net}-b{batch}" for net in SHAPES for batch in (1, 8, 128)]
PEERS = {"pytorch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}  # engine -> package
TOLERANCE = 1e-5


def missing(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def engines() -> list[str]:
    """Return the engines that can run here; print a line for each of the others."""
    if missing(["torch"]):
        print("torch is not installed, and it writes the model for all engines: pip install torch")
        return []
    found = []
    for name in ENGINES:
        needed = [PEERS[name]] if name in PEERS else []
        needed += ["onnx", "onnxscript"] if name in ("onnxruntime", "openvino") else []
        if absent := missing(needed):
            print(f"{name}: not measured; pip install {' '.join(absent)}")
        else:
            found.append(name)
    return found


def measure_cell(cell: str, names: Sequence[str], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one net and batch in turns; return the row. folder: empty."""
    net, batch = cell.split("-b")
    command = [sys.executable, "-m", "bench.engines", net, batch, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{cell}: PyTorch cannot export it: {done.stderr.strip().splitlines()[-1]}")
    row: dict[str, Any] = {"name": f"predict-{cell}", "seconds": {}, "difference": {}, "start": {}, "megabytes": {}}
    options = {"folder": str(folder), "threads": args.threads}
    with ExitStack() as stack:
        workers, steps = {}, {}
        if "minidl" in names:  # compiles the kernels
            with Worker("minidl", args.threads) as first:
                first.build(net, int(batch), True, 1200, **options)
        for name in names:
            began = time.perf_counter()
            worker = stack.enter_context(Worker(name, args.threads, **(KEEP_MEMORY if name == "pytorch" else {})))
            try:
                seconds = worker.build(net, int(batch), True, **options)
                row["start"][name] = time.perf_counter() - began
                checked = worker.request(do="check", options=options)
            except RuntimeError as error:
                print(f"    {name}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            row["difference"][name], row["megabytes"][name] = checked["difference"], checked["resident"] / 1e6
            workers[name], steps[name] = worker, steps_per_turn(seconds, args.quick)
        times: dict[str, list[float]] = {name: [] for name in workers}
        for turn in range(args.turns):
            order = [*workers][turn % len(workers) :] + [*workers][: turn % len(workers)]
            for name in order:
                time.sleep(args.pause)
                workers[name].steps(1)
                times[name].append(statistics.median(workers[name].steps(steps[name])))
        row["seconds"] = {name: statistics.median(each) for name, each in times.items()}
    return row


def finish(row: dict[str, Any]) -> None:
    """Compute the row's value, the speed of minidl relative to the fastest peer, and print the row."""
    ours = row["seconds"].get("minidl")
    peers = {name: seconds for name, seconds in row["seconds"].items() if name != "minidl"}
    line = f"{row['name'].removeprefix('predict-'):<15}"
    for name in ENGINES:
        seconds = row["seconds"].get(name)
        text = f"{1e3 * seconds:.3f}" if name == "minidl" and seconds else f"{seconds / ours:.2f}x" if seconds else "-"
        line += f"{text:>13}"
    if ours and peers:
        best = min(peers, key=peers.__getitem__)
        row |= {"value": float(f"{peers[best] / ours:.4g}"), "unit": "x best peer", "goal": "> 1", "best": best}
        line += f"{row['value']:>9.2f} {best}"
    print(line, flush=True)
    for name, error in row["difference"].items():
        if not error <= TOLERANCE:
            print(f"    {name}: outputs differ by {error:.1e} of the largest one; expected at most {TOLERANCE}")
    starts = [f"{name} {row['start'][name]:.2f} s {row['megabytes'][name]:.0f} MB" for name in row["seconds"]]
    print(f"    to the third answer, memory: {', '.join(starts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 short turns, to check that it runs")
    parser.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, as the last line')
    parser.add_argument("--only", nargs="+", metavar="CELL", default=CELLS, help=f"some of {', '.join(CELLS)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each engine")
    parser.add_argument("--turns", type=int, default=7, help="turns of each engine per cell (default: 7)")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds before each turn (default: 0.25)")
    args = parser.parse_args()
    if args.quick:
        args.turns = 2
    unknown = [cell for cell in args.only if cell not in CELLS]
    if unknown:
        parser.error(f"unknown cells {', '.join(unknown)}: expected some of {', '.join(CELLS)}")
    names, rows = engines(), []
    print(f"{'':<15}{'minidl ms':>13}" + "".join(f"{name:>13}" for name in PEERS) + "   best / minidl")
    for cell in args.only if names else ():
        with tempfile.TemporaryDirectory(prefix="minidl-predict-") as folder:
            row = measure_cell(cell, names, Path(folder), args)
        finish(row)
        rows.append(row)
    ahead = sum(row.get("value", 0) > 1 for row in rows)
    print(f"minidl is ahead of the best peer in {ahead} of {len(rows)} cells")
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
