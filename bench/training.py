"""Time of a training step and of a prediction in minidl, PyTorch and JAX.

    python bench/training.py                                  all rows, takes 15 minutes
    python bench/training.py --quick --only lenet-b64 vgg-b64
    python bench/training.py --odd                            unusual nets (bench/odd.py): speed, and gradients
                                                              compared with PyTorch's in float64
    python bench/training.py --memory --startup               peak memory of a step; seconds to the first step

A row NET-bBATCH is a complete training step: forward, loss, backward, momentum SGD. NET-bBATCH-predict is a forward
pass in evaluation mode. NET-bBATCH-avx2 is a training step in minidl and PyTorch, limited to AVX2. Each library runs in
its own process. The processes take turns, so that changes of the clock rate affect all of them equally. minidl is
compared with PyTorch's fastest setting. Each row first finds the best combination of memory layout and malloc, then
tries this combination with one thread, and with torch.compile.

With --odd, odd-NET is a step with 37 images, and odd-NET-predict the prediction of one.

Each row also prints the share of the machine's arithmetic peak that minidl reaches. The peak is the rate of a loop of
multiply-adds on registers. The operations of a net are counted as its layers define them. Winograd's method needs
fewer, so the share can exceed 100%.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NETS = {"mlp-b128": ("mlp", 128), "mlp-b32": ("mlp", 32), "mlp-b8": ("mlp", 8), "lenet-b64": ("lenet", 64),
        "vgg-b64": ("vgg", 64), "resnet20-b128": ("resnet20", 128)}  # fmt: skip
ROWS = [f"{net}{kind}" for kind in ("", "-avx2", "-predict") for net in NETS]
GOALS = {"mlp-b128": (3.0, 1.35), "mlp-b32": (2.6, 1.35), "mlp-b8": (3.0, 1.35), "lenet-b64": (2.6, 6.0),
         "vgg-b64": (3.0, 6.0), "resnet20-b128": (2.0, 3.0)}  # fmt: skip
AVX2 = {
    "minidl": {"MINIDL_ISA": "avx2"},
    "pytorch": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
# By default glibc returns large freed blocks to the system at once, and new blocks cause page faults. PyTorch is faster
# if glibc keeps the freed blocks.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def allocators() -> dict[str, dict[str, str]]:
    """Return {name: environment}: glibc's malloc, the same with KEEP_MEMORY, and other installed allocators."""
    found = {"malloc": {}, "malloc that keeps memory": KEEP_MEMORY}
    for name in ("tcmalloc_minimal", "jemalloc"):
        library = ctypes.util.find_library(name)
        if library:
            found[name] = {"LD_PRELOAD": library}
    return found


class Worker:
    """A process with one library (worker.py). Requests and replies are lines of JSON. root: of the repository."""

    def __init__(self, library: str, threads: int, root: Path = ROOT, **environment: str) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("BENCH_DEBUG") else None,
            env={**os.environ, "NUMBA_NUM_THREADS": str(threads), **environment},
            cwd=root,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def request(self, timeout: float = 300, **request: Any) -> dict[str, Any]:
        """Return the reply to a request. Raises RuntimeError on an error, an exit, or no reply within `timeout` s."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], timeout)
            line = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            line, ready = "", [None]
        if not line:
            self.close()
            raise RuntimeError("ended unexpectedly" if ready else f"no reply within {timeout:.0f} s")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def build(self, net: str, batch: int, predict: bool, timeout: float = 300, **options: Any) -> float:
        """Build a net and make three steps; return the seconds of the third."""
        seconds = self.request(timeout, do="build", net=net, batch=batch, predict=predict, options=options)["seconds"]
        return float(seconds[-1])

    def steps(self, steps: int) -> list[float]:
        """Make this number of steps; return the seconds of each."""
        return list(self.request(do="steps", steps=steps)["seconds"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def steps_per_turn(seconds: float, quick: bool) -> int:
    """Return the number of steps in a turn: as many as fit into 0.15 s (quick: 0.03 s), from 1 to 100."""
    return max(1, min(100, int((0.03 if quick else 0.15) / seconds)))


def candidates(net: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Yield the settings of PyTorch to try: (name, environment, options)."""
    layouts = {"contiguous": False} if net == "mlp" else {"channels last": True, "contiguous": False}
    for malloc, environment in allocators().items():
        if args.quick and malloc == "malloc":
            continue
        for layout, channels_last in layouts.items():
            name = f"{layout}, {malloc}"
            yield name, environment, {"channels_last": channels_last, "compile": False, "threads": args.threads}


def best_pytorch(
    net: str, batch: int, predict: bool, isa: dict[str, str], args: argparse.Namespace
) -> tuple[Worker, str]:
    """Find PyTorch's fastest setting. Return (a worker with a net built in this setting, the setting's name).

    isa: environment that restricts the instruction set.
    """
    times: dict[str, float] = {}
    settings = {}
    workers: dict[str, Worker] = {}

    def attempt(name: str, environment: dict[str, str], options: dict[str, Any]) -> None:
        settings[name] = environment, options
        worker = Worker("pytorch", args.threads, **isa, **environment)
        try:
            seconds = worker.build(net, batch, predict, args.compile_seconds if options["compile"] else 300, **options)
            warm = worker.steps(max(5, 2 * steps_per_turn(seconds, args.quick)))
        except RuntimeError as error:
            print(f"    PyTorch, {name}: {str(error).splitlines()[0][:100]}", flush=True)
            worker.close()
            return
        times[name], workers[name] = statistics.median(warm), worker

    for name, environment, options in candidates(net, args):
        attempt(name, environment, options)
    if not times:
        raise RuntimeError("no setting of PyTorch works")
    if not args.quick:
        environment, options = settings[best := min(times, key=times.__getitem__)]
        if args.threads > 1:
            attempt(f"{best}, 1 thread", environment, {**options, "threads": 1})
        if not args.no_compile:
            attempt(f"{best}, compiled", environment, {**options, "compile": True})
    best = min(times, key=times.__getitem__)
    for name, worker in workers.items():
        if name != best:
            worker.close()
    print(f"    PyTorch: {'; '.join(f'{name} {1e3 * t:.3g} ms' for name, t in times.items())}", flush=True)
    return workers[best], best


def measure_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build the net in each library, then measure the libraries in turns. Print and return the row."""
    base = name.removesuffix("-avx2").removesuffix("-predict")
    predict, avx2 = name.endswith("-predict"), name.endswith("-avx2")
    net, batch = NETS[base] if base in NETS else (base.removeprefix("odd-"), 1 if predict else args.odd_batch)
    isa = AVX2 if avx2 else {"minidl": {}, "pytorch": {}}
    print(f"\n{name}", flush=True)
    row: dict[str, Any] = {"name": name, "minidl_ms": None, "pytorch_ms": None, "jax_ms": None}
    workers: dict[str, Worker] = {}
    try:
        workers["minidl"] = Worker("minidl", args.threads, **isa["minidl"])
        seconds = workers["minidl"].build(net, batch, predict, eager=args.eager)
        rates = workers["minidl"].request(do="peak")["gflops"]
        steps = {"minidl": steps_per_turn(seconds, args.quick)}
        if not args.no_torch:
            workers["pytorch"], row["pytorch_setting"] = best_pytorch(net, batch, predict, isa["pytorch"], args)
            steps["pytorch"] = steps_per_turn(statistics.median(workers["pytorch"].steps(3)), args.quick)
        if not args.no_jax and not avx2 and base in NETS:
            workers["jax"] = Worker("jax", args.threads)
            steps["jax"] = steps_per_turn(workers["jax"].build(net, batch, predict), args.quick)
        times: dict[str, list[float]] = {library: [] for library in workers}
        for _ in range(10 if args.quick else args.turns):
            for library, worker in workers.items():
                time.sleep(0.005)  # gives the previous worker's threads time to fall asleep
                worker.steps(1)  # wakes the threads and loads the data into the caches
                times[library] += worker.steps(steps[library])
        rates += workers["minidl"].request(do="peak")["gflops"]
        flops = workers["minidl"].request(do="flops", net=net, batch=batch, predict=predict)["flops"]
    finally:
        for worker in workers.values():
            worker.close()
    for library, each in times.items():
        row[f"{library}_ms"] = round(1e3 * statistics.median(each), 4)
        row[f"{library}_best"] = round(1e3 * min(each), 4)
    for library, goal in zip(("pytorch", "jax"), goals(base, predict, avx2)):
        if row[f"{library}_ms"]:
            row[f"{library}_ratio"] = round(row[f"{library}_ms"] / row["minidl_ms"], 3)
            row[f"{library}_ratio_of_best"] = round(row[f"{library}_best"] / row["minidl_best"], 3)
            row[f"{library}_goal"] = goal
    row["share_of_peak"] = round(flops / max(rates) / 1e6 / row["minidl_ms"], 3)
    print_row(row)
    return row


def goals(base: str, predict: bool, avx2: bool) -> tuple[float | None, float | None]:
    """Return the goals for minidl's speed, as multiples of the speeds of (PyTorch, JAX). None: no goal."""
    if base not in NETS:
        return 1.5 if predict else 1.3, None
    return (2.0, 1.35) if predict else (1.3, None) if avx2 else GOALS[base]


def print_row(row: dict[str, Any]) -> None:
    for library in ("minidl", "pytorch", "jax"):
        if row[f"{library}_ms"] is not None:
            line = f"    {library:<8} {row[f'{library}_ms']:>9.3f} ms, best {row[f'{library}_best']:>9.3f}"
            if library != "minidl":
                goal = row[f"{library}_goal"]
                line += f"   minidl {row[f'{library}_ratio']:.2f}x, best times {row[f'{library}_ratio_of_best']:.2f}x"
                line += f" (goal {goal}x)" if goal else ""
            print(line + (f"   {row['pytorch_setting']}" if library == "pytorch" else ""), flush=True)
    print(f"    minidl: {row['share_of_peak']:.0%} of the arithmetic peak (operations by definition)", flush=True)


def measure_odd(args: argparse.Namespace) -> list[dict[str, Any]]:
    sys.path.insert(0, str(ROOT))
    from bench.odd import BATCH, ODD

    args.odd_batch = BATCH
    rows = []
    names = [name for net in ODD for name in (f"odd-{net}", f"odd-{net}-predict")]
    for name in [name for name in names if name in (args.only or names)]:
        row, net = measure_row(name, args), name.removeprefix("odd-")
        if net in ODD and not args.no_torch:
            with Worker("minidl", args.threads) as worker:
                row["accuracy"] = found = worker.request(do="compare", net=net, batch=BATCH)
            print(f"    errors relative to PyTorch in float64: minidl's loss in float32 {found['loss']:.1e}; its "
                  f"gradients in float64 {found['gradient64']:.1e}, in float32 {found['gradient']:.1e} (largest for "
                  f"parameter {found['worst']}); PyTorch's gradients in float32 {found['pytorch_gradient']:.1e}",
                  flush=True)  # fmt: skip
        rows.append(row)
    return rows


def measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the peak memory of a training step; see `peak_memory` in worker.py."""
    rows = []
    for name in [name for name in args.only or NETS if name in NETS]:
        net, batch = NETS[name]
        for library in ("minidl",) if args.no_torch else ("minidl", "pytorch"):
            if library == "minidl":
                with Worker(library, args.threads) as worker:  # compiles the kernels
                    worker.build(net, batch, False, eager=args.eager)
            with Worker(library, args.threads) as worker:
                found = worker.request(do="memory", net=net, batch=batch)
            for kind in ("growth", "peak"):
                value = round(found[kind] / 1e6, 1)
                print(f"memory of {name}, {kind}, {library}: {value:.0f} MB", flush=True)
                goal = "<= PyTorch's" if library == "minidl" else ""
                rows.append({"name": f"memory-{name}-{kind}-{library}", "value": value, "unit": "MB", "goal": goal})
    return rows


def measure_startup(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the seconds from the start of a process to the end of the first LeNet step."""
    rows = []
    for kind, goal in (("cold", "< 30"), ("warm", "< 2"), ("pytorch", "")):
        if kind == "pytorch" and args.no_torch:
            continue
        seconds = []
        library = "pytorch" if kind == "pytorch" else "minidl"
        command = [sys.executable, "-m", "bench.worker", "--first-step", library]
        for _ in range(1 if kind == "cold" else 3):
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "NUMBA_NUM_THREADS": str(args.threads)}
                environment |= {"NUMBA_CACHE_DIR": cache} if kind == "cold" else {}
                began = time.perf_counter()
                process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
                assert process.stdout
                done = process.stdout.readline()
                seconds.append(time.perf_counter() - began)
                if process.wait() or not done:
                    raise SystemExit(f"{' '.join(command)} failed")
        value = statistics.median(seconds)
        print(f"first step of LeNet, {kind}: {value:.2f} s ({args.threads} threads)", flush=True)
        rows.append({"name": f"startup-lenet-{kind}", "value": round(value, 2), "unit": "s", "goal": goal})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns, fewer settings of PyTorch")
    parser.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, as the last line')
    parser.add_argument("--only", nargs="+", metavar="NAME",
                        help=f"rows: {', '.join(ROWS)}; with --odd, odd-NET and odd-NET-predict")  # fmt: skip
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="do not try torch.compile")
    parser.add_argument("--compile-seconds", type=float, default=240, help="time limit for torch.compile")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each library")
    parser.add_argument("--turns", type=int, default=20, help="turns of each library per row")
    parser.add_argument("--eager", action="store_true", help="run minidl eagerly on the tape, without recording")
    parser.add_argument("--odd", action="store_true", help="unusual networks: speed and correctness")
    parser.add_argument("--memory", action="store_true", help="peak memory of a step")
    parser.add_argument("--startup", action="store_true", help="seconds from process start to the first step")
    args = parser.parse_args()
    unknown = [name for name in args.only or [] if name not in ROWS and not name.startswith("odd-")]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}: expected some of {', '.join(ROWS)}")
    if not installed("torch"):
        args.no_torch = True
    if not installed("jax"):
        args.no_jax = True

    rows: list[dict[str, Any]] = []
    if args.odd:
        rows += measure_odd(args)
    if args.memory:
        rows += measure_memory(args)
    if args.startup:
        rows += measure_startup(args)
    if not (args.odd or args.memory or args.startup):
        rows += [measure_row(name, args) for name in ROWS if name in (args.only or ROWS)]
    if args.json:
        print(json.dumps({"rows": rows}))


def installed(library: str) -> bool:
    from importlib.util import find_spec

    return find_spec(library) is not None


if __name__ == "__main__":
    main()
